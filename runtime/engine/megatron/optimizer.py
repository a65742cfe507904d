"""Megatron-LM's optimizer and schedule, made from those that a script prepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from orc.runtime.collectives.objects import gather_object
from orc.runtime.engine.megatron import states

if TYPE_CHECKING:
    from orc.runtime.core.handlers import GradScalerKwargs
    from orc.runtime.engine.megatron.model import MegatronModel
    from orc.runtime.engine.megatron.plugin import MegatronLMDummyScheduler, MegatronLMPlugin

_KINDS = {"Adam": ("adam", False), "AdamW": ("adam", True), "SGD": ("sgd", False)}


def check_optimizer(optimizer: Any) -> None:
    """Raise `ValueError` for an optimizer that Megatron-LM has no counterpart of, or settings it would not follow."""
    name = type(optimizer).__name__
    if name not in _KINDS:
        raise ValueError(f"Megatron-LM trains with an optimizer of its own: prepare Adam, AdamW or SGD, not {name}")
    for setting in ("amsgrad", "maximize", "nesterov", "dampening"):
        if any(group.get(setting) for group in optimizer.param_groups):
            raise ValueError(f"{name}({setting}=...): Megatron-LM's optimizer has no {setting}")
    names = ("betas", "eps", "momentum")
    if any(
        group.get(name) != optimizer.param_groups[0].get(name) for group in optimizer.param_groups for name in names
    ):
        raise ValueError(f"{name}: {', '.join(names)} must be the same in all groups for Megatron-LM's optimizer")


def rates_by_name(optimizer: Any, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the learning rate and weight decay of each parameter of the Transformers *model*, by name.

    Raises:
        ValueError: a parameter that *optimizer* does not train; Megatron-LM trains them all.
    """
    rates = {id(parameter): (float(group["lr"]), float(group.get("weight_decay", 0)))
             for group in optimizer.param_groups for parameter in group["params"]}  # fmt: skip
    named = dict(model.named_parameters())
    frozen = [name for name, weight in named.items() if id(weight) not in rates or not weight.requires_grad]
    if frozen:
        raise ValueError(
            f"the optimizer does not train {', '.join(frozen[:3])}{'...' if len(frozen) > 3 else ''}: Megatron-LM's "
            "engine trains all parameters of the model; give them to the optimizer"
        )
    return {name: rates[id(weight)] for name, weight in named.items()}


