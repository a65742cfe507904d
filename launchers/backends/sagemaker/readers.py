"""Readers of single values of the options. Each raises `ValueError`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orc.launchers.spec import grammar
from orc.launchers.spec.options import Reader, matching, seconds, word

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
_TAG = re.compile(r"[\w\s.:/=+@-]*")
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
OUR_CHANNELS = ("orc", "orc-attempt")
_PARAMETER = re.compile(r"[A-Z][A-Za-z0-9]*")
_ORC_VARIABLES = ("ORC_", "SM_")
_VERSION = matching(r"[0-9]+(?:\.[0-9]+)+", "a version like 2.5.1 (in quotes, or YAML drops zeros)")
MAX_VARIABLE = 512


def truth(value: Any) -> bool:
    """Return a truth value, given in words as well, because job files are made from command lines too."""
    if isinstance(value, bool):
        return value
    if value in ("True", "true", "False", "false"):
        return str(value).lower() == "true"
    raise ValueError(f"expected true or false, not {value!r}")


def whole_seconds(minimum: int, maximum: int) -> Reader:
    """Return the reader of durations, which SageMaker counts in whole seconds."""
    read = seconds(minimum, maximum)
    return Reader(lambda value: int(read(value)))


def several(most: int) -> Reader:
    """Return the reader of lists that are not empty; one value alone is short for a list of one."""

    def read(value: Any) -> Any:
        values = value if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ValueError("the list is empty")
        if len(values) > most:
            raise ValueError(f"{len(values)} entries; SageMaker takes {most}")
        return values

    return Reader(read)


def stock_version(value: Any) -> str:
    """Return a version of what stock images hold. YAML takes 2.10 for the number 2.1, which is another one."""
    version = str(_VERSION(value))
    if isinstance(value, float):
        from orc.launchers.backends.sagemaker.images import HUGGINGFACE, PYTORCH

        known = [*PYTORCH, *(each for each, _ in HUGGINGFACE)]
        if any(each.startswith(f"{version}0") for each in known):
            raise ValueError(
                f"{version} may have been written as {version}0, which is the same number; put it in quotes"
            )
    return version


def precision(value: Any) -> Any:
    """Return a mixed precision, as the runtime has it."""
    from orc.runtime.core.config import KEYS

    return KEYS["mixed_precision"].parse(value)


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping whose keys are words."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping, not {value!r}")
    return {word(key): each for key, each in value.items()}


def named_channels(value: Any) -> dict[str, Any]:
    """Return channels by name; ``s3://...`` alone is the channel ``training``."""
    given = value if isinstance(value, Mapping) else {"training": value}
    for name in given:
        if not isinstance(name, str) or not _CHANNEL.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a channel: letters, digits, dots and dashes")
        if name in OUR_CHANNELS:
            raise ValueError(f"the channel {name} is orc's own; choose another name")
    if len(given) > 20 - len(OUR_CHANNELS):
        raise ValueError(f"{len(given)} channels; there is room for {20 - len(OUR_CHANNELS)}")
    return dict(given)


def parameters(value: Any) -> dict[str, str]:
    """A mapping of short texts whose keys are in the API's words, like ``DetailedProfilingConfig``."""
    found = {key: grammar.scalar_text(each) for key, each in mapping(value).items()}
    for key in found:
        if not _PARAMETER.fullmatch(key):  # the SDK would send it in another spelling
            raise ValueError(f"{key!r} is not a name in the API's words, like DetailedProfilingConfig")
    if len(found) > 20 or any(len(each) > 256 for each in (*found, *found.values())):
        raise ValueError("SageMaker takes 20 entries, with 256 characters each")
    return found


def s3_uri(value: Any) -> str:
    """``s3://bucket/prefix``."""
    found = str(word(value))
    if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", found) or len(found) > 1024:
        raise ValueError(f"{found!r} is not an S3 URI; write for example s3://my-bucket/data")
    return found


