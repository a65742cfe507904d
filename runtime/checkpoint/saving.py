"""Saving and loading with the Accelerator: single objects, state dicts, and whole checkpoints (see `checkpoint`)."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from orc.runtime.core.context import RunContext, current_context
from orc.runtime.parallel.records import record_of

if TYPE_CHECKING:
    from orc.runtime.core.handlers import LoadHook, SaveHook
    from orc.runtime.core.options import Options
    from orc.runtime.train.engine import Engine

File: TypeAlias = str | os.PathLike[str] | IO[bytes]


class StateSaving:
    """The part of the Accelerator that saves single objects, and registers what a checkpoint covers.

    Args:
        engine: whose models and optimizers are saved.
        options: of the Accelerator.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        self.ctx = engine.ctx
        self.engine = engine
        self.options = options
        self.prepared = engine.prepared
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of *model*, with *unwrap* under the names of the model that the script wrote.

        Of a sharded model it is gathered on the CPU of the main process; every process calls it, the others get an
        empty one.
        """
        from orc.runtime.checkpoint.state.strategies import FULL, strategy_named

        record = record_of(self.prepared, model)
        if record.spread:
            return strategy_named(FULL).model_state(record, keep=self.ctx.is_main)
        return self.engine.model_state(model, unwrap=unwrap)

    def save(self, obj: Any, f: File, safe_serialization: bool = False) -> None:
        """`torch.save`, on the main process only, or once per machine with ``save_on_each_node``.

        Args:
            obj: anything picklable; a flat mapping of tensors with *safe_serialization*.
            f: the file, which appears complete or not at all; or one that is open for writing.
            safe_serialization: write safetensors.
        """
        each_node = self.options.project.save_on_each_node
        _save(self.ctx, obj, f, each_node, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make `save_state` and `load_state` cover *objects*, which need ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: objects without these methods.
        """
        bad = [
            f"{type(item).__name__} (argument {place})"
            for place, item in enumerate(objects, 1)
            if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)))
        ]
        if bad:
            raise ValueError(
                f"register_for_checkpointing: {', '.join(bad)} cannot be saved without state_dict and load_state_dict"
            )
        self.prepared.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before each `save_state`; it may take weights off the list.

        Returns:
            A handle whose ``remove`` ends that.
        """
        return _register(self.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before each `load_state`; it may take models off the list.

        Returns:
            A handle whose ``remove`` ends that.
        """
        return _register(self.load_hooks, hook)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader like *dataloader* whose passes leave out the first *num_batches* batches."""
        from orc.runtime.data.prepare import skip_first_batches

        return skip_first_batches(dataloader, num_batches)


def _register(hooks: OrderedDict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def save(obj: Any, f: File, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """`torch.save` on the main process only; the file appears complete or not at all.

    Args:
        obj: anything picklable; a flat mapping of tensors with *safe_serialization*.
        f: the file; or one that is open for writing.
        save_on_each_node: once per machine instead, for machines that share no disk.
        safe_serialization: write safetensors.
    """
    _save(current_context(), obj, f, save_on_each_node, safe_serialization)


def _save(ctx: RunContext, obj: Any, f: File, each_node: bool, safe: bool) -> None:
    obj = ctx.compute.to_cpu(obj)  # on all processes
    if ctx.is_local_main if each_node else ctx.is_main:
        write(obj, f, safe)


def write(obj: Any, f: File, safe_serialization: bool = False) -> None:
    """Write *obj* to the file *f* on this process: a temporary file first, so that *f* is never half-written."""
    if not isinstance(f, (str, os.PathLike)):
        _dump(obj, f, safe_serialization)
        return
    target = Path(f)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _dump(obj, temporary, safe_serialization)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _dump(obj: Any, f: Path | IO[bytes], safe_serialization: bool) -> None:
    if not safe_serialization:
        torch.save(obj, f)
        return
    from safetensors import torch as safetensors

    from orc.runtime.compat.objects import clean_state_dict_for_safetensors

    tensors, metadata = clean_state_dict_for_safetensors(obj), {"format": "pt"}
    if isinstance(f, Path):
        safetensors.save_file(tensors, f, metadata)
    else:
        f.write(safetensors.save(tensors, metadata))


def load(f: File, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what `save` wrote; safetensors files are recognised by their ending.

    Args:
        f: a path or an open binary file.
        map_location: where tensors go, as for `torch.load`.

    Returns:
        The object that was saved; for a safetensors file the tensors by their names.
    """
    if isinstance(f, (str, os.PathLike)) and Path(f).suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(f, device=str(map_location or "cpu"))
    kwargs.setdefault("weights_only", True)  # torch before 2.6 would run what a file says
    return torch.load(f, map_location=map_location, **kwargs)
