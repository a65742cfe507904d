"""Reading single values of the options: what may be written, and what it means. Each raises `ValueError`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orc.launchers.spec import grammar
from orc.launchers.spec.options import Reader, matching, one_of, seconds, text, whole, word

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
_TAG = re.compile(r"[\w\s.:/=+@-]*")
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
OUR_CHANNELS = ("orc", "orc-attempt")
_PARAMETER = re.compile(r"[A-Z][A-Za-z0-9]*")
_ORC_VARIABLES = ("ORC_", "SM_")
MAX_VARIABLE = 512


@Reader
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


def several(item: Reader, most: int = 100) -> Reader:
    """Return the reader of lists; one value alone is short for a list of one."""

    def read(value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ValueError("the list is empty")
        if len(values) > most:
            raise ValueError(f"{len(values)} entries; SageMaker takes {most}")
        return tuple(item(each) for each in values)

    return Reader(read)


@Reader
def mapping(value: Any) -> dict[str, Any]:
    """A mapping whose keys are words."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping, not {value!r}")
    return {word(key): each for key, each in value.items()}


def section(known: Mapping[str, Reader], *needed: str) -> Reader:
    """A section of the request in the API's own words."""

    def read(value: Any) -> dict[str, Any]:
        given = mapping(value)
        for key in given:
            if key not in known:
                from orc.launchers.spec.problems import choose

                raise ValueError(f"unknown key {key!r}{choose(key, list(known))}")
        for key in needed:
            if key not in given:
                raise ValueError(f"{key} is missing")
        found = {}
        for key, each in given.items():
            try:
                found[key] = known[key](each)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        return found

    return Reader(read)


@Reader
def parameters(value: Any) -> dict[str, str]:
    """A mapping of short texts whose keys are in the API's words, like ``DetailedProfilingConfig``."""
    found = {key: grammar.scalar_text(each) for key, each in mapping(value).items()}
    for key in found:
        if not _PARAMETER.fullmatch(key):  # the SDK would send it in another spelling
            raise ValueError(f"{key!r} is not a name in the API's words, like DetailedProfilingConfig")
    if len(found) > 20 or any(len(each) > 256 for each in (*found, *found.values())):
        raise ValueError("SageMaker takes 20 entries, with 256 characters each")
    return found


@Reader
def s3_uri(value: Any) -> str:
    """``s3://bucket/prefix``."""
    found: str = word(value)
    if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", found) or len(found) > 1024:
        raise ValueError(f"{found!r} is not an S3 URI; write for example s3://my-bucket/data")
    return found


@Reader
def data_uri(value: Any) -> str:
    """``s3://bucket/prefix``, or ``file:///directory`` for jobs that run on this machine."""
    found: str = word(value) if str(value).startswith("file:///") else s3_uri(value)
    return found


@Reader
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


@Reader
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


@Reader
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


# A channel's own keys: those of the SDK's TrainingInput and FileSystemInput.
_INPUT: Mapping[str, Reader] = {
    "s3_data": data_uri,
    "distribution": one_of("FullyReplicated", "ShardedByS3Key"),
    "s3_data_type": one_of("S3Prefix", "ManifestFile", "AugmentedManifestFile"),
    "compression": one_of("None", "Gzip"),
    "content_type": text,
    "record_wrapping": one_of("None", "RecordIO"),
    "input_mode": one_of("File", "Pipe", "FastFile"),
    "attribute_names": several(text, 16),
    "shuffle_seed": whole(0, 2**63 - 1),
    "file_system_id": matching(r"fs-[0-9a-f]{8,18}", "the id of a file system, like fs-0123456789abcdef0"),
    "file_system_type": one_of("EFS", "FSxLustre"),
    "directory_path": matching(r"/.*", "an absolute path"),
    "file_system_access_mode": one_of("ro", "rw"),
}


@Reader
def inputs(value: Any) -> dict[str, dict[str, Any]]:
    """Channels by name; ``s3://...`` alone is the channel ``training``."""
    given = value if isinstance(value, Mapping) else {"training": value}
    found = {}
    for name, entry in given.items():
        if not isinstance(name, str) or not _CHANNEL.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a channel: letters, digits, dots and dashes")
        if name in OUR_CHANNELS:
            raise ValueError(f"the channel {name} is orc's own; choose another name")
        found[name] = _input(name, entry)
    if len(found) > 20 - len(OUR_CHANNELS):
        raise ValueError(f"{len(found)} channels; there is room for {20 - len(OUR_CHANNELS)}")
    return found