def data_uri(value: Any) -> str:
    """``s3://bucket/prefix``; ``file:///directory`` is refused later, with the name of the channel."""
    return str(word(value)) if str(value).startswith("file:///") else s3_uri(value)


def variables(value: Any) -> dict[str, str]:
    """Environment variables."""
    found = {name: grammar.scalar_text(each) for name, each in mapping(value).items()}
    for name, each in found.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a variable")
        if name.startswith(_ORC_VARIABLES):
            raise ValueError(f"{name} is set by orc or SageMaker")
        if len(each) > MAX_VARIABLE:
            raise ValueError(f"{name}: SageMaker takes {MAX_VARIABLE} characters; the job's own `env` takes more")
    return found


def tags(value: Any) -> dict[str, str]:
    """``{team: vision}``, or the SDK's ``[{Key: team, Value: vision}]``."""
    if isinstance(value, (list, tuple)):
        pairs = {}
        for entry in value:
            if not isinstance(entry, Mapping) or set(entry) != {"Key", "Value"}:
                raise ValueError(f"expected {{Key: ..., Value: ...}}, not {entry!r}")
            pairs[entry["Key"]] = entry["Value"]
        value = pairs
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of tags, not {value!r}")
    found = {str(key): grammar.scalar_text(each) for key, each in value.items()}
    for key, each in found.items():
        if not is_tag(key, each):
            raise ValueError(f"{key}={each!r} cannot be a tag at AWS: letters, digits, blanks and _.:/=+-@ only")
        if key.startswith(("orc:", "aws:")):
            raise ValueError(f"the tag {key} is not for jobs to set")
    return found


def is_tag(key: str, value: str) -> bool:
    """Return True for a tag that AWS takes."""
    return bool(key and _TAG.fullmatch(key) and _TAG.fullmatch(value) and len(key) <= 128 and len(value) <= 256)


def metrics(value: Any) -> tuple[dict[str, str], ...]:
    """``{loss: 'loss=([0-9.]+)'}``, or the SDK's ``[{Name: loss, Regex: ...}]``."""
    if isinstance(value, Mapping):
        value = [{"Name": name, "Regex": regex} for name, regex in value.items()]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a mapping of metrics to regular expressions, not {value!r}")
    found = []
    for entry in value:
        if not isinstance(entry, Mapping) or set(entry) != {"Name", "Regex"}:
            raise ValueError(f"expected {{Name: ..., Regex: ...}}, not {entry!r}")
        name, regex = str(entry["Name"]), str(entry["Regex"])
        try:
            groups = re.compile(regex).groups
        except re.error as error:
            raise ValueError(f"{name}: {regex!r} is not a regular expression: {error}") from None
        if not groups:
            raise ValueError(f"{name}: {regex!r} has no group in parentheses: the metric's value is taken from it")
        if not name or len(name) > 255 or len(regex) > 500:
            raise ValueError(f"{name}: names have 255 characters at most, expressions 500")
        found.append({"Name": name, "Regex": regex})
    if len(found) > 40:
        raise ValueError(f"{len(found)} metrics; SageMaker takes 40")
    return tuple(found)


def distributed_type(value: Any) -> str:
    """``NO`` or ``DATA_PARALLEL``, in the spellings of configuration files."""
    found = str(value).upper().replace(" ", "_").replace("-", "_")
    found = found.removeprefix("SAGEMAKER_")
    found = {"NONE": "NO", "FALSE": "NO", "DATA_PARALLELISM": "DATA_PARALLEL"}.get(found, found)
    if found.startswith("MODEL_PARALLEL"):
        raise ValueError(
            "model parallelism of SageMaker is not supported; shard the model with orc.runtime (FSDP, TP) instead"
        )
    if found not in ("NO", "DATA_PARALLEL"):
        raise ValueError(f"expected NO or DATA_PARALLEL, not {value!r}; other strategies go under `runtime:`")
    return found
