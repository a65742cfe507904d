"""Frozen models on pydantic's validation core.

`pydantic_core` is the engine below pydantic's `BaseModel`: the same errors with the same locations, unknown keys
refused, unions, defaults. The models here hand their schema to the engine themselves, because importing pydantic's
class layer costs more time than the rest of ``orc render`` together (docs/reference/job-yaml.md, "Start-up time").
They remain pydantic types: `__get_pydantic_core_schema__` is pydantic's protocol for that, so `TypeAdapter(JobSpec)`,
a `JobSpec` field of a `BaseModel` and FastAPI all work, and `model_json_schema` is made by pydantic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from pydantic_core import CoreSchema, SchemaValidator, core_schema

_MISSING = dataclasses.MISSING


def setting(
    schema: CoreSchema,
    *,
    default: Any = _MISSING,
    default_factory: Callable[[], Any] | None = None,
    doc: str,
    section: type[Model] | None = None,
) -> Any:
    """A field of a `Model`: how its value is checked, what it is when not given, and one sentence about it.

    *section* is the model of a section that may be missing altogether; a `default_factory` says so by itself.
    """
    metadata = {"schema": schema, "doc": doc, "section": section}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_M = TypeVar("_M", bound="Model")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting,))
def model(cls: type[_M]) -> type[_M]:
    """Class decorator: a frozen dataclass whose constructor validates."""
    # The methods are inherited from Model: generating them costs about a millisecond per class at every start.
    made = dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False, kw_only=True)(cls)
    made.core_schema = _core_schema(made)
    return made


class Model:
    """Base of the models: pydantic's method names, pydantic's errors (`pydantic_core.ValidationError`)."""

    core_schema: ClassVar[CoreSchema]
    _validator: ClassVar[SchemaValidator]

    def __init__(self, **data: Any) -> None:
        self.validator().validate_python(data, self_instance=self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mappings inside are not hashable either

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    @classmethod
    def before(cls, data: Any) -> Any:
        """Hook: rewrite short forms (a bare string for a mapping) before the fields are checked."""
        return data

    def check(self) -> None:
        """Hook: cross-checks over several fields. Raises `LocatedError`."""

    @classmethod
    def validator(cls) -> SchemaValidator:
        """The compiled validator, made on first use."""
        if "_validator" not in cls.__dict__:
            cls._validator = SchemaValidator(cls.core_schema)
        return cls._validator

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """A checked instance from a mapping (or an instance). Raises `pydantic_core.ValidationError`."""
        checked: Self = cls.validator().validate_python(data)
        return checked

    def model_dump(self, *, mode: str = "python", exclude_defaults: bool = False) -> dict[str, Any]:
        """The fields as a dict; ``mode="json"`` holds JSON types only. `model_validate` reads it back."""
        dumped: dict[str, Any] = {}
        for field in fields(type(self)):
            value = getattr(self, field.name)
            if exclude_defaults and value == _default(field):
                continue
            dumped[field.name] = _dump(value, mode, exclude_defaults)
        return dumped

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """A checked copy with some fields changed. Raises `pydantic_core.ValidationError`."""
        return type(self).model_validate({**self.model_dump(), **update})

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The JSON schema of the input, for editors and for the REST API. Imports pydantic."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).json_schema()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return cls.core_schema


def section_of(field: dataclasses.Field[Any] | None) -> type[Model] | None:
    """The model of a field that is a section of its own."""
    if field is None:
        return None
    factory = field.metadata.get("section") or field.default_factory
    return factory if isinstance(factory, type) and issubclass(factory, Model) else None


def fields(cls: type[Model]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a model, in order."""
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not _MISSING else field.default


def _dump(value: Any, mode: str, exclude_defaults: bool) -> Any:
    if isinstance(value, Model):
        return value.model_dump(mode=mode, exclude_defaults=exclude_defaults)
    if isinstance(value, Mapping):
        return {key: _dump(item, mode, exclude_defaults) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_dump(item, mode, exclude_defaults) for item in value]
        return items if mode == "json" or isinstance(value, list) else tuple(items)
    return value


def _checked(instance: Model) -> Model:
    instance.check()
    return instance


def _core_schema(cls: type[Model]) -> CoreSchema:
    arguments = []
    for field in fields(cls):
        schema = field.metadata["schema"]
        if field.default_factory is not _MISSING:
            schema = core_schema.with_default_schema(schema, default_factory=field.default_factory)
        elif field.default is not _MISSING:
            schema = core_schema.with_default_schema(schema, default=field.default)
        docs = {"pydantic_js_updates": {"description": field.metadata["doc"]}}
        arguments.append(core_schema.dataclass_field(field.name, schema, kw_only=True, metadata=docs))
    schema = core_schema.dataclass_schema(
        cls,
        core_schema.dataclass_args_schema(cls.__name__, arguments, extra_behavior="forbid"),
        [field.name for field in fields(cls)],
        frozen=True,
        metadata={"pydantic_js_updates": {"additionalProperties": False}},
        ref=f"{cls.__module__}.{cls.__qualname__}",
    )
    schema = core_schema.no_info_after_validator_function(_checked, schema)
    return core_schema.no_info_before_validator_function(cls.before, schema)
