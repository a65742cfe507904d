"""Single values and sections of the options, and the tables that they name. Readers of values raise `ValueError`."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from orc.launchers.errors import SpecError
from orc.launchers.spec import grammar
from orc.launchers.spec.options import FrozenModel, Reader, matching, seconds, several, text, whole, word

_TAG = re.compile(r"[\w\s.:/=+@-]*")
OUR_CHANNELS = ("orc", "orc-attempt")
_ORC_VARIABLES = ("ORC_", "SM_")
_DURATION = seconds(1, 2**31 - 1)
_VERSION = matching(r"[0-9]+(?:\.[0-9]+)+", "a version like 2.5.1 (in quotes, or YAML drops zeros)")


def truth(value: Any) -> bool:
    """Return a truth value, given in words as well, because job files are made from command lines too."""
    if isinstance(value, bool):
        return value
    if value in ("True", "true", "False", "false"):
        return str(value).lower() == "true"
    raise ValueError(f"expected true or false, not {value!r}")


def whole_seconds(value: Any) -> int:
    """Return a duration, which SageMaker counts in whole seconds."""
    return int(_DURATION(value))


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
        if name in OUR_CHANNELS:
            raise ValueError(f"the channel {name} is orc's own; choose another name")
    return {str(name): entry for name, entry in given.items()}


def variables(value: Any) -> dict[str, str]:
    """Environment variables."""
    found = {name: grammar.scalar_text(each) for name, each in mapping(value).items()}
    for name in found:
        if name.startswith(_ORC_VARIABLES):
            raise ValueError(f"{name} is set by orc or SageMaker")
    return found


def _pairs(value: Any, key: str, other: str, what: str) -> list[tuple[str, Any]]:
    """Return the items of a mapping, which the SDK writes as a list of ``{key: ..., other: ...}``."""
    if isinstance(value, Mapping):
        return [(str(name), each) for name, each in value.items()]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a mapping of {what}, not {value!r}")
    for entry in value:
        if not isinstance(entry, Mapping) or set(entry) != {key, other}:
            raise ValueError(f"expected {{{key}: ..., {other}: ...}}, not {entry!r}")
    return [(str(entry[key]), entry[other]) for entry in value]


def tags(value: Any) -> dict[str, str]:
    """``{team: vision}``, or the SDK's ``[{Key: team, Value: vision}]``."""
    found = {key: grammar.scalar_text(each) for key, each in _pairs(value, "Key", "Value", "tags")}
    for key in found:
        if key.startswith(("orc:", "aws:")):
            raise ValueError(f"the tag {key} is not for jobs to set")
    return found


def is_tag(key: str, value: str) -> bool:
    """Return True for a tag that AWS takes."""
    return bool(key and _TAG.fullmatch(key) and _TAG.fullmatch(value) and len(key) <= 128 and len(value) <= 256)


def metrics(value: Any) -> tuple[dict[str, str], ...]:
    """``{loss: 'loss=([0-9.]+)'}``, or the SDK's ``[{Name: loss, Regex: ...}]``."""
    pairs = _pairs(value, "Name", "Regex", "metrics to regular expressions")
    return tuple({"Name": name, "Regex": str(regex)} for name, regex in pairs)


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


def read_table(path: str, where: str, columns: tuple[str, str]) -> tuple[dict[str, str], Path]:
    """Return the rows of a table, and its file; a relative *path* starts beside the file in *where*.

    Raises `SpecError`.
    """
    source = where.partition(":")[0]
    file = Path(source).parent if source.endswith((".yaml", ".yml")) else Path()
    file /= Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}", where=where) from None
    rows: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.split("\t")]
        if not line.strip() or (number == 1 and tuple(cells) == columns):
            continue
        if len(cells) != 2 or not all(cells):
            raise SpecError(f"expected {columns[0]} and {columns[1]}, separated by a tab", where=f"{file}:{number}")
        if cells[0] in rows:
            raise SpecError(f"{cells[0]} is listed twice", where=f"{file}:{number}")
        rows[cells[0]] = cells[1]
    return rows, file