class MegatronOptimizer:
    """Megatron-LM's optimizer with a state that is whole: by Transformers' names, the same at every layout.

    Args:
        model: whose parameters it trains.
        given: the script's optimizer.
        rates: learning rate and weight decay of each parameter, by Transformers' name.
        plugin: clipping, and whether its state is sharded.
        precision: of the run.
        scaling: where the scale of fp16's losses begins, and after how many steps it grows.

    Attributes:
        inner: Megatron-LM's.
        gathers_state: its state dict is whole, and all processes ask for it together.
    """

    gathers_state = True

    def __init__(
        self,
        model: MegatronModel,
        given: Any,
        rates: Mapping[str, tuple[float, float]],
        plugin: MegatronLMPlugin,
        precision: str,
        scaling: GradScalerKwargs,
    ) -> None:
        self._model = model
        self.defaults = given.defaults
        kind, decoupled = _KINDS[type(given).__name__]
        group = given.param_groups[0]
        self.lr = max(rate for rate, _ in rates.values())
        self.weight_decay = max(decay for _, decay in rates.values())
        betas = group.get("betas", (0.9, 0.999))
        shards = plugin.use_distributed_optimizer and plugin.data_parallel_size != 1
        config = OptimizerConfig(
            optimizer=kind,
            lr=self.lr,
            min_lr=plugin.min_lr,
            weight_decay=self.weight_decay,
            decoupled_weight_decay=decoupled,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=group.get("eps", 1e-8),
            sgd_momentum=group.get("momentum", 0.0),
            clip_grad=plugin.gradient_clipping,
            use_distributed_optimizer=shards,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            initial_loss_scale=scaling.init_scale,
            loss_scale_window=scaling.growth_interval,
        )
        overrides = self._overrides(rates, plugin)
        pieces = list(model.pieces)
        self.inner = get_megatron_optimizer(config, pieces, config_overrides=overrides)
        self._single = getattr(self.inner, "chained_optimizers", [self.inner])[0]  # there are no experts to chain
        self.masters = model.masters = states.Masters(self._single, shards)
        model.layout.config.grad_scale_func = self.inner.scale_loss if precision == "fp16" else None
        for one in self.param_groups:  # as without a schedule
            one["lr"] = one["max_lr"]
            one["weight_decay"] = self.weight_decay * one["wd_mult"]

    def _overrides(self, rates: Mapping[str, tuple[float, float]], plugin: MegatronLMPlugin) -> dict[Any, Any]:
        """Return Megatron-LM's groups: parameters with a learning rate or weight decay other than the highest."""
        layout, pieces = self._model.layout, self._model.bare
        groups: dict[tuple[float, float], set[int]] = {}
        for weight in layout.weights():  # of all stages: every process refuses alike
            if len({rates[name] for name in weight.theirs}) > 1:
                raise ValueError(
                    f"{', '.join(weight.theirs)} are one weight in Megatron-LM's model, and the optimizer has "
                    "different learning rates or weight decays for them: put them into one group"
                )
        for weight in (*layout.weights(), *layout.copies()):
            if (parameter := states.parameter_of(pieces, weight)) is None:
                continue  # Megatron-LM brings the groups of all stages together
            name = weight.theirs[0]
            rate, decay = rates[name]
            if plugin.no_wd_decay_cond is not None and plugin.no_wd_decay_cond(name, parameter):
                decay = 0.0
            if plugin.scale_lr_cond is not None and plugin.scale_lr_cond(name, parameter):
                rate *= plugin.lr_mult
            groups.setdefault((rate, decay), set()).add(id(parameter))
        overrides = {}
        for number, ((rate, decay), members) in enumerate(groups.items()):
            if (rate, decay) != (self.lr, self.weight_decay):
                values: dict[str, float] = {"wd_mult": decay / self.weight_decay if self.weight_decay else 1.0}
                if rate != self.lr:
                    values["max_lr"] = rate
                predicate = ParamWithNamePredicate(f"group {number}", _Members(members))
                overrides[ParamKey(with_name_predicate=predicate)] = values
        return overrides

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Megatron-LM's groups of this process's parameters."""
        return self.inner.param_groups  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """State per parameter of this process."""
        return self.inner.optimizer.state

    def step(self) -> tuple[bool, float | None]:
        """Clip and update; returns whether it updated, and the norm of the gradients before (`None`: not clipped)."""
        with self._prepared_once():
            done, norm, _ = self.inner.step()
        return bool(done), norm

    def norm(self) -> float:
        """Return the norm of all gradients of the last backward. Collective."""
        with self._prepared_once():
            self.inner.prepare_grads()
            return float(self.inner.get_grad_norm())

    @contextmanager
    def _prepared_once(self) -> Iterator[None]:
        """Block that prepares the gradients of a backward only the first time: it divides them by the loss scale."""
        prepare, model = self.inner.prepare_grads, self._model

        def once() -> bool:
            if model.overflowed is None:
                model.overflowed = bool(prepare())
            return model.overflowed

        self.inner.prepare_grads = once
        try:
            yield
        finally:
            del self.inner.prepare_grads  # that of its class again

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state by Transformers' names, on every process. Collective."""
        own, masters = self.inner.optimizer.state, self.masters
        names = sorted({name for values in own.values() for name, value in values.items() if _like_parameter(value)})
        every = sorted(set(gather_object(names)))  # a stage whose optimizer has made no update has none

        def take(name: str, parameter: nn.Parameter) -> Tensor:
            main = masters.of(parameter)
            return masters.whole(parameter, own[main].get(name) if main is not None and main in own else None)

        moments = {name: states.gathered(self._model.layout, self._model.bare, partial(take, name)) for name in every}
        steps = gather_object([float(values["step"]) for values in own.values() if "step" in values])
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        state = {"moments": moments, "step": max(steps, default=0.0), "param_groups": groups}
        if (scaler := getattr(self._single, "grad_scaler", None)) is not None:
            state["scale"] = scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, at whatever layout, on every process.

        Raises:
            ValueError: it is no such state, or of another model.
        """
        moments = state_dict.get("moments")
        if not isinstance(moments, Mapping):
            raise ValueError("it is not the state of Megatron-LM's optimizer")
        own, masters = self.inner.optimizer.state, self.masters
        for name, whole in moments.items():
            if (wrong := states.problem(self._model.layout, whole)) is not None:
                raise ValueError(f"{name}: {wrong}")

            def put(parameter: nn.Parameter, part: Tensor, name: str = name) -> None:
                if (main := masters.of(parameter)) is None:
                    return
                value = masters.share(parameter, part)
                own[main][name] = value.to(main).clone(memory_format=torch.contiguous_format)
                if state_dict["step"]:
                    own[main]["step"] = torch.tensor(float(state_dict["step"]))

            states.scattered(self._model.layout, self._model.bare, whole, put)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group.update({key: value for key, value in saved.items() if key in ("lr", "weight_decay")})
        if (scaler := getattr(self._single, "grad_scaler", None)) is not None and "scale" in state_dict:
            for name in scaler.state_dict():  # its own loading moves the scale to a CUDA device
                value = state_dict["scale"][name]
                setattr(scaler, f"_{name}", value.to(scaler.min_scale.device) if isinstance(value, Tensor) else value)


class _Members:
    """Predicate of a parameter and its name: it is one of those with these identities."""

    def __init__(self, members: set[int]) -> None:
        self._members = members

    def __call__(self, parameter: nn.Parameter, name: str) -> bool:
        return id(parameter) in self._members


def _like_parameter(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def schedule(
    placeholder: MegatronLMDummyScheduler, optimizer: MegatronOptimizer, plugin: MegatronLMPlugin
) -> OptimizerParamScheduler:
    """Return Megatron-LM's schedule, in optimizer steps.

    Raises:
        ValueError: nobody says how many steps there are, or the warm-up is longer.
    """
    total = plugin.lr_decay_iters or placeholder.total_num_steps or plugin.train_iters
    if not total:
        raise ValueError("MegatronLMDummyScheduler needs total_num_steps, or MegatronLMPlugin(lr_decay_iters=...)")
    warmup = placeholder.warmup_num_steps or plugin.lr_warmup_iters or int((plugin.lr_warmup_fraction or 0) * total)
    if warmup >= total:
        raise ValueError(f"the schedule warms up for {warmup} steps, but has {total}")
    start = optimizer.weight_decay if plugin.start_weight_decay is None else plugin.start_weight_decay
    end = optimizer.weight_decay if plugin.end_weight_decay is None else plugin.end_weight_decay
    if end < start or (plugin.weight_decay_incr_style == "constant" and start != end):
        raise ValueError(f"the weight decay cannot go from {start} to {end} with {plugin.weight_decay_incr_style!r}")
    return OptimizerParamScheduler(
        optimizer.inner,
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=plugin.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=total,
        lr_decay_style=plugin.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=total,
        wd_incr_style=plugin.weight_decay_incr_style,
    )
