"""Types of the values in job.yaml and clusters.yaml, shared by all models of jobs, clusters and backend options.

A `Reader` takes what YAML gave and returns the checked value, or raises `ValueError` with a message for people. It is
a function, and in an `Annotated` type it checks a field of a `FrozenModel`:

    class Options(FrozenModel):
        partition: Word | None = None
        timeout: Annotated[Number, seconds(1, 3600)] = 10.0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticUndefined

from orc.launchers.spec import grammar
from orc.launchers.spec.source import KeyPath, document_of


class FrozenModel(BaseModel):
    """Base of the models of job.yaml and clusters.yaml: immutable, without unknown keys, with checked copies."""

    # A model that is only a part of another one never needs a validator of its own: start-up time.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, serialize_by_alias=True)

    short_form: ClassVar[str] = ""  # the key that a bare text stands for
    other_forms: ClassVar[Sequence[Mapping[str, Any]]] = ()  # what else may be written for it, as JSON Schema

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return {cls.short_form: data} if cls.short_form and isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own: dict[str, Any] = handler(schema)
        others = [*([{"type": "string"}] if cls.short_form else []), *cls.other_forms]
        return {"anyOf": [own, *others]} if others else own

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed and checked. Raises `pydantic.ValidationError`."""
        del deep  # nothing inside changes
        return type(self).model_validate({**dict(self), **(update or {})}, by_name=True)


class Reader(BeforeValidator):
    """Function from a value of YAML to a checked one; in `Annotated`, the check of a field.

    *takes* is the type of what may be written, for editors; anything unless given.
    """

    def __init__(self, read: Callable[[Any], Any], takes: Any = Any) -> None:
        super().__init__(read, json_schema_input_type=takes)

    def __call__(self, value: Any) -> Any:
        """Return the checked *value*. Raises `ValueError`."""
        return self.func(value)  # type: ignore[call-arg]


def _reads_text(read: Callable[[Any], str]) -> Reader:
    return Reader(read, str)


@_reads_text
def text(value: Any) -> str:
    """Return a scalar as one line of printable text without blanks around it."""
    found = grammar.line(grammar.scalar_text(value).strip())
    if not found:
        raise ValueError("must not be empty")
    return found


@_reads_text
def word(value: Any) -> str:
    """Return a scalar as one line without blanks inside."""
    found: str = text(value)
    if any(character.isspace() for character in found):
        raise ValueError(f"{found!r} must not contain blanks")
    return found


@_reads_text
def argument(value: Any) -> str:
    """Return a scalar as one line that no program takes for an option."""
    found: str = text(value)
    if found.startswith("-"):
        raise ValueError(f"{found!r} must not begin with a dash")
    return found


@_reads_text
def path(value: Any) -> str:
    """Return an absolute path, here or on another machine; may begin with ``~``."""
    found = grammar.line(value)
    if not found.startswith(("/", "~/")) and found != "~":
        raise ValueError(f"{found!r} is not an absolute path")
    return found.rstrip("/") or "/"


def matching(pattern: str, what: str, example: str = "") -> Reader:
    """Return the reader of words of one form; *what* and *example* are for the message."""

    def read(value: Any) -> str:
        found: str = word(value)
        if not re.fullmatch(pattern, found):
            raise ValueError(f"{found!r} is not {what}" + (f"; write for example {example}" if example else ""))
        return found

    return Reader(read, str)


def one_of(*known: str | int) -> Reader:
    """Return the reader of some words or numbers."""

    def read(value: Any) -> str | int:
        if isinstance(value, bool) or value not in known:
            raise ValueError(f"expected {', '.join(map(str, known[:-1]))} or {known[-1]}, not {value!r}")
        return known[known.index(value)]

    return Reader(read, Literal[known])


def whole(minimum: int, maximum: int) -> Reader:
    """Return the reader of whole numbers between two bounds; digits in a text are one too."""

    def read(value: Any) -> int:
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        if isinstance(number, bool) or not isinstance(number, int) or not minimum <= number <= maximum:
            raise ValueError(f"expected a whole number from {minimum} to {maximum}, not {value!r}")
        return number

    return Reader(read, int)


