"""Layout of checkpoints: the documented names of files, the manifest that lists them, and numbered directories."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state.ownership import forget_dead
from orc.runtime.checkpoint.storage.durable import FileRecord, checksums, remove_tree, replaced_name, sync_directory
from orc.runtime.core.names import safe_relative_name

if TYPE_CHECKING:
    from orc.runtime.core.prepared import Prepared

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
CUSTOM_NAME = "custom_checkpoint"
FSDP_MODEL_NAME = "pytorch_model_fsdp"
SHARD_METADATA = ".metadata"
MARK_PREFIX = ".orc-shared-"  # of files by which machines find out that they share a directory
MARK = re.compile(re.escape(MARK_PREFIX) + r"[0-9a-f]{16}-\d+")  # what a process that died while looking may leave
# Folders of shards: of a model, of an optimizer; without a number DeepSpeed's, of both.
SHARDS = re.compile(r"(?:pytorch_model|pytorch_model_fsdp|optimizer)_\d+|pytorch_model")
SHARD = re.compile(r"((?:pytorch_model|optimizer)_\d+)/__\d+_\d+\.distcp")
RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def numbered(name: str, index: int, suffix: str) -> str:
    """``optimizer.bin`` for the first, ``optimizer_1.bin`` for the second, and so on."""
    return f"{name}.{suffix}" if index == 0 else f"{name}_{index}.{suffix}"


def model_file(index: int, safe: bool = True) -> str:
    """The weights of model *index*."""
    return numbered(SAFE_MODEL_NAME, index, "safetensors") if safe else numbered(MODEL_NAME, index, "bin")


def files_of_rest(prepared: Prepared) -> Iterator[tuple[str, Any, str]]:
    """Yield the file of each object but models and optimizers, the object, and its kind (``loader`` is one)."""
    for index, scheduler in enumerate(prepared.schedulers):
        yield numbered(SCHEDULER_NAME, index, "bin"), scheduler, "scheduler"
    for index, loader in enumerate(prepared.dataloaders):
        yield numbered(SAMPLER_NAME, index, "bin"), loader, "loader"
    if (scaler := prepared.current_scaler()) is not None:
        yield SCALER_NAME, scaler, "scaler"
    for index, registered in enumerate(prepared.custom):
        yield f"{CUSTOM_NAME}_{index}.pkl", registered, "custom"


def random_states_file(rank: int) -> str:
    """The generators of *rank*."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def model_shards(index: int) -> str:
    """Folder of the shards of model *index*."""
    return f"{MODEL_NAME}_{index}"


def optimizer_shards(index: int) -> str:
    """Folder of the shards of optimizer *index*."""
    return f"{OPTIMIZER_NAME}_{index}"


def shard_file(folder: str, rank: int) -> str:
    """The shards in *folder* that *rank* writes."""
    return f"{folder}/__{rank}_0.distcp"


def shard_metadata(folder: str) -> str:
    """Return the file of *folder* that lists its shards."""
    return f"{folder}/{SHARD_METADATA}"


