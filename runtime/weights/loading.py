"""Weights of a model in one file or several with an index, for other programs and for loading into an empty model."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from orc.runtime.checkpoint.format.state_file import without_aliases, write_tensors
from orc.runtime.checkpoint.storage.durable import Hashing, HashingFile
from orc.runtime.core.names import safe_relative_name
from orc.runtime.memory.sizes import convert_file_size_to_int
from orc.runtime.parallel import extract_model_from_parallel

logger = logging.getLogger(__name__)
_SHARD = re.compile(r"(model-\d{5}-of-\d{5}\.safetensors|pytorch_model-\d{5}-of-\d{5}\.bin)")


def shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """*tensors* in order, cut into parts of at most *limit* bytes; a larger tensor is a part of its own."""
    parts: list[dict[str, torch.Tensor]] = []
    current: dict[str, torch.Tensor] = {}
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > limit:
            parts.append({name: tensor})
            continue
        if used + size > limit:
            parts.append(current)
            current, used = {}, 0
        current[name] = tensor
        used += size
    if current or not parts:
        parts.append(current)
    return parts


def save_model(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the unwrapped *model*'s weights; see `Accelerator.save_model`. Files of an earlier save go afterwards.

    *state* are the weights where they are not to be read from the model.
    """
    from orc.runtime.weights.quantization.scheme import refuse_to_save

    size = max_shard_size.upper() if isinstance(max_shard_size, str) else max_shard_size  # bytes, never bits
    limit = convert_file_size_to_int(size)
    if not limit:
        raise ValueError(f"max_shard_size={max_shard_size!r}: a file has at least one byte")
    directory = Path(save_directory)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file, not a directory for weights")
    refuse_to_save(model)
    if state is None:
        from orc.runtime.weights.dispatch import get_state_dict_offloaded_model

        state = get_state_dict_offloaded_model(
            extract_model_from_parallel(model, keep_torch_compile=False), strict=False
        )
    state = dict(state)
    absent = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if absent:
        raise CheckpointError(f"{', '.join(absent)} cannot be saved: on the meta device a weight has no values")
    directory.mkdir(parents=True, exist_ok=True)
    aliases: dict[str, str] = {}
    if safe_serialization:
        state, aliases = without_aliases(state)
    parts = shards(state, limit)
    single = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    stem, suffix = single.split(".")
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.{suffix}" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [single]
    written = set(names)
    for name, part in zip(names, parts, strict=True):
        mine = {alias: kept for alias, kept in aliases.items() if kept in part}
        _write(directory / name, part, mine, safe_serialization)
    if len(parts) > 1:
        index = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        where |= {alias: where[kept] for alias, kept in aliases.items()}
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        content = {"metadata": {"total_size": total}, "weight_map": where}
        temporary = directory / f".{index}.tmp"
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        temporary.replace(directory / index)
        written.add(index)
    singles = {SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME}
    for entry in directory.iterdir():
        # What an earlier save left would contradict this one.
        if entry.name not in written and (entry.name in singles or _SHARD.fullmatch(entry.name)):
            entry.unlink()


def _write(path: Path, part: dict[str, torch.Tensor], aliases: dict[str, str], safe: bool) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)

    def put(file: Hashing) -> None:
        if safe:
            metadata = {"format": "pt"} | ({"orc.aliases": json.dumps(aliases)} if aliases else {})
            write_tensors(file, part, metadata)
        else:
            torch.save(part, cast(IO[bytes], file))

    try:
        HashingFile(temporary).fill(put)
    except BaseException:
        temporary.unlink()
        raise
    temporary.replace(path)


def weight_files(checkpoint: Path) -> list[Path]:
    """The files that hold the weights of *checkpoint*: a file, an index, or a directory with one or the other.

    Raises:
        CheckpointError: there are none, or an index names files that are not there.
    """
    if checkpoint.is_file():
        return _indexed(checkpoint) if checkpoint.name.endswith(".json") else [checkpoint]
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: there is no such checkpoint")
    # Directories that come from elsewhere may hold the same weights in both formats.
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if (checkpoint / name).is_file():
            return weight_files(checkpoint / name)
    indices = sorted([*checkpoint.glob("*.index.json"), *checkpoint.glob("index.json")])
    if len(indices) != 1:
        there = f"{len(indices)} index files" if indices else "no weights"
        raise CheckpointError(f"{checkpoint} holds {there}; expected {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or one index")
    return _indexed(indices[0])


def _indexed(index: Path) -> list[Path]:
    try:
        data = json.loads(index.read_text())
        where = data.get("weight_map", data)
        files = sorted({index.parent / safe_relative_name(str(name)) for name in where.values()})
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error}") from None
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing"
        )
    return files
