"""JSON form of views: what a dataclass says of its fields is the one schema, for writing and for reading.

`encode` and `decode` are derived from the types of the fields; so is the OpenAPI description of the service, by
pydantic. A newer service may send keys that this version does not know: they are left out. What an older one does not
send has its default.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Union, cast

if TYPE_CHECKING:
    from typing import Self

_PLAIN: Mapping[Any, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}


class View:
    """Base of the frozen values that callers get: each has a JSON-able form."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @classmethod
    def from_record(cls, record: object, **given: Any) -> Self:
        """Return the view of *record*: its fields of the same names, but for those that are *given*."""
        return cls(
            **{name: getattr(record, name) for name in _names(cast(Hashable, cls)) if name not in given}, **given
        )


@functools.cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast(Any, kind)))


def encode(value: Any) -> Any:
    """Return the JSON-able form of *value*: of dataclasses, and of what holds them."""
    if value is None or isinstance(value, (str, int, float)):
        return value.value if isinstance(value, Enum) else value
    if is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _names(cast(Hashable, type(value)))}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def decode(kind: Any, data: Any) -> Any:
    """Return the value of type *kind* of which `encode` gave *data*.

    Raises:
        KeyError: A field without a default is missing.
        TypeError: *data* has another form.
        ValueError: A value is none that *kind* can have.
    """
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return decode(typing.get_args(kind)[0], data)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data)
    if origin is not None:
        return _decode_container(origin, typing.get_args(kind), data)
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_dataclass(kind, data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind in _PLAIN and (not isinstance(data, _PLAIN[kind]) or (isinstance(data, bool) and kind is not bool)):
        raise TypeError(f"{data!r:.80} is no {kind.__name__}")
    return data


def _decode_union(kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in kinds:
        return None
    failure: Exception = TypeError("nothing of that")
    for kind in kinds:
        if kind is not type(None):
            try:
                return decode(kind, data)
            except (TypeError, ValueError, KeyError) as error:
                failure = error
    raise failure


def _decode_container(origin: Any, items: tuple[Any, ...], data: Any) -> Any:
    if issubclass(origin, Mapping):
        key, value = items
        return {(int(name) if key is int else name): decode(value, item) for name, item in dict(data).items()}
    if issubclass(origin, Sequence):
        if not isinstance(data, (list, tuple)):
            raise TypeError(f"{data!r:.80} is no list")
        decoded = [decode(items[0], item) for item in data]
        return tuple(decoded) if origin is tuple else decoded
    return data


def _decode_dataclass(kind: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.80} is no object")
    given: dict[str, Any] = {}
    for field, hint in _fields(kind):
        if field.name in data:
            given[field.name] = decode(hint, data[field.name])
    try:
        return kind(**given)
    except TypeError as error:
        raise KeyError(str(error)) from None


@functools.cache
def _fields(kind: type) -> tuple[tuple[Any, Any], ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((field, hints[field.name]) for field in fields(kind) if field.init)
