"""Folders of shards as `torch.distributed.checkpoint` lays them out: one file of tensors per rank, and ``.metadata``.

What is read here may come from anybody: the metadata, which is pickled, may name nothing but its own classes, and
everything else is read as tensors and plain values.
"""

from __future__ import annotations

import gc
import io
import mmap
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout, state_file
from orc.runtime.checkpoint.state.shard_metadata import ALIGNMENT, PLAIN
from orc.runtime.checkpoint.state.staging import Stage, size_on_gpus
from orc.runtime.checkpoint.storage.copying import CopyQueue
from orc.runtime.checkpoint.storage.durable import Hashing
from orc.runtime.core.names import safe_name

_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            *("_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


def write_shards(values: Sequence[torch.Tensor | bytes], lengths: list[int], file: Hashing) -> None:
    """Write *values* one after another as torch's reader expects them; *lengths* gets the bytes of each.

    Those on a GPU come through locked memory, in which there is room for the largest.
    """
    stage = Stage(size_on_gpus(values))
    for value in values:
        file.write(bytes(-file.size % ALIGNMENT))
        begin = file.size
        if isinstance(value, bytes):
            file.write(value)
        else:
            value = stage.take(value) if value.is_cuda else value
            tensor = value.detach().cpu().contiguous()
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                tensor = tensor.clone()  # torch.save writes whole storages
            torch.save(tensor, cast(IO[bytes], file))
        lengths.append(file.size - begin)


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the shards in *folder*.

    Raises:
        CheckpointError: there is none, or it holds something else.
    """
    path = folder / layout.SHARD_METADATA
    try:
        with path.open("rb") as file, _uncollected():
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
            raise ValueError(f"it holds a {type(metadata).__name__}")
        for place in metadata.storage_data.values():
            safe_name(place.relative_path)
            if getattr(place, "transform_descriptors", None):
                raise ValueError("its shards are compressed or encrypted")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {layout.SHARD_METADATA}: it holds no sharded state") from None
    except Exception as error:  # noqa: BLE001 - what a pickle that is none can raise is anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    return metadata


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking through millions of new objects again and again, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Return where each entry of *metadata* belongs in the nested state, by the entry's name."""
    known = metadata.planner_data or {}
    return {name: tuple(known.get(name) or (name,)) for name in metadata.state_dict_metadata}


def plan_of(state: dict[str, Any], metadata: Metadata, *, partial: bool = False) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """Return what to read to fill *state*, the part of it that this process holds.

    Raises:
        RuntimeError, ValueError: a name is missing or a size is another.
    """
    planner = _Planner(allow_partial_load=partial)
    planner.set_up_planner(state, metadata, False)
    return planner, planner.finish_plan(planner.create_local_plan())


def files_of(metadata: Metadata, plan: LoadPlan) -> set[str]:
    """Return the names of the files that *plan* reads."""
    return {metadata.storage_data[item.storage_index].relative_path for item in plan.items}


def files_of_values(metadata: Metadata) -> set[str]:
    """Return the names of the files that hold values which are no tensors."""
    return {
        place.relative_path
        for index, place in metadata.storage_data.items()
        if not isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata)
    }


def read_shards(folder: Path, metadata: Metadata, planner: DefaultLoadPlanner, plan: LoadPlan) -> None:
    """Read *plan* into the state of its *planner*: tensors in place, whatever ranks and mesh they were saved from.

    Raises:
        CheckpointError: they cannot be read.
    """
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, False)
    try:
        left = _read_in_place(folder, metadata, planner, plan) if _is_plain(metadata) else plan
        reader.read_data(left, planner).wait()
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error


def _is_plain(metadata: Metadata) -> bool:
    return metadata.storage_meta is not None and PLAIN in metadata.storage_meta.modules


def _read_in_place(folder: Path, metadata: Metadata, planner: DefaultLoadPlanner, plan: LoadPlan) -> LoadPlan:
    """Read tensors straight into their places, in threads; returns what is left for torch's reader."""
    left = []
    by_file: dict[str, list[ReadItem]] = {}
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            left.append(item)
        else:
            by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    # All stay mapped until everything is read: addresses tell from which file a tensor comes.
    mapped = {
        name: torch.from_file(str(folder / name), shared=False, size=(folder / name).stat().st_size, dtype=torch.uint8)
        for name in by_file
    }
    with CopyQueue() as copies, torch.no_grad():
        copies.read_from(*(folder / name for name in by_file))
        for name, items in by_file.items():
            with (folder / name).open("rb") as file:
                for item in items:
                    source = _stored(file, mapped[name], metadata, item)
                    if source is None:
                        left.append(item)
                        continue
                    target = planner.resolve_tensor(item).detach()
                    copies.start(target, narrow_tensor_by_index(source, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
    return LoadPlan(left)


def _stored(file: Any, mapped: torch.Tensor, metadata: Metadata, item: ReadItem) -> torch.Tensor | None:
    """Return the part of *mapped* that holds the elements of a stored tensor; `None` if it cannot be determined."""
    index = item.storage_index
    entry = metadata.state_dict_metadata[index.fqn]
    place = metadata.storage_data[index]
    if not isinstance(entry, TensorStorageMetadata):
        return None
    sizes = next((chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset), None)
    if sizes is None or not sizes.numel():
        return None
    dtype = entry.properties.dtype
    size = sizes.numel() * dtype.itemsize
    start = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY  # what is before an archive is none of its matter
    length = place.offset + place.length - start
    with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as part:
        with zipfile.ZipFile(cast(IO[bytes], part)) as archive:
            if [record.file_size for record in archive.infolist() if "/data/" in record.filename] != [size]:
                return None
        part.seek(place.offset - start)
        reader: Any = torch._C.PyTorchFileReader(cast(Any, part))
        at = place.offset + reader.get_record_offset("data/0")
    return None if at % dtype.itemsize else mapped[at : at + size].view(dtype).view(sizes)


class _Planner(DefaultLoadPlanner):
    """torch's planner, which would run whatever code a pickled value names."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor in its place."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], state_file.read(value))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return one of the classes of metadata, or a type of elements."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such metadata")
        return super().find_class(module, name)
