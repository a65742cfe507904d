"""Rules for what a DeepSpeed configuration leaves to ``auto`` until everything is prepared. Pure; torch-free.

`filled` brings the rules together: batch sizes, accumulation, clipping, ZeRO's buckets, optimizer and schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.runtime.engine.deepspeed.config import AUTO
from orc.runtime.engine.deepspeed.placeholders import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

_MICRO, _BATCH, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
_BUCKET = "zero_optimization.reduce_bucket_size"
_PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
_PERSIST = "zero_optimization.stage3_param_persistence_threshold"
# Left to DeepSpeed's own default when nobody says them.
_OWN_DEFAULT = (
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.sub_group_size",
)
_CLIPPING = 1.0  # as in the documented templates, where the file says auto and nobody a value


@dataclass(frozen=True)
class Facts:
    """Facts about one call of `prepare`, from which ``auto`` values follow.

    Attributes:
        data_size: processes with batches of their own.
        batch_sizes: of each loader, samples per process.
        accumulation: the Accelerator's batches per optimizer step.
        model_config: the model's ``config``, if it has one.
        optimizer, scheduler: prepared together with the model, or `None`.
    """

    data_size: int = 1
    batch_sizes: Sequence[int] = ()
    accumulation: int = 1
    model_config: Any = None
    optimizer: Any = None
    scheduler: Any = None


def filled(plugin: DeepSpeedPlugin, facts: Facts) -> None:
    """Replace every ``auto`` of the configuration by what follows from *facts*, in place.

    Raises:
        ValueError: something cannot be known, or contradicts the configuration; the text says what to set.
    """
    plugin.reopen()
    for path in _OWN_DEFAULT:
        if plugin.is_auto(path):
            plugin.hf_ds_config.del_config_sub_tree(path)
    values: dict[str, Any] = {"gradient_clipping": _CLIPPING}
    values.update(batch_values(plugin, facts))
    values.update(bucket_values(plugin, facts.model_config))
    values.update(optimizer_values(facts.optimizer))
    values.update(scheduler_values(plugin, facts.optimizer, facts.scheduler))
    left = [path for path in plugin.hf_ds_config.autos() if path not in values]
    if left:
        raise ValueError(
            f"the DeepSpeed configuration leaves {', '.join(left)} to auto, and nothing that is prepared says the "
            "value: set it in the configuration" + _hint(left)
        )
    plugin.deepspeed_config_process(must_match=False, **values)
    for path in (_MICRO, _STEPS, _BATCH):
        if plugin.get_value(path) is None:
            plugin.hf_ds_config.set_value(path, values[path])


def _hint(left: Sequence[str]) -> str:
    if any(path.startswith("scheduler.") for path in left):
        return " or prepare a DummyScheduler that has it"
    if any(path.startswith("optimizer.") for path in left):
        return " or prepare a DummyOptim that has it"
    return ""


def batch_values(plugin: DeepSpeedPlugin, facts: Facts) -> dict[str, int]:
    """Return micro batch size, accumulation and batch size: batch = micro batch x accumulation x processes.

    Raises:
        ValueError: the micro batch size is unknown, or the three contradict each other.
    """
    steps = plugin.get_value(_STEPS, AUTO)
    steps = facts.accumulation if steps == AUTO else _positive(_STEPS, steps)
    batch = plugin.get_value(_BATCH, AUTO)
    batch = None if batch == AUTO else _positive(_BATCH, batch)
    micro = plugin.get_value(_MICRO)
    if micro is None and batch is not None:
        micro, rest = divmod(batch, steps * facts.data_size)
        if rest or not micro:
            raise ValueError(_arithmetic(batch, "?", steps, facts.data_size))
    elif micro is None:
        raise ValueError(
            f"the DeepSpeed configuration has no `{_MICRO}`; DeepSpeed needs it even for a model that is not trained: "
            "set it to a number, or to auto and prepare a DataLoader with the model"
        )
    elif micro == AUTO:
        if not facts.batch_sizes:
            raise ValueError(
                f"`{_MICRO}` is auto and no DataLoader with a batch size is prepared: pass the DataLoader to the same "
                f"prepare() as the model, or set deepspeed_plugin.deepspeed_config[{_MICRO!r}]"
            )
        micro = (min if plugin.is_train_batch_min else max)(facts.batch_sizes)
    micro = _positive(_MICRO, micro)
    total = micro * steps * facts.data_size
    if batch is not None and batch != total:
        raise ValueError(_arithmetic(batch, micro, steps, facts.data_size))
    return {_MICRO: micro, _STEPS: steps, _BATCH: total}


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`{name}` of the DeepSpeed configuration is {value!r}; expected a whole number above 0 or auto"
        )
    return value


def _arithmetic(batch: int, micro: Any, steps: int, processes: int) -> str:
    return (
        f"`{_BATCH}` of the DeepSpeed configuration is {batch}, which is not {_MICRO} {micro} x {_STEPS} {steps} x "
        f"{processes} processes: set one of them to auto"
    )


def hidden_size(model_config: Any) -> int | None:
    """Return ``hidden_size`` of *model_config*, or the largest of its ``hidden_sizes``; `None` if it has neither."""
    size = getattr(model_config, "hidden_size", None)
    if size is None and (sizes := getattr(model_config, "hidden_sizes", None)):
        size = max(sizes)
    return None if size is None else int(size)


def bucket_values(plugin: DeepSpeedPlugin, model_config: Any) -> dict[str, int]:
    """Return ZeRO's bucket sizes and persistence threshold, in elements, where the configuration sets ``auto``.

    Raises:
        ValueError: the hidden size is not known.
    """
    wanted = [path for path in (_BUCKET, _PREFETCH, _PERSIST) if plugin.is_auto(path)]
    if not wanted:
        return {}
    size = hidden_size(model_config)
    if size is None:
        names = ", ".join(path.rpartition(".")[2] for path in wanted)
        raise ValueError(
            f"{names} of the DeepSpeed configuration's zero_optimization are auto, which follows from the model's "
            "hidden size; but the model has neither config.hidden_size nor config.hidden_sizes: set them by hand"
        )
    return {_BUCKET: size * size, _PREFETCH: int(0.9 * size * size), _PERSIST: 10 * size}


def optimizer_values(optimizer: Any) -> dict[str, Any]:
    """Return the learning rate and weight decay that a placeholder or an optimizer brings."""
    if optimizer is None:
        return {}
    group = optimizer.param_groups[0]
    if isinstance(optimizer, DummyOptim):
        group = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    values = {f"optimizer.params.{name}": group[name] for name in ("lr", "weight_decay") if name in group}
    return {path: float(value) if hasattr(value, "item") else value for path, value in values.items()}


def scheduler_values(plugin: DeepSpeedPlugin, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the schedule's learning rates and numbers of steps, counted in optimizer steps."""
    values: dict[str, Any] = {"scheduler.params.warmup_min_lr": 0}
    rate = plugin.get_value("optimizer.params.lr", AUTO)
    if rate == AUTO:
        rate = optimizer_values(optimizer).get("optimizer.params.lr")
    if rate is not None:
        values["scheduler.params.warmup_max_lr"] = rate
    if isinstance(scheduler, DummyScheduler):
        values["scheduler.params.warmup_num_steps"] = scheduler.warmup_num_steps
        if scheduler.total_num_steps is not None:
            values["scheduler.params.total_num_steps"] = scheduler.total_num_steps
    return values


