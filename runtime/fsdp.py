"""Sharding, saving and loading one model or optimizer by itself, as scripts do that keep their own checkpoints.

`save_state` and `load_state` cover everything at once, and are what to use; these write no manifest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error, attempt
from orc.runtime.checkpoint.saving import write
from orc.runtime.checkpoint.state.strategies import FULL, SHARDED, strategy_named, strategy_wanted
from orc.runtime.checkpoint.storage.copying import read_state
from orc.runtime.checkpoint.storage.durable import HashingFile, publish, remove_tree, temporary_name, write_file
from orc.runtime.core.prepared import Layout, PreparedModel
from orc.runtime.parallel.records import record_of
from orc.runtime.parallel.shards import whole

if TYPE_CHECKING:
    from orc.runtime.accelerator import Accelerator


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return *model* sharded by FSDP 2, as `Accelerator.prepare` does it.

    Args:
        accelerator: the Accelerator, which was made with a plug-in of FSDP 2.
        model: the model.

    Raises:
        ValueError: the Accelerator has no plug-in of FSDP 2.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            "fsdp2_prepare_model: pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    return accelerator.prepare_model(model)


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Write the weights of a sharded *model*, in the form ``state_dict_type`` of the plug-in; on all processes.

    Args:
        fsdp_plugin: with ``FULL_STATE_DICT`` one file ``pytorch_model_fsdp.bin``, else a folder
            ``pytorch_model_fsdp_0`` of shards; `None` means shards.
        accelerator: of the run.
        model: prepared.
        output_dir: where to; made if needed.
        model_index: the number in the name.
        adapter_only: of a model of peft write its active adapter alone, under peft's names; any other is written whole.

    Raises:
        CheckpointError: on every process, it could not be written.
    """
    directory, barrier, record = Path(output_dir), _barrier(accelerator), record_of(accelerator._prepared, model)
    if _wanted(fsdp_plugin) == FULL:
        state = _whole_state(record, accelerator.is_main_process, adapter_only)
        _write_file(barrier, directory / _model_file(model_index), state)
    else:
        state = strategy_named(SHARDED).model_state(record, keep=True)
        state = _adapter_of(record, state) if adapter_only else state
        _write_shards(barrier, directory / f"{layout.FSDP_MODEL_NAME}_{model_index}", {"model": state})


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Read weights that `save_fsdp_model` or `save_state` wrote in *input_dir* into *model*, whatever their form.

    With *adapter_only* those of the active adapter of a model of peft, as `save_fsdp_model` wrote them with it; the
    other weights stay as they are.

    Args:
        fsdp_plugin: the plug-in in force; its ``state_dict_type`` is how the files were written.
        accelerator: the run's Accelerator.
        model_index: which of several prepared models it is.

    Raises:
        CheckpointError: on every process; there are none, or they do not fit.
    """
    directory, record = Path(input_dir), record_of(accelerator._prepared, model)
    names = (f"{layout.FSDP_MODEL_NAME}_{model_index}", layout.model_shards(model_index))
    folder = _folder(directory, names)
    files = (_model_file(model_index), layout.model_file(model_index), layout.model_file(model_index, False))

    def load() -> None:
        here = strategy_named(SHARDED).model_state(record, keep=True) if adapter_only else {}
        only = _adapter_names(record, here) if adapter_only else None
        if folder is not None:
            if only is not None:
                from orc.runtime.checkpoint.state.dcp import load_part

                load_part(folder, record, here, only)
                return
            if wrong := strategy_named(SHARDED).model_problem(folder, record):
                raise CheckpointError(f"{folder} does not fit the prepared model: {wrong}")
            strategy_named(SHARDED).load_model(folder, record)
            return
        path = _file(directory, files, names)
        state = read_state(path)
        if only is not None:
            from orc.runtime.checkpoint.state.fit import difference, sizes_of

            if lines := difference(sizes_of({name: here[own] for name, own in only.items()}), sizes_of(state)):
                raise CheckpointError(f"{path} does not fit the adapter: {lines}")
            state = {own: state[name] for name, own in only.items()}
        if record.spread:
            strategy_named(FULL).load_model(state, record, strict=only is None)
        else:
            record.bare.load_state_dict(state, strict=only is None)

    _agree(_barrier(accelerator), "load_fsdp_model", load)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
) -> None:
    """Write the state of an *optimizer* of a sharded *model*: ``optimizer.bin``, or shards in ``optimizer_0``.

    Args:
        fsdp_plugin: the plug-in in force.
        accelerator: the run's Accelerator.
        output_dir: the folder of the files.
        optimizer_index: which of several prepared optimizers it is.

    Raises:
        CheckpointError: on every process, it could not be written.
    """
    directory, barrier, record = Path(output_dir), _barrier(accelerator), record_of(accelerator._prepared, model)
    if _wanted(fsdp_plugin) == FULL:
        state = strategy_named(FULL).optimizer_state(optimizer, [record], keep=accelerator.is_main_process)
        _write_file(barrier, directory / layout.numbered(layout.OPTIMIZER_NAME, optimizer_index, "bin"), state)
    else:
        state = strategy_named(SHARDED).optimizer_state(optimizer, [record], keep=True)
        _write_shards(barrier, directory / layout.optimizer_shards(optimizer_index), {"optimizer": state})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Read a state that `save_fsdp_optimizer` or `save_state` wrote into *optimizer*.

    Args:
        fsdp_plugin: the plug-in in force.
        accelerator: the run's Accelerator.
        model: the sharded model that the optimizer trains.
        input_dir: the folder of the files.
        optimizer_index: which of several prepared optimizers it is.
        adapter_only: accepted as documented; the state is that of the optimizer's parameters.

    Raises:
        CheckpointError: on every process; there is none, or it does not fit.
    """
    directory, record = Path(input_dir), record_of(accelerator._prepared, model)
    names = (layout.optimizer_shards(optimizer_index),)
    folder = _folder(directory, names)

    def load() -> None:
        if folder is not None:
            if wrong := strategy_named(SHARDED).optimizer_problem(folder, optimizer, [record]):
                raise CheckpointError(f"{folder} does not fit the prepared optimizer: {wrong}")
            strategy_named(SHARDED).load_optimizer(folder, optimizer, [record])
            return
        path = _file(directory, (layout.numbered(layout.OPTIMIZER_NAME, optimizer_index, "bin"),), names)
        if record.spread:
            strategy_named(FULL).load_optimizer(read_state(path), optimizer, [record])
        else:
            optimizer.load_state_dict(read_state(path))

    _agree(_barrier(accelerator), "load_fsdp_optimizer", load)


