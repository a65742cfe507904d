"""Merging the shards of a model into one file of weights; one process without a process group is enough."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import NAME, content_problems, damaged, read_manifest, size_problems
from orc.runtime.checkpoint.saving import write
from orc.runtime.core.context import peek_context


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> str:
    """Write the weights whose shards are in *checkpoint_dir* as one file; on the main process, others wait.

    The shards are checked against the checkpoint's manifest first, if they are part of a checkpoint.

    Args:
        checkpoint_dir: folder of a model's shards (``pytorch_model_0`` or ``pytorch_model_fsdp_0``), or a checkpoint
            that has one such folder.
        output_path: folder that gets ``model.safetensors`` or ``pytorch_model.bin``; made if needed.
        safe_serialization: safetensors, otherwise pickle.
        remove_checkpoint_dir: remove the shards afterwards.

    Returns:
        The file.

    Raises:
        CheckpointError: on every process; there are no such shards, or they are damaged.
    """
    ctx = peek_context()
    target = Path(output_path) / (layout.SAFE_WEIGHTS_NAME if safe_serialization else layout.WEIGHTS_NAME)
    failure: BaseException | None = None
    if ctx is None or ctx.is_main:
        try:
            folder = shards_of_model(Path(checkpoint_dir))
            _check(folder)
            state = read_model(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            write(state, target, safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(folder)
        except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
            failure = error
    if ctx is not None and ctx.distributed:
        from orc.runtime.collectives.objects import broadcast_object_list

        [text] = broadcast_object_list([None if failure is None else str(failure)], ctx=ctx)
        if text is not None and failure is None:
            raise CheckpointError(text)
    if failure is not None:
        raise failure
    return str(target)


def shards_of_model(directory: Path) -> Path:
    """Return the folder of shards that *directory* is, has, or is called by its other documented name.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    if (directory / layout.SHARD_METADATA).is_file():
        return directory
    if (twin := _twin(directory)) is not None and (twin / layout.SHARD_METADATA).is_file():
        return twin
    folders = [
        entry
        for entry in (sorted(directory.iterdir()) if directory.is_dir() else ())
        if layout.SHARDS.fullmatch(entry.name)
        and not entry.name.startswith(layout.OPTIMIZER_NAME)
        and (entry / layout.SHARD_METADATA).is_file()
    ]
    if len(folders) > 1:
        raise CheckpointError(f"{directory} has the shards of {len(folders)} models: give one of {_names(folders)}")
    if not folders:
        raise CheckpointError(
            f"{directory} holds no shards of a model (no {layout.SHARD_METADATA}): give the folder pytorch_model_0 or "
            "pytorch_model_fsdp_0 of a checkpoint. Of a full state there is nothing to merge: it has its weights in "
            f"{layout.SAFE_WEIGHTS_NAME}"
        )
    return folders[0]


def read_model(folder: Path) -> dict[str, Any]:
    """Return the whole weights whose shards are in *folder*, on the CPU, by their names in the model.

    Raises:
        CheckpointError: they are not those of a model, or cannot be read.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from orc.runtime.checkpoint.state.shard_files import paths, plan_of, read_metadata, read_shards

    metadata = read_metadata(folder)
    places = paths(metadata)
    if any(path[0] == "optimizer" for path in places.values()):
        raise CheckpointError(f"{folder} holds the state of an optimizer: give the folder of a model")
    state: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner, plan = plan_of(state, metadata)
    read_shards(folder, metadata, planner, plan)
    nested = all(path[0] == "model" and len(path) > 1 for path in places.values())
    return {".".join(map(str, path[1:] if nested else path)): state[name] for name, path in places.items()}


def _check(folder: Path) -> None:
    directory = folder.absolute().parent
    if not (directory / NAME).is_file():
        return  # written by another program, or moved out of its checkpoint
    manifest = read_manifest(directory)
    names = [name for name in manifest.files if name.startswith(f"{folder.name}/")]
    lines = [line for line in size_problems(directory, manifest) if line.startswith(f"{folder.name}/")]
    lines = lines or content_problems(directory, manifest, names)
    if lines:
        raise damaged(directory, lines)


def _twin(directory: Path) -> Path | None:
    """Return *directory* under the other one of the documented names of a model's shards."""
    name, _, number = directory.name.rpartition("_")
    others = {layout.MODEL_NAME: layout.FSDP_MODEL_NAME, layout.FSDP_MODEL_NAME: layout.MODEL_NAME}
    return directory.with_name(f"{others[name]}_{number}") if name in others else None


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders)