def check_combination(plugin: DeepSpeedPlugin, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Check that placeholders and the configuration's ``optimizer`` and ``scheduler`` sections fit together.

    Raises:
        ValueError: they do not; the text says what to use.
    """
    if len(optimizers) > 1 or len(schedulers) > 1:
        raise ValueError("DeepSpeed trains with one optimizer and one schedule per prepare()")
    file_optimizer, file_scheduler = ("optimizer" in plugin.deepspeed_config, "scheduler" in plugin.deepspeed_config)
    for optimizer in optimizers:
        if file_optimizer and not isinstance(optimizer, DummyOptim):
            raise ValueError(
                "the DeepSpeed configuration has an `optimizer` section: prepare a DummyOptim in place of "
                f"{type(optimizer).__name__}, or remove the section"
            )
        if not file_optimizer and isinstance(optimizer, DummyOptim):
            raise ValueError(
                "a DummyOptim stands for the `optimizer` section of the DeepSpeed configuration, and there is none: "
                "add it, or prepare an optimizer"
            )
    for scheduler in schedulers:
        dummy = isinstance(scheduler, DummyScheduler)
        if file_scheduler and not dummy:
            raise ValueError(
                "the DeepSpeed configuration has a `scheduler` section: prepare a DummyScheduler in place of "
                f"{type(scheduler).__name__}, or remove the section"
            )
        if not file_scheduler and dummy and scheduler.lr_scheduler_callable is None:
            raise ValueError(
                "a DummyScheduler stands for the `scheduler` section of the DeepSpeed configuration, and there is "
                "none: add it, give DummyScheduler an lr_scheduler_callable, or prepare a schedule"
            )
        if file_optimizer and not file_scheduler and not dummy:
            raise ValueError(
                "an optimizer from the DeepSpeed configuration needs a schedule from there too: add a `scheduler` "
                "section and prepare a DummyScheduler, or remove the `optimizer` section"
            )
