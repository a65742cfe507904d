"""States of what DeepSpeed trains: the whole weights, and the parts of a checkpoint that each rank writes.

DeepSpeed lays its checkpoints out by itself: one file of weights and one of optimizer state per rank, below a folder.
`EngineStates` asks it for these without letting it write, so that they go where every other file goes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout
from orc.runtime.core.patching import patch_environment
from orc.runtime.engine.deepspeed.library import is_engine
from orc.runtime.engine.deepspeed.wrappers import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

if TYPE_CHECKING:
    from orc.runtime.core.prepared import Prepared

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def consolidated(engine: Any) -> dict[str, Any]:
    """Return the whole weights of *engine*'s module on the CPU; with ZeRO-3 on rank 0, elsewhere nothing. Collective.

    Raises:
        ValueError: the parameters are sharded and gathering them is not switched on.
    """
    if engine.zero_optimization_stage() != 3:
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        # DeepSpeed keeps weights as pieces of large buffers, which a file must not hold whole for each piece.
        return dict(clone_tensors_for_torch_save(engine.module.state_dict()))
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise ValueError(
            f"the weights are sharded by ZeRO-3, and gathering them is switched off: set {_GATHER} to true in the "
            "DeepSpeed configuration, or DeepSpeedPlugin(zero3_save_16bit_model=True); or save with save_state and "
            "convert with zero_to_fp32.py, which is in that directory"
        )
    return dict(engine._zero3_consolidated_16bit_state_dict() or {})


class EngineStates:
    """The part of a checkpoint that DeepSpeed lays out: an `OwnState`.

    Args:
        prepared: what the Accelerator has prepared.
        ranks: how many this run has.
    """

    def __init__(self, prepared: Prepared, ranks: int) -> None:
        self._prepared = prepared
        self._ranks = ranks

    def covers(self, prepared: Any) -> bool:
        """Return whether *prepared* is an engine, or an optimizer or schedule that belongs to one."""
        return is_engine(prepared) or isinstance(prepared, DeepSpeedOptimizerWrapper | DeepSpeedSchedulerWrapper)

    def trained(self) -> list[Any]:
        """Return the engines that train, in the order in which they were prepared; one for inference has no state."""
        optimizers = [
            optimizer for optimizer in self._prepared.optimizers if isinstance(optimizer, DeepSpeedOptimizerWrapper)
        ]
        return [
            model
            for model in self._prepared.models
            if is_engine(model) and any(model is optimizer.deepspeed_engine for optimizer in optimizers)
        ]

    def save(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the states of all engines, by file name: states, and files as bytes.

        All ranks call it. *options* are those of DeepSpeed's ``save_checkpoint`` (``exclude_frozen_parameters``,
        ``client_state``).
        """
        content: dict[str, Any] = {}
        for index, engine in enumerate(self.trained()):
            content |= _captured(engine, index, options)
        return content

    def problem(self, files: Collection[str], world_size: int) -> str | None:
        """Return why a checkpoint with *files*, written by *world_size* ranks, cannot be loaded here."""
        problems = (self._problem(engine, files, index, world_size) for index, engine in enumerate(self.trained()))
        return next((text for text in problems if text is not None), None)

    def _problem(self, engine: Any, files: Collection[str], index: int, world_size: int) -> str | None:
        own = [name for name in files if name.startswith(f"{_folder(index)}/")]
        if not own:
            return f"it holds no {_folder(index)}/, so it was not saved by a run with DeepSpeed"
        if engine.load_universal_checkpoint():
            return None
        if world_size != self._ranks:
            return (
                f"DeepSpeed's shards of {world_size} processes fit {world_size} processes, and there are "
                f"{self._ranks}: convert it with `python -m deepspeed.checkpoint.ds_to_universal`, and set "
                "checkpoint.load_universal to true in the DeepSpeed configuration"
            )
        stage, zero = engine.zero_optimization_stage(), any(name.endswith("optim_states.pt") for name in own)
        if zero != bool(stage):
            return f"it was saved {'with' if zero else 'without'} ZeRO, and the stage here is {stage}"
        sharded = any(name.endswith("model_states.pt") and "zero_pp_rank" in name for name in files)
        if sharded != (stage == 3):
            return f"it was saved with ZeRO stage {3 if sharded else '1 or 2'}, and the stage here is {stage}"
        return None

    def load(self, directory: Path, models: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Load those of the trained *models* from *directory*. All ranks call it.

        *options* are those of DeepSpeed's ``load_checkpoint``. Raises `CheckpointError`.
        """
        trained = [engine for engine in self.trained() if any(engine is model for model in models)]
        for index, engine in enumerate(trained):
            restore(engine, directory, index, **options)


def _folder(index: int) -> str:
    """Return the folder of model *index* in a checkpoint."""
    return layout.MODEL_NAME if index == 0 else f"{layout.MODEL_NAME}_{index}"


def _captured(engine: Any, index: int, options: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="orc-deepspeed-") as place:
        root = Path(place)

        def keep(state: Any, path: str) -> None:
            content[str(Path(path).relative_to(root))] = state

        with _exchanged(engine, save=keep):
            engine.save_checkpoint(place, tag=_folder(index), save_latest=index == 0, **options)
        files = [path for path in root.rglob("*") if path.is_file()]
        return content | {str(path.relative_to(root)): path.read_bytes() for path in files}


def restore(engine: Any, directory: Path, index: int = 0, **options: Any) -> None:
    """Load the state of *engine*, model *index* of a checkpoint, from *directory*. Collective.

    *options* are those of DeepSpeed's ``load_checkpoint``.

    Raises:
        CheckpointError: DeepSpeed cannot load it here.
    """
    tag = None if engine.load_universal_checkpoint() else _folder(index)
    try:
        with _exchanged(engine, load=_load), _running_nothing():
            path, _ = engine.load_checkpoint(str(directory), tag=tag, **options)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{directory} cannot be loaded by DeepSpeed: {type(error).__name__}: {error}") from error
    if path is None:
        raise CheckpointError(f"{directory} holds no state of DeepSpeed in {_folder(index)}")


@contextmanager
def _exchanged(
    engine: Any, save: Callable[[Any, str], None] | None = None, load: Callable[[str, Any], Any] | None = None
) -> Iterator[None]:
    """Let *engine* save and load with these functions instead of writing and reading files by itself."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Exchanged(TorchCheckpointEngine):  # type: ignore[misc]
        def create(self, info: Any) -> None:
            """Announce nothing."""

        def save(self, state_dict: Any, path: str) -> None:
            assert save is not None
            save(state_dict, path)

        def load(self, path: str, map_location: Any = None) -> Any:
            assert load is not None
            return load(path, map_location)

    own = engine.checkpoint_engine
    engine.checkpoint_engine = Exchanged()
    try:
        yield
    finally:
        engine.checkpoint_engine = own


@contextmanager
def _running_nothing() -> Iterator[None]:
    """Let no `torch.load` in the block unpickle code, as DeepSpeed does for universal checkpoints."""
    _trust_own_classes()
    with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        yield


def _load(path: str, map_location: Any = None) -> Any:
    """Read a file of DeepSpeed without unpickling code: tensors, plain values and DeepSpeed's own few classes."""
    _trust_own_classes()
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


@cache
def _trust_own_classes() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])