def _input(name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        entry = {"s3_data": entry}
    for key in entry:
        if key not in _INPUT:
            from orc.launchers.spec.problems import choose

            raise ValueError(f"{name}: unknown key {key!r}{choose(str(key), list(_INPUT))}")
    try:
        found = {key: _INPUT[key](each) for key, each in entry.items()}
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if ("s3_data" in found) == ("file_system_id" in found):
        raise ValueError(f"{name}: give either s3_data or file_system_id")
    if "file_system_id" in found and not {"file_system_type", "directory_path"} <= found.keys():
        raise ValueError(f"{name}: a file system needs file_system_type and directory_path")
    if "file_system_id" in found and found.get("input_mode", "File") != "File":
        raise ValueError(f"{name}: a file system is mounted, input_mode {found['input_mode']} is for S3")
    if ("attribute_names" in found) != (found.get("s3_data_type") == "AugmentedManifestFile"):
        raise ValueError(f"{name}: attribute_names and s3_data_type AugmentedManifestFile go together")
    return found


@Reader
def prices(value: Any) -> dict[str, float]:
    """Instance type -> price of one instance for one hour."""
    found = {}
    for name, each in mapping(value).items():
        if isinstance(each, bool) or not isinstance(each, (int, float)) or each < 0:
            raise ValueError(f"{name}: expected the price of an hour, not {each!r}")
        found[name] = float(each)
    return found


@Reader
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


# The estimators' `distribution`, and where each form leads.
@Reader
def distribution(value: Any) -> dict[str, Any]:
    """``{"kind": torchrun | mpi | data_parallel | none, ...}`` from the estimator's ``distribution``."""
    given = mapping(value)
    enabled = {}
    for name, section in given.items():
        if name not in ("torch_distributed", "pytorchddp", "mpi", "smdistributed"):
            known = "torch_distributed, pytorchddp, mpi, smdistributed"
            raise ValueError(f"{name!r} cannot be carried; known are {known}")
        if not isinstance(section, Mapping):
            raise ValueError(f"{name}: expected a mapping like {{enabled: true}}, not {section!r}")
        enabled[name] = dict(section)
    if "smdistributed" in enabled:
        return _smdistributed(enabled.pop("smdistributed"), enabled)
    on = [name for name, section in enabled.items() if truth(section.get("enabled", False))]
    if len(on) > 1:
        raise ValueError(f"only one of {' and '.join(on)} can be enabled")
    if not on:
        return {"kind": "none"}
    section = enabled[on[0]]
    if on[0] == "mpi":
        return _mpi(section)
    _no_more(on[0], section, ("enabled",))
    return {"kind": "torchrun"}


def _smdistributed(section: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    if "modelparallel" in section:
        raise ValueError("smdistributed.modelparallel is not supported; shard the model with orc.runtime instead")
    _no_more("smdistributed", section, ("dataparallel",))
    if others:
        raise ValueError(f"smdistributed cannot be combined with {', '.join(others)}")
    inner = section.get("dataparallel") or {}
    _no_more("smdistributed.dataparallel", inner, ("enabled",))
    return {"kind": "data_parallel" if truth(inner.get("enabled", False)) else "none"}


def _mpi(section: Mapping[str, Any]) -> dict[str, Any]:
    _no_more("mpi", section, ("enabled", "processes_per_host", "custom_mpi_options"))
    found: dict[str, Any] = {"kind": "mpi"}
    if "processes_per_host" in section:
        found["processes_per_host"] = whole(1, 1024)(section["processes_per_host"])
    if section.get("custom_mpi_options"):
        import shlex

        found["arguments"] = shlex.split(text(section["custom_mpi_options"]))
    return found


def _no_more(name: str, section: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in section:
        if key not in known:
            raise ValueError(f"{name}.{key} cannot be carried; known are {', '.join(known)}")
