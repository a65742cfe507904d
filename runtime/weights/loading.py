"""Weights of a model in one file or several with an index, for other programs and for loading into an empty model."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from orc.runtime.checkpoint.format.safetensors_file import without_aliases, write_tensors
from orc.runtime.checkpoint.storage.durable import HashingFile
from orc.runtime.core.names import safe_relative_name
from orc.runtime.parallel import extract_model_from_parallel

logger = logging.getLogger(__name__)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40}  # fmt: skip
_SHARD = re.compile(r"(model-\d{5}-of-\d{5}\.safetensors|pytorch_model-\d{5}-of-\d{5}\.bin)")


def parse_size(size: int | str) -> int:
    """Bytes of ``10GB``, ``5MB``, ``1GiB`` (any case), or of a plain number. Raises `ValueError`."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)?\s*", size) if isinstance(size, str) else None
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError(f"{size!r} is no size: give bytes, or digits and a unit such as 5MB, 1GB or 1GiB")
    return int(float(match[1]) * unit)


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

    limit = parse_size(max_shard_size)
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
        raise CheckpointError(f"{', '.join(absent[:5])} cannot be saved: on the meta device a weight has no values")
    directory.mkdir(parents=True, exist_ok=True)
    aliases: dict[str, str] = {}
    if safe_serialization:
        state, aliases = without_aliases(state)
    parts = shards(state, limit)
    single = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    stem, suffix = single.split(".")
    names = (
        [single]
        if len(parts) == 1
        else [f"{stem}-{number:05d}-of-{len(parts):05d}.{suffix}" for number in range(1, len(parts) + 1)]
    )
    written = set(names)
    for name, part in zip(names, parts, strict=True):
        mine = {alias: kept for alias, kept in aliases.items() if kept in part}
        _write(directory / name, part, mine, safe_serialization)
    if len(parts) > 1:
        index = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        where |= {alias: where[kept] for alias, kept in aliases.items()}
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        _replace(
            directory / index,
            (
                json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
            ).encode(),
        )
        written.add(index)
    singles = {SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME}
    for entry in directory.iterdir():
        # What an earlier save left would contradict this one.
        if entry.name not in written and (entry.name in singles or _SHARD.fullmatch(entry.name)):
            entry.unlink()


