"""Checks of a request by the API's own model, which botocore brings, before AWS sees it and without a network.

botocore itself looks at types and required members when it sends a request. Patterns, lengths and enumerations are in
the same model, and AWS alone looks at those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from botocore.model import Shape, StructureShape

_SHOWN = 60  # of a value


@cache
def request_shape() -> StructureShape | None:
    """Return the shape of CreateTrainingJob requests; `None` where botocore is not installed."""
    try:
        from botocore.loaders import create_loader
        from botocore.model import ServiceModel
    except ModuleNotFoundError:
        return None
    service = ServiceModel(create_loader().load_service_model("sagemaker", "service-2"))
    return service.operation_model("CreateTrainingJob").input_shape


def violations(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the members of *request* (``VpcConfig.Subnets``) that AWS would refuse, and why; none without botocore."""
    if (shape := request_shape()) is not None:
        yield from _violations(request, shape, "")


def _violations(value: Any, shape: Shape, name: str) -> Iterator[tuple[str, str]]:
    from botocore.validate import ParamValidator

    if shape.type_name == "structure" and isinstance(value, Mapping):
        for member in shape.required_members:
            if member not in value:
                yield name, f"{member} is missing"
        for key, each in value.items():
            if key not in shape.members:
                yield name, f"unknown key {key!r}{_nearest(key, shape.members)}"
            else:
                yield from _violations(each, shape.members[key], f"{name}.{key}".lstrip("."))
        return
    if shape.type_name not in ("list", "map"):
        report = ParamValidator().validate(value, shape)
        if report.has_errors():
            yield name, f"{_short(value)} is no {shape.type_name}"
            return
    elif not isinstance(value, (Mapping if shape.type_name == "map" else list)):
        yield name, f"{_short(value)} is no {shape.type_name}"
        return
    if why := _broken_rule(value, shape.metadata):
        yield name, why
    if shape.type_name == "list":
        for each in value:
            yield from _violations(each, shape.member, name)
    if shape.type_name == "map":
        for key, each in value.items():
            yield from _violations(key, shape.key, name)
            yield from _violations(each, shape.value, name)


def _broken_rule(value: Any, rules: Mapping[str, Any]) -> str:
    if isinstance(value, bool):
        return ""
    counted = not isinstance(value, (int, float))
    size = len(value) if counted else value
    what = f"{len(value)} {'characters' if isinstance(value, str) else 'entries'}" if counted else str(value)
    if "min" in rules and size < rules["min"]:
        return f"{what}; it takes {rules['min']} at least"
    if "max" in rules and size > rules["max"]:
        return f"{what}; it takes {rules['max']} at most"
    if "enum" in rules and value not in rules["enum"]:
        known = rules["enum"] if len(rules["enum"]) <= 10 else []
        return f"{_short(value)} is none of its values{_nearest(value, rules['enum'])}" + (
            f" ({', '.join(known)})" if known else ""
        )
    if "pattern" in rules and not _matches(rules["pattern"], value):
        return f"{_short(value)} does not match {rules['pattern']}"
    return ""


def _matches(pattern: str, value: str) -> bool:
    """Return whether *value* matches a pattern of the model, which is Java's: its classes stand inside brackets."""
    for java, ours in (("L", r"\w"), ("N", r"\d"), ("Z", r"\s"), ("Alnum", "A-Za-z0-9")):
        pattern = pattern.replace(f"\\p{{{java}}}", ours)
    try:
        return re.fullmatch(pattern, value) is not None
    except re.error:  # a class that Python has no word for: AWS says what it thinks of it
        return True


def _nearest(word: Any, known: Any) -> str:
    from orc.launchers.spec.problems import nearest

    return nearest(str(word), list(known))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