def placed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the request from its members by their paths (``VpcConfig.Subnets``), without absent ones."""
    made: dict[str, Any] = {}
    for path, value in values.items():
        if value not in (None, ()):
            *parents, member = path.split(".")
            section = made
            for parent in parents:
                section = section.setdefault(parent, {})
            section[member] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
    return made


Text = Annotated[str, text]
Truth = Annotated[bool, Reader(truth)]


class Channel(FrozenModel):
    """Channel of data: the keys of the SDK's TrainingInput and FileSystemInput."""

    short_form = "s3_data"

    s3_data: Text | None = None
    distribution: Text = "FullyReplicated"
    s3_data_type: Text = "S3Prefix"
    compression: Text | None = None
    content_type: Text | None = None
    record_wrapping: Text | None = None
    input_mode: Text | None = None
    attribute_names: Annotated[tuple[Text, ...], several] | None = None
    shuffle_seed: Annotated[int, whole(0, 2**63 - 1)] | None = None
    file_system_id: Text | None = None
    file_system_type: Text | None = None
    directory_path: Text | None = None
    file_system_access_mode: Text = "ro"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.s3_data is None) == (self.file_system_id is None):
            raise ValueError("give either s3_data or file_system_id")
        if self.file_system_id and not (self.file_system_type and self.directory_path):
            raise ValueError("a file system needs file_system_type and directory_path")
        if self.file_system_id and self.input_mode not in (None, "File"):
            raise ValueError(f"a file system is mounted, input_mode {self.input_mode} is for S3")
        if (self.attribute_names is not None) != (self.s3_data_type == "AugmentedManifestFile"):
            raise ValueError("attribute_names and s3_data_type AugmentedManifestFile go together")
        return self

    def members(self) -> dict[str, Any]:
        """Return the channel as a part of the request."""
        other = "S3DataSource" if self.file_system_id else "FileSystemDataSource"
        return placed({path: getattr(self, key) for key, path in CHANNEL_MEMBERS.items() if other not in path})


# Key of a channel -> the member of the request that it is.
CHANNEL_MEMBERS = {
    "s3_data": "DataSource.S3DataSource.S3Uri",
    "distribution": "DataSource.S3DataSource.S3DataDistributionType",
    "s3_data_type": "DataSource.S3DataSource.S3DataType",
    "attribute_names": "DataSource.S3DataSource.AttributeNames",
    "file_system_id": "DataSource.FileSystemDataSource.FileSystemId",
    "file_system_type": "DataSource.FileSystemDataSource.FileSystemType",
    "directory_path": "DataSource.FileSystemDataSource.DirectoryPath",
    "file_system_access_mode": "DataSource.FileSystemDataSource.FileSystemAccessMode",
    "compression": "CompressionType",
    "content_type": "ContentType",
    "record_wrapping": "RecordWrapperType",
    "input_mode": "InputMode",
    "shuffle_seed": "ShuffleConfig.Seed",
}


class Switch(FrozenModel):
    """Form of distribution that is on or off."""

    enabled: Truth = False


class Mpi(Switch):
    """Distribution over MPI."""

    processes_per_host: Annotated[int, whole(1, 1024)] | None = None
    custom_mpi_options: Text | None = None


class SmDistributed(FrozenModel):
    """SageMaker's own libraries."""

    dataparallel: Switch = Switch.model_construct()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "modelparallel" in data:
            raise ValueError("modelparallel is not supported; shard the model with orc.runtime instead")
        return data


class Distribution(FrozenModel):
    """The estimators' ``distribution``: at most one form of it is enabled."""

    torch_distributed: Switch | None = None
    pytorchddp: Switch | None = None
    mpi: Mpi | None = None
    smdistributed: SmDistributed | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.smdistributed and (others := [name for name in self.model_fields_set if name != "smdistributed"]):
            raise ValueError(f"smdistributed cannot be combined with {', '.join(sorted(others))}")
        if len(on := self._enabled()) > 1:
            raise ValueError(f"only one of {' and '.join(on)} can be enabled")
        return self

    @property
    def kind(self) -> Literal["torchrun", "mpi", "data_parallel", "none"]:
        """Return the form that is enabled, as a kind of launcher."""
        if self.smdistributed:
            return "data_parallel" if self.smdistributed.dataparallel.enabled else "none"
        on = self._enabled()
        return "none" if not on else "mpi" if on == ["mpi"] else "torchrun"

    @property
    def processes_per_host(self) -> int | None:
        """Number of processes, which MPI alone is told."""
        return self.mpi.processes_per_host if self.mpi and self.kind == "mpi" else None

    @property
    def arguments(self) -> list[str]:
        """Options of mpirun."""
        return shlex.split(self.mpi.custom_mpi_options or "") if self.mpi and self.kind == "mpi" else []

    def _enabled(self) -> list[str]:
        forms = {"torch_distributed": self.torch_distributed, "pytorchddp": self.pytorchddp, "mpi": self.mpi}
        return [name for name, form in forms.items() if form and form.enabled]
