"""`DeepSpeedPlugin`: a script's options of DeepSpeed, resolved with the environment and the configuration file.

Torch-free until a model is touched. A value comes from the first of: an argument, the environment, the default; what
the configuration file says explicitly is never overruled in silence.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import PRECISIONS as HALVES
from orc.runtime.core.deepspeed_keys import check_value
from orc.runtime.engine.deepspeed.config import AUTO, HfDeepSpeedConfig
from orc.runtime.engine.deepspeed.settings import (
    PATHS,
    PRECISIONS,
    configuration,
    fill_in,
    given_by_launcher,
    meet_file,
    precision_of,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass
class DeepSpeedPlugin:
    """Plug-in that makes an `Accelerator` train with DeepSpeed.

    Args:
        hf_ds_config: DeepSpeed's configuration: the path of a JSON file, a dictionary, JSON in base64 or a
            `HfDeepSpeedConfig`; else the file named by ``ACCELERATE_DEEPSPEED_CONFIG_FILE``. Without one the other
            settings here make the configuration; with one they fill in what it leaves out or leaves to ``auto``.
        gradient_accumulation_steps: batches per optimizer step; ``auto`` is the Accelerator's.
        gradient_clipping: largest norm of the gradients, 0 not to clip; when nobody says it, DeepSpeed's default (1.0).
        zero_stage: 0 to 3; 2 when nobody says it.
        is_train_batch_min: of several loaders the smallest batch size is the micro batch size, else the largest.
        offload_optimizer_device: ``none``, ``cpu`` or ``nvme``: where the optimizer's state is.
        offload_param_device: the same for parameters.
        offload_optimizer_nvme_path: folder for ``nvme``.
        offload_param_nvme_path: the same for parameters.
        zero3_init_flag: construct models sharded (``deepspeed.zero.Init``); so with stage 3 when nobody says it.
        zero3_save_16bit_model: gather the weights for saving with stage 3.
        transformer_moe_cls_names: classes of mixture-of-experts layers, comma-separated.
        enable_msamp: refused, FP8 by MS-AMP is not supported.
        msamp_opt_level: refused with it.

    Raises:
        ValueError: a value that cannot be used, or settings that contradict the configuration; the text names them.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    offload_optimizer_nvme_path: Any = None
    offload_param_nvme_path: Any = None
    zero3_init_flag: Any = None
    zero3_save_16bit_model: Any = None
    transformer_moe_cls_names: Any = None
    enable_msamp: Any = None
    msamp_opt_level: Any = None
    # Values that `prepare` put in place of ``auto``, to be found again by the next one.
    _filled: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _selected: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ValueError("DeepSpeedPlugin(enable_msamp=...): FP8 by MS-AMP is not supported")
        env = os.environ
        self._from_launcher = given_by_launcher(env)
        arguments = {name: getattr(self, name) for name in PATHS}
        given = {name: check_value(name, value) for name, value in arguments.items() if value is not None}
        told = {name: value for name, value in self._from_launcher.items() if name not in given}
        flag = self.zero3_init_flag if self.zero3_init_flag is not None else self._from_launcher.get("zero3_init_flag")
        classes = self.transformer_moe_cls_names or self._from_launcher.get("deepspeed_moe_layer_cls_names")
        self.transformer_moe_cls_names = classes
        file_from_launcher = self.hf_ds_config is None and "deepspeed_config_file" in self._from_launcher
        if file_from_launcher:
            self.hf_ds_config = self._from_launcher["deepspeed_config_file"]
        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(configuration({**told, **given}))
        else:
            if not isinstance(self.hf_ds_config, HfDeepSpeedConfig) or type(self.hf_ds_config) is HfDeepSpeedConfig:
                self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
            # else of a class derived from ours: its owner goes on filling it in (Transformers)
            meet_file(self.hf_ds_config, given, told, file_from_launcher, env)
            fill_in(self.hf_ds_config, {**told, **given})
        self.deepspeed_config["steps_per_print"] = float("inf")  # a script prints for itself
        self.zero3_init_flag = self.zero_stage_of() == 3 if flag is None else check_value("zero3_init_flag", flag)
        if self.zero3_init_flag and self.zero_stage_of() != 3:
            self.zero3_init_flag = False  # as documented: stage 3 only
        self._drop_offloads()
        self._show()
        self._check()

    # ---- the configuration

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, a nested dictionary."""
        return self.hf_ds_config.config  # type: ignore[no-any-return]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for ``deepspeed.zero.Init``: without the values that only `prepare` has."""
        return self._for_init().config

    @property
    def selected(self) -> bool:
        """`True` if this is the plug-in in force."""
        return self._selected

    def zero_stage_of(self) -> Any:
        """Return the stage that the configuration sets; 0 if nothing, as DeepSpeed takes it."""
        return self.get_value("zero_optimization.stage", 0)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the configuration's value at *ds_key_long* (``zero_optimization.stage``), or *default*."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the configuration's value at *ds_key_long* is ``auto``."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Put ``kwargs[ds_key_long]`` where the configuration sets ``auto``; note where it differs.

        Args:
            ds_key_long: the path of the value.
            mismatches: gets a line when *must_match* and the configuration's value is another one.
            must_match: whether it has to be the same.
            kwargs: values by path.

        Raises:
            ValueError: the value is ``auto`` and *kwargs* has none for it.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None or key not in node:
            return
        if node[key] == AUTO:
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"`{ds_key_long}` is auto in the DeepSpeed configuration and nothing here says its value: set it "
                    "in the configuration"
                )
            if kwargs[ds_key_long] != AUTO:
                node[key] = kwargs[ds_key_long]
                self._filled.add(ds_key_long)
        elif must_match and ds_key_long in kwargs and node[key] != kwargs[ds_key_long]:
            line = f"{ds_key_long} is {node[key]!r} in the configuration and {kwargs[ds_key_long]!r} here"
            if mismatches is not None:
                mismatches.append(line)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in every ``auto`` below *prefix* with *kwargs* (values by path), see `fill_match`.

        Args:
            mismatches: a list that gets the values that differ.
            config: the section to work on; the whole configuration unless given.

        Raises:
            ValueError: an ``auto`` without a value, or, with *must_match*, values that differ; all of them are named.
        """
        problems: list[str] = [] if mismatches is None else mismatches
        section = self.deepspeed_config if config is None else config
        for key, value in list(section.items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", problems, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{key}", problems, must_match, **kwargs)
        if mismatches is None and problems:
            raise ValueError(
                f"the DeepSpeed configuration contradicts what is prepared: {'; '.join(problems)}. The easiest way is "
                "to set these values of the configuration to auto"
            )

    def reopen(self) -> None:
        """Set what an earlier `prepare` had filled in to ``auto`` again."""
        for path in self._filled:
            self.hf_ds_config.set_value(path, AUTO)
        self._filled.clear()

    # ---- precision

    def set_mixed_precision(self, mixed_precision: str, *, explicit: bool = False) -> str:
        """Bring the configuration's precision and *mixed_precision* together; return the one in force.

        What the configuration says explicitly wins over the environment and the default.

        Raises:
            ValueError: *mixed_precision* is an *explicit* argument and the configuration says another one.
        """
        said = precision_of(self.hf_ds_config)
        half = HALVES[mixed_precision]  # what DeepSpeed computes in; layers may compute in fewer bits
        if said is not None and said == half:
            said = mixed_precision
        if said is not None and explicit and mixed_precision != said:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} contradicts the DeepSpeed configuration, which says {said!r}: "
                "set `enabled` of its fp16 and bf16 sections to auto, or leave the argument out"
            )
        chosen = mixed_precision if said is None else said
        for name in PRECISIONS:
            section = self.deepspeed_config.setdefault(name, {"enabled": AUTO})
            if section.get("enabled", AUTO) == AUTO:
                section["enabled"] = name == HALVES[chosen]
                if name == "fp16" and chosen == "fp16":
                    section.setdefault("auto_cast", True)
        return chosen

    # ---- models

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plug-in in force; called by ``state.select_deepspeed_plugin``.

        Raises:
            NotImplementedError: called by itself; the state has to know.
        """
        if not _from_accelerator_state:
            raise NotImplementedError(
                "a DeepSpeed plug-in is selected by its name: accelerator.state.select_deepspeed_plugin(name)"
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def deselect(self) -> None:
        """Make this a plug-in that is not in force."""
        self._selected = False

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are constructed sharded."""
        return bool(self.zero3_init_flag)

    def zero3_init_context_manager(self, enable: bool = False) -> AbstractContextManager[Any]:
        """Return a block in which models are constructed sharded (*enable*), or one in which they are not."""
        if not enable:
            from orc.runtime.engine.deepspeed.library import unsharded_construction

            return unsharded_construction()
        if self.zero_stage_of() != 3:
            return nullcontext()
        from orc.runtime.engine.deepspeed.library import sharded_construction

        return sharded_construction(self.config)

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Make ZeRO-3 treat each mixture-of-experts layer of *model* as one module: experts run on some ranks only.

        Raises:
            ValueError: *model* has no layer of one of the classes.
        """
        names = self.transformer_moe_cls_names
        if not names or self.zero_stage_of() != 3:
            return
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        classes = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in wanted if name not in classes]
        if missing:
            raise ValueError(
                f"deepspeed_moe_layer_cls_names: {type(model).__name__} has no layer of class {', '.join(missing)}"
            )
        from orc.runtime.engine.deepspeed.library import set_leaf_modules

        set_leaf_modules(model, [classes[name] for name in wanted])

    def set_deepspeed_weakref(self) -> None:
        """Set whether Transformers, where it is installed, constructs models sharded; it keeps a weak reference."""
        from orc.runtime.engine.deepspeed.library import tell_transformers

        self._told = self._for_init() if self.zero3_init_flag else None  # kept alive by this plug-in
        tell_transformers(self._told)

    def _for_init(self) -> HfDeepSpeedConfig:
        """Return a copy in which nothing is ``auto``, for models that are constructed before `prepare`."""
        copy = HfDeepSpeedConfig(self.hf_ds_config)
        if copy.get_value("gradient_accumulation_steps", AUTO) == AUTO:
            copy.set_value("gradient_accumulation_steps", 1)
        if copy.get_value("train_micro_batch_size_per_gpu", AUTO) == AUTO:
            copy.set_value("train_micro_batch_size_per_gpu", 1)
        copy.del_config_sub_tree("train_batch_size")  # follows from the two others
        for path in list(copy.autos()):
            copy.del_config_sub_tree(path)
        return copy

    # ---- construction

    def _drop_offloads(self) -> None:
        """Take offloading away that the stage has nothing for: documented as applicable from a stage on, no more."""
        stage = check_value("zero_stage", self.zero_stage_of())
        for kind, least in (("optimizer", 1), ("param", 3)):
            path = f"zero_optimization.offload_{kind}.device"
            where = self.get_value(path, "none")
            if where != "none" and stage < least:
                warnings.warn(
                    f"offload_{kind}_device={where!r} has no effect: it needs zero_stage {least} or more, and it is "
                    f"{stage}",
                    stacklevel=4,
                )
                self.hf_ds_config.set_value(path, "none")

    def _show(self) -> None:
        """Set the attributes to the values of the configuration."""
        self.gradient_accumulation_steps = self.get_value("gradient_accumulation_steps", AUTO)
        self.gradient_clipping = self.get_value("gradient_clipping")
        self.zero_stage = self.zero_stage_of()
        for kind in ("optimizer", "param"):
            section = f"zero_optimization.offload_{kind}"
            setattr(self, f"offload_{kind}_device", self.get_value(f"{section}.device", "none"))
            setattr(self, f"offload_{kind}_nvme_path", self.get_value(f"{section}.nvme_path"))
        gathers = self.get_value(str(PATHS["zero3_save_16bit_model"]), False)
        self.zero3_save_16bit_model = gathers

    def _check(self) -> None:
        check_value("zero_stage", self.zero_stage)
        for kind in ("optimizer", "param"):  # without a folder for nvme: the documented command line has no flag for it
            check_value(f"offload_{kind}_device", getattr(self, f"offload_{kind}_device"))
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            if getattr(self, name) is not None:
                check_value(name, getattr(self, name))