def _write(path: Path, part: dict[str, torch.Tensor], aliases: dict[str, str], safe: bool) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    file = HashingFile(temporary)
    try:
        if safe:
            metadata = {"format": "pt"} | ({"orc.aliases": json.dumps(aliases)} if aliases else {})
            write_tensors(file, part, metadata)
        else:
            torch.save(part, cast(IO[bytes], file))
    except BaseException:
        file.abandon()
        temporary.unlink()
        raise
    file.close()
    temporary.replace(path)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
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
        found = f"{len(indices)} index files" if indices else "no weights"
        raise CheckpointError(f"{checkpoint} holds {found}; expected {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or one index")
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


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights (one file, several with an index, or their directory) into *model*, part by part.

    Parameters that the model shares between modules stay shared.

    Args:
        model: prepared or not; parameters on the meta device are replaced, others are filled.
        checkpoint: what `save_model` wrote, or an index with ``{parameter: file}``.
        device_map: ``{"": device}`` or devices by module name; by default where each parameter is, and the CPU for
            those on the meta device. Weights for ``disk`` go to *offload_folder*, and stay on the meta device.
        offload_folder: where weights for the disk go, as memory-mapped files with an index.
        dtype: of floating-point weights; as saved by default.
        offload_state_dict: accepted; one part is in memory at a time in any case.
        offload_buffers: offload the buffers of modules on the disk too; else they go to the CPU.
        keep_in_fp32_modules: names of modules whose weights are float32 whatever *dtype* says.
        offload_8bit_bnb: must be `False`: quantised weights cannot be offloaded here.
        strict: refuse names that the model does not have, and names of the model that the checkpoint lacks.
        full_state_dict: must be `True`: sharded state dicts are what `load_state` loads.
        broadcast_from_rank0: must be `False`: every process reads the files.

    Raises:
        CheckpointError: no weights are there, they do not fit, or with *strict* names differ.
        ValueError: *device_map* lacks a device or an *offload_folder*, or an option is not supported.
    """
    from orc.runtime.weights.device_map import find_tied_parameters, retie_parameters
    from orc.runtime.weights.empty_weights import as_dtype

    refused = {"offload_8bit_bnb": offload_8bit_bnb, "full_state_dict": not full_state_dict,
               "broadcast_from_rank0": broadcast_from_rank0}  # fmt: skip
    for option, given in refused.items():
        if given:
            raise ValueError(f"load_checkpoint_in_model: {option}={option != 'full_state_dict'} is not supported")
    if device_map is not None and "disk" in device_map.values() and offload_folder is None:
        raise ValueError("the device_map puts modules on the disk: say where with offload_folder")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    tied = find_tied_parameters(model)
    target = _Target(model, device_map, as_dtype(dtype), tuple(keep_in_fp32_modules or ()), offload_folder,
                     offload_buffers)  # fmt: skip
    for path in weight_files(Path(checkpoint)):
        state = _read(path)
        unknown = sorted(set(state) - set(target.own))
        if strict and unknown:
            raise CheckpointError(f"{path} holds {', '.join(unknown[:5])}, which the model does not have")
        for name, tensor in state.items():
            if name in target.own:
                target.put(name, tensor, path)
    target.finish()
    loaded = target.loaded | {name for group in tied if target.loaded & set(group) for name in group}
    lacking = sorted(set(model.state_dict()) - loaded)
    if strict and lacking:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(lacking[:5])} of the model")
    empty = [name for name in lacking if target.own[name].is_meta]
    if empty:
        logger.warning("%s lacks %s, which stay without values", checkpoint, ", ".join(empty[:5]))
    # On the meta device a shared parameter was replaced under each of its names.
    retie_parameters(model, tied)


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    from orc.runtime.checkpoint.state import placing

    try:
        if path.suffix == ".safetensors":
            return placing.read_weights(path)
        state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


class _Target:
    """A model that weights are put into, on the devices of a map."""

    def __init__(
        self,
        model: torch.nn.Module,
        device_map: Mapping[str, Any] | None,
        dtype: torch.dtype | None,
        in_fp32: tuple[str, ...],
        offload_folder: str | os.PathLike[str] | None,
        offload_buffers: bool,
    ) -> None:
        self.model, self.device_map, self.dtype, self.in_fp32 = model, device_map, dtype, in_fp32
        self.folder, self.offload_buffers = Path(offload_folder or "."), offload_buffers
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.own = dict(model.named_parameters(remove_duplicate=False)) | self.buffers
        self.loaded: set[str] = set()
        self.index: dict[str, dict[str, Any]] = {}

    def put(self, name: str, value: torch.Tensor, path: Path) -> None:
        """Put *value*, read from *path*, where parameter or buffer *name* is."""
        own = self.own[name]
        if own.shape != value.shape:
            raise CheckpointError(f"{path}: {name} has shape {tuple(value.shape)}, the model's has {tuple(own.shape)}")
        if own.is_floating_point() and value.dtype in (torch.int8, torch.uint8):
            raise CheckpointError(
                f"{path}: {name} is quantized: load_and_quantize_model with load_in_8bit=True loads it"
            )
        self.loaded.add(name)
        dtype = torch.float32 if any(part in self.in_fp32 for part in name.split(".")) else self.dtype
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        device = self._device(name)
        if device == "disk":
            self._offload(name, value)
            self._replace(name, torch.empty_like(value, device="meta"))
            return
        target = torch.device(device) if device is not None else own.device
        if target.type == "meta":
            target = torch.device("cpu")
        if not own.is_meta and own.device == target and (dtype is None or own.dtype == value.dtype):
            with torch.no_grad():
                own.copy_(value)
        else:
            self._replace(name, value.to(target, copy=True))

    def _offload(self, name: str, value: torch.Tensor) -> None:
        from orc.runtime.weights.offload import no_room, offload_weight, remove_offloaded

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            offload_weight(value, name, self.folder, self.index)
        except OSError as error:
            remove_offloaded(self.folder, [*self.index, name])
            raise no_room(self.folder, value.nbytes, error) from error

    def finish(self) -> None:
        """Write the index of what went to the disk."""
        from orc.runtime.weights.offload import save_offload_index

        save_offload_index(self.index, self.folder)

    def _device(self, name: str) -> Any:
        if self.device_map is None:
            return None
        module = name
        while module and module not in self.device_map:
            module = module.rpartition(".")[0]
        if module not in self.device_map:
            raise ValueError(f"device_map names no device for {name}")
        device = self.device_map[module]
        return "cpu" if device == "disk" and name in self.buffers and not self.offload_buffers else device

    def _replace(self, name: str, value: torch.Tensor) -> None:
        from orc.runtime.weights.empty_weights import moved_parameter

        module_name, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        parameter = module._parameters.get(attribute)
        if parameter is not None:
            module._parameters[attribute] = moved_parameter(parameter, value)
        else:
            module._buffers[attribute] = value