def seconds(minimum: float, maximum: float) -> Reader:
    """Return the reader of durations between two bounds, in seconds."""

    def read(value: Any) -> float:
        number = grammar.seconds(value)
        if not minimum <= number <= maximum:
            raise ValueError(f"expected {minimum:.10g} to {maximum:.10g} seconds, not {value!r}")
        return number

    return Reader(read, float | str)


class _Several(Reader):
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        array = handler(schema)
        return {"anyOf": [array, array["items"]]}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, (str, int, Mapping)) else value


several = _Several(_listed, PydanticUndefined)  # takes one value alone for a list of one


def shell_lines(value: Any) -> tuple[str, ...]:
    """Return the lines of ``setup``: one text, or a list; blank ones are dropped."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)):
        raise ValueError("expected shell lines: one text or a list")
    return tuple(line for line in grammar.texts(lines) if line.strip())


Text = Annotated[str, Reader(grammar.scalar_text, str)]
Line = Annotated[str, Reader(grammar.line, str)]
Name = Annotated[str, Field(strict=True, min_length=1)]
Word = Annotated[str, word]
Argument = Annotated[str, argument]
PathText = Annotated[str, path]
Memory = Annotated[str, Reader(grammar.memory, str)]
Whole = Annotated[int, Strict()]
Port = Annotated[int, Strict(), Field(ge=1, le=65535)]
Flag = Annotated[bool, Strict()]
Number = int | float  # 30 stays 30 in what is rendered
Duration = Annotated[Number, BeforeValidator(grammar.seconds, json_schema_input_type=float | str)]

Variables = dict[Annotated[str, BeforeValidator(grammar.env_name)], Text]
ShellLines = Annotated[tuple[str, ...], BeforeValidator(shell_lines, json_schema_input_type=str | list[str])]

_Model = TypeVar("_Model", bound=BaseModel)


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys of a section as they are written."""
    return [field.alias or name for name, field in model.model_fields.items()]


def section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the model of the section at *path* of *model*, if it is one."""
    owner: type[BaseModel] | None = model
    for part in path:
        if not isinstance(part, int):  # the index of a list of sections
            field = field_at(owner, part) if owner else None
            owner = next(_sections(field.annotation), None) if field else None
    return owner


def field_at(model: type[BaseModel], key: str | int) -> FieldInfo | None:
    """Return the field that *key* is written for."""
    return next((field for name, field in model.model_fields.items() if key == (field.alias or name)), None)


def _sections(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _sections(inner)


def joined(base: BaseModel, own: _Model, *, whole: Sequence[str] = ()) -> _Model:
    """Return *own* over the same fields of *base*: lists go on, mappings are joined but for those of *whole*."""
    found = {name: getattr(base, name) for name in type(own).model_fields}
    for name in own.model_fields_set:
        value, before = getattr(own, name), found[name]
        if isinstance(value, tuple):
            value = (*before, *value)
        elif isinstance(value, dict) and name not in whole:
            value = {**before, **value}
        found[name] = value
    return type(own).model_construct(**found)


def validate_options(
    model: type[_Model],
    given: Mapping[str, Any],
    where: str,
    *,
    unknown: Callable[[str], str] | None = None,
) -> _Model:
    """Return the checked options of a backend.

    Args:
        model: What the options may be.
        given: The options; ``null`` means not given. With their places, where they were read from a file.
        where: Place for messages, of options that were not read from a file.
        unknown: What to say about an unknown key at the top, besides that it is unknown.

    Raises:
        SpecProblems: Every mistake with its place and, for unknown keys, the nearest key.
    """
    document = document_of(given, where)
    try:
        return model.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        from orc.launchers.spec.problems import SpecProblems, choose, translate

        def suggest(path: KeyPath, name: str) -> str:
            section = section_at(model, path)
            if unknown is not None and not path:
                return unknown(name)
            return choose(name, keys_of(section)) if section else ""

        raise SpecProblems(translate(error, document, suggest)) from None