NAME = "manifest.json"
FORMAT = 4


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint. ``step`` counts optimizer steps; times are seconds since the epoch.

    ``epoch`` and ``offset`` (samples over all ranks) are where training goes on. On object stores, ``prefix`` stands
    before the names of files that took the place of others. ``random_states`` are the ranks whose random states are
    among the files; `None` for all of them. ``norms`` are the usual gradient norms by which updates are vetoed, each
    with the number of updates that it was taken from.
    """

    id: str
    step: int
    epoch: int
    offset: int
    world_size: int
    created_at: float
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    prefix: str = ""
    random_states: tuple[int, ...] | None = None
    norms: tuple[tuple[float, float], ...] = ()

    def to_json(self) -> bytes:
        """The content of the file."""
        fields = asdict(self)
        files = fields.pop("files")
        optional = ("prefix", "random_states", "norms")
        data = {"format": FORMAT, **{name: value for name, value in fields.items() if value or name not in optional}}
        data["files"] = dict(sorted(files.items()))
        data["own_checksum"] = _own_checksum(data)
        return (json.dumps(data, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Inverse of `to_json`. Raises `ValueError` for anything else."""
        raw = json.loads(data)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"format {raw.get('format') if isinstance(raw, dict) else raw!r}, expected {FORMAT}")
        own = raw.pop("own_checksum", None)
        try:
            prefix = str(raw.get("prefix", ""))
            for name in raw["files"]:  # checkpoints are passed around: theirs may be the names of any files
                safe_relative_name(name)
                safe_relative_name(prefix + name)
            ranks = raw.get("random_states")
            manifest = cls(
                str(raw["id"]),
                int(raw["step"]),
                int(raw["epoch"]),
                int(raw["offset"]),
                int(raw["world_size"]),
                float(raw["created_at"]),
                {name: FileRecord(int(record["size"]), int(record["sum"])) for name, record in raw["files"].items()},
                prefix,
                None if ranks is None else tuple(int(rank) for rank in ranks),
                tuple((float(average), float(seen)) for average, seen in raw.get("norms", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if own != _own_checksum(raw):
            raise ValueError("it does not hold what was written: its own checksum differs")
        return manifest


def _own_checksum(data: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's content *data*, however it is laid out in the file."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def locate(directory: Path) -> Path:
    """*directory*, or where its content is while it is being replaced on a file system that cannot swap names."""
    replaced = replaced_name(directory)
    return replaced if not directory.exists() and replaced.exists() else directory


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint *directory*. Raises `CheckpointError` when it is none."""
    if not directory.exists():
        raise CheckpointError(f"{directory}: there is no such checkpoint")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file, not a checkpoint directory")
    return manifest_from(directory, (directory / NAME).read_bytes)


def manifest_from(directory: object, read: Callable[[], bytes]) -> Manifest:
    """Return the manifest of *directory* that *read* reads. Raises `CheckpointError` when it is none."""
    try:
        return Manifest.from_json(read())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {NAME}: it is no complete checkpoint. Either saving it was interrupted, or it was "
            "written by another program"
        ) from None
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}/{NAME} cannot be read: {error}") from None


def wrong_sizes(manifest: Manifest, size: Callable[[str], int | None]) -> list[str]:
    """Return the files of *manifest* that are missing, cut off or too long, one line each; *size* gives bytes."""
    problems = []
    for name, record in manifest.files.items():
        if (there := size(name)) is None:
            problems.append(f"{name} is missing")
        elif there != record.size:
            problems.append(f"{name} has {there} bytes instead of {record.size}")
    return problems


def size_problems(directory: Path, manifest: Manifest) -> list[str]:
    """Return what `wrong_sizes` says of *directory*."""

    def size(name: str) -> int | None:
        try:
            return (directory / name).stat().st_size
        except OSError:
            return None

    return wrong_sizes(manifest, size)


def content_problems(directory: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the files *names* that do not hold what was written, a line each. Reads them whole."""
    names = list(names)
    problems = []
    for name, record in zip(names, checksums([directory / name for name in names]), strict=True):
        if isinstance(record, OSError):
            problems.append(f"{name} cannot be read: {record}")
        elif record != manifest.files[name]:
            problems.append(f"{name} does not hold what was saved (checksum differs)")
    return problems


def foreign_entries(directory: Path) -> set[str]:
    """Entries of *directory* that no save of ours wrote."""
    names = {entry.name for entry in directory.iterdir()}
    try:
        return names - {name.partition("/")[0] for name in read_manifest(directory).files} - {NAME}
    except CheckpointError:
        return names - {NAME}


def damaged(directory: object, problems: list[str]) -> CheckpointError:
    """The error for a checkpoint with *problems*."""
    return CheckpointError(f"{directory} is damaged: {'; '.join(problems)}. Nothing was loaded; use another checkpoint")


def examined(
    directory: Path, share: int, readers: int, identity: str | None
) -> tuple[Manifest | None, tuple[str, str] | None]:
    """Return the manifest of *directory*, and why that is not the checkpoint of this *identity*, if so.

    That is ``lacking`` or ``damaged``, and the text. Of its files every one of *readers* reads its *share*.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return None, ("damaged" if directory.exists() else "lacking", str(error))
    if identity not in (None, manifest.id):
        return None, ("lacking", f"{directory} is another checkpoint of this name")
    problems = size_problems(directory, manifest)
    problems = problems or content_problems(directory, manifest, sorted(manifest.files)[share::readers])
    return manifest, ("damaged", str(damaged(directory, problems))) if problems else None


def plain(value: Any) -> Any:
    """*value* with NumPy scalars as Python numbers, which a weights-only load accepts."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value


NUMBERED = re.compile(r"checkpoint_(\d+)")
_LEFT_OVER = re.compile(r"checkpoint_\d+(\.replaced|\.site-\d+)?\.(tmp|replaced)")


@dataclass(frozen=True)
class CheckpointRoot:
    """A directory of ``checkpoint_<n>``; *n* grows and is never used twice."""

    path: Path

    def committed(self) -> list[tuple[int, Path]]:
        """Complete checkpoints with their numbers, oldest first."""
        checkpoints = []
        for name in {entry.name.removesuffix(".replaced") for entry in self._entries()}:
            if match := NUMBERED.fullmatch(name):
                directory = locate(self.path / name)
                with suppress(CheckpointError):
                    if not size_problems(directory, read_manifest(directory)):
                        checkpoints.append((int(match[1]), directory))
        return sorted(checkpoints)

    def numbered(self, number: int) -> Path:
        """The directory of checkpoint *number*, there or not."""
        return self.path.absolute() / f"checkpoint_{number}"

    def next(self, at_least: int = 0) -> int:
        """Number of the next checkpoint: after every one that is there, complete or not."""
        numbers = [int(match[1]) for entry in self._entries() if (match := NUMBERED.match(entry.name))]
        return max([at_least, *(number + 1 for number in numbers)])

    def retain(self, keep: int | None) -> None:
        """Remove complete checkpoints beyond the *keep* newest, never the newest, and what interrupted saves left."""
        checkpoints = self.committed()
        for _, directory in checkpoints[: max(0, len(checkpoints) - max(keep, 1))] if keep is not None else []:
            gone = directory.with_name(f"{directory.name}.tmp")
            remove_tree(gone)
            directory.rename(gone)  # in one step no longer a checkpoint, before its files go one by one
            sync_directory(self.path)
        for entry in self._entries():
            if _LEFT_OVER.fullmatch(entry.name) and locate(entry.with_suffix("")) != entry:
                remove_tree(entry)
            elif MARK.fullmatch(entry.name):
                entry.unlink()
        forget_dead(self.path.absolute())

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []


def number_of(directory: Any) -> int | None:
    """*n* of ``checkpoint_<n>``; `None` for another name."""
    match = NUMBERED.fullmatch(directory.name.removesuffix(".replaced"))
    return int(match[1]) if match else None
