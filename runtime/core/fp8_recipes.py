"""The documented option objects of training in fp8, one for each back end. Torch-free.

What a script leaves out comes from the ``ACCELERATE_FP8_*`` variables, which a launcher sets, then from the defaults.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from orc.runtime.core import fp8_settings
from orc.runtime.core.handlers import KwargsHandler


class FP8Recipe(KwargsHandler):
    """Base of the options of one back end of fp8.

    Attributes:
        precision: the mixed precision that they belong to.
        backend: the back end, ``TE``, ``MSAMP`` or ``AO``; of `FP8RecipeKwargs` `None` where the installation decides.
    """

    precision: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        given = fp8_settings.from_environment(os.environ)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            setting = fp8_settings.SETTINGS.get(field.name)
            if setting is None:
                continue
            value = getattr(self, field.name)
            if value is None:
                value = given.get(field.name, setting.default)
            else:
                try:
                    value = setting.parse(value)
                except ValueError as error:
                    raise ValueError(f"{type(self).__name__}: {field.name}={value!r}: {error}") from None
            setattr(self, field.name, value)


@dataclass
class TERecipeKwargs(FP8Recipe):
    """Options of Transformer Engine. What is `None` comes from the variable of its name, then from the default.

    Attributes:
        use_autocast_during_eval: compute in fp8 in evaluation too; metrics are generally better without.
        margin: of the scaling factor; 0.
        interval: steps between two scaling factors; 1.
        fp8_format: ``HYBRID`` (the default: e4m3 forward, e5m2 backward), ``E4M3`` or ``E5M2``.
        amax_history_len: steps that largest values are kept for scaling factors; 1024.
        amax_compute_algo: ``most_recent`` (the default) or ``max`` of those values.
        override_linear_precision: whether fprop, dgrad and wgrad are computed in more precision.
        use_mxfp8_block_scaling: one scaling factor for each block of 32 numbers, instead of the delayed one.
    """

    backend: ClassVar[str] = "TE"

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None


@dataclass
class MSAMPRecipeKwargs(FP8Recipe):
    """Options of MS-AMP.

    Attributes:
        opt_level: ``O1``: weight gradients and their all-reduce in 8 bits; ``O2`` (the default): the optimizer's first
            state in 8 and its second in 16 bits, too, for Adam.
    """

    backend: ClassVar[str] = "MSAMP"

    opt_level: str | None = None


@dataclass
class AORecipeKwargs(FP8Recipe):
    """Options of torchao.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``; its defaults where there is none.
        module_filter_func: called with a module and its name, says whether to compute it in float8; by default every
            `torch.nn.Linear` does whose sizes are multiples of 16, but not the first and the last of the model.
        pad_inner_dim: pad the inner dimension of products to a multiple of 16.
        enable_fsdp_float8_all_gather: gather shards in float8, with version 2 of FSDP.
    """

    backend: ClassVar[str] = "AO"

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather")}
        super().__post_init__()
        for name, value in given.items():
            if self.config is None:
                break
            said = bool(getattr(self.config, name, False))
            if value is not None and bool(value) != said:
                raise ValueError(f"AORecipeKwargs: {name}={value} contradicts config, which says {said}")
            setattr(self, name, said)


@dataclass
class FP8RecipeKwargs(FP8Recipe):
    """Options of any back end of fp8. Deprecated: use `TERecipeKwargs`, `MSAMPRecipeKwargs` or `AORecipeKwargs`.

    Attributes:
        opt_level: see `MSAMPRecipeKwargs`.
        backend: ``TE``, ``MSAMP`` or ``AO`` in either case; without, the first that is installed of msamp, te and ao.
        optimization_level: another spelling of *opt_level*.
        others: see `TERecipeKwargs`.
    """

    opt_level: str | None = None
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    backend: str | None = None
    optimization_level: str | None = None

    def __post_init__(self) -> None:
        if self.optimization_level is not None:
            if self.opt_level not in (None, self.optimization_level):
                raise ValueError("FP8RecipeKwargs: opt_level and optimization_level are the same and differ here")
            self.opt_level = self.optimization_level
        said = {name: value for name, value in self.to_dict().items() if value is not None}
        said.pop("optimization_level", None)
        super().__post_init__()
        self.optimization_level = self.opt_level
        try:
            fp8_settings.check_together({name: getattr(self, name) for name in said})
        except ValueError as error:
            raise ValueError(f"FP8RecipeKwargs: {error}") from None
        warnings.warn(
            "FP8RecipeKwargs is deprecated: use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs",
            FutureWarning,
            stacklevel=3,
        )

    def of(self, backend: str) -> FP8Recipe:
        """Return the options of *backend* in these."""
        kind = RECIPES[backend]
        fields = [field.name for field in dataclasses.fields(kind) if hasattr(self, field.name)]  # type: ignore[arg-type]
        return kind(**{name: getattr(self, name) for name in fields})

    def to_kwargs(self) -> dict[str, Any]:
        """Return only the options that are not the defaults."""
        default = {name: setting.default for name, setting in fp8_settings.SETTINGS.items()}
        values = {name: value for name, value in self.to_dict().items() if name != "optimization_level"}
        return {name: value for name, value in values.items() if value != default[name]}


RECIPES: dict[str, type[FP8Recipe]] = {"MSAMP": MSAMPRecipeKwargs, "TE": TERecipeKwargs, "AO": AORecipeKwargs}


def resolve_recipe(given: FP8Recipe | None) -> FP8Recipe:
    """Return the options of the back end of *given*, else of the one in the environment, else of an installed one.

    Raises:
        ValueError: the back end is not installed, or none is.
    """
    wanted: str | None = getattr(given, "backend", None)
    if wanted is None:
        wanted = fp8_settings.from_environment(os.environ).get("backend")
    chosen = fp8_settings.choose(wanted, fp8_settings.installed())
    if isinstance(given, FP8RecipeKwargs):
        return given.of(chosen)
    return RECIPES[chosen]() if given is None else given