def _whole_state(model: PreparedModel, keep: bool, adapter_only: bool) -> dict[str, Any]:
    """Return the whole weights on the process that is to *keep* them; of an adapter no others are gathered."""
    if not adapter_only:
        return strategy_named(FULL).model_state(model, keep=keep)
    if model.layout is Layout.FLATTENED:
        state = strategy_named(FULL).model_state(model, keep=keep)
        return _adapter_of(model, state) if keep else {}
    state = strategy_named(SHARDED).model_state(model, keep=True)
    return dict(whole(_adapter_of(model, state), keep=keep, on_cpu=True))


def _adapter_names(model: PreparedModel, names: Iterable[str]) -> dict[str, str] | None:
    """Return the weights of the active adapter of *model*: peft's names for them, each with its name among *names*.

    `None` of a model that is none of peft's.

    Raises:
        CheckpointError: it is an adapter of which peft saves something else than its weights.
    """
    peft = sys.modules.get("peft")  # where it is not loaded there are no such models
    bare: Any = model.bare
    if peft is None or not isinstance(bare, peft.PeftModel):
        return None
    # peft chooses and renames entries, whatever they are: these stand for the weights, which may be shards.
    marks = {name: torch.empty(0) for name in names}
    kept = peft.get_peft_model_state_dict(
        bare, state_dict=marks, adapter_name=bare.active_adapter, save_embedding_layers=False
    )
    known = {id(mark): name for name, mark in marks.items()}
    if any(id(mark) not in known for mark in kept.values()):
        kind = bare.peft_config[bare.active_adapter].peft_type
        raise CheckpointError(
            f"peft saves an adapter of type {kind} not as the weights that it is trained as: save the whole model "
            "(adapter_only=False), or the adapter with save_pretrained"
        )
    return {name: known[id(mark)] for name, mark in kept.items()}


def _adapter_of(model: PreparedModel, state: dict[str, Any]) -> dict[str, Any]:
    """Return what of *state* is the adapter of *model*, under peft's names; all of it without one."""
    only = _adapter_names(model, state)
    return state if only is None else {name: state[own] for name, own in only.items()}


def _wanted(plugin: Any) -> str:
    return strategy_wanted(plugin) or SHARDED


def _barrier(accelerator: Accelerator) -> Barrier:
    return accelerator._checkpointing.checkpoints.barrier


def _model_file(index: int) -> str:
    return f"{layout.FSDP_MODEL_NAME}.bin" if index == 0 else f"{layout.FSDP_MODEL_NAME}_{index}.bin"


def _folder(directory: Path, names: tuple[str, ...]) -> Path | None:
    """Return the folder of shards in *directory*, which may be that folder itself."""
    places = [directory / name for name in names] + [directory]
    return next((place for place in places if (place / layout.SHARD_METADATA).is_file()), None)


def _file(directory: Path, files: tuple[str, ...], folders: tuple[str, ...]) -> Path:
    for name in files:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(
        f"{directory} holds neither shards ({', '.join(folders)}) nor a full state ({', '.join(files)})"
    )


def _agree(barrier: Barrier, what: str, action: Any) -> None:
    """Do *action* on every rank; an error on one is an error on all."""
    barrier.hold(what, attempt(action)[1], agree_on_no_error)


def _write_file(barrier: Barrier, target: Path, state: Mapping[str, Any]) -> None:
    def put() -> None:
        if barrier.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            write(dict(state), target)

    _agree(barrier, f"saving {target.name}", put)


def _write_shards(barrier: Barrier, target: Path, state: dict[str, Any]) -> None:
    """Write *state* as the folder *target*, which appears complete or not at all."""
    from orc.runtime.checkpoint.state.planning import ShardPlans
    from orc.runtime.checkpoint.state.shard_files import write_shards

    name, temporary = target.name, temporary_name(target)

    def prepare() -> None:
        if barrier.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(temporary)
            temporary.mkdir()

    def put() -> None:
        file = HashingFile(temporary / layout.shard_file(name, barrier.rank).rpartition("/")[2])
        file.fill(partial(write_shards, plans.values[name], plans.lengths[name]))

    def finish() -> None:
        if barrier.rank == 0:
            write_file(temporary / layout.SHARD_METADATA, plans.metadata(lengths)[name])
            publish(temporary, target)

    _agree(barrier, f"saving {name} (preparing)", prepare)
    plans = ShardPlans(barrier)
    plans.agree({name: state}, None)
    lengths: list[dict[str, str]] = []

    def verdict(bids: list[Any]) -> None:
        agree_on_no_error([error for error, _ in bids])
        lengths.extend(written for _, written in bids)

    error = attempt(put)[1]
    barrier.hold(f"saving {name} (writing)", [error, plans.report()], verdict)
    _agree(barrier, f"saving {name}", finish)
