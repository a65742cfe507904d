"""Settings of training in fp8 as texts: the documented keys, variables and values, and the back ends. Torch-free.

The launch layer turns flags and ``runtime.fp8`` of a job file into ``ACCELERATE_FP8_*`` variables with `variables`; the
recipes of a training script (`orc.runtime.core.fp8_recipes`) read these with `from_environment`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orc.runtime.core.parsing import choice, nearest, read_mapping, read_variables, truth, variable_text, whole

# Back ends and the module that each needs; where nothing is said, the first whose module is there computes.
BACKENDS: Mapping[str, str] = {"MSAMP": "msamp", "TE": "transformer_engine", "AO": "torchao"}
PACKAGES: Mapping[str, str] = {"MSAMP": "ms-amp", "TE": "transformer_engine[pytorch]", "AO": "torchao"}
_SPELLINGS = {
    **{name.lower(): name for name in BACKENDS},
    **dict.fromkeys(("transformerengine", "transformersengine"), "TE"),
    "torchao": "AO",
}
FORMATS = ("HYBRID", "E4M3", "E5M2")
ALGORITHMS = ("max", "most_recent")
LEVELS = ("O1", "O2")


def backend(value: Any) -> str:
    """Return ``TE``, ``MSAMP`` or ``AO``, from either case and the names of the libraries. Raises `ValueError`."""
    text = str(value).strip().lower().replace("-", "").replace("_", "")
    if text not in _SPELLINGS:
        raise ValueError(f"expected one of te, msamp, ao{nearest(str(value).lower(), ['te', 'msamp', 'ao'])}")
    return _SPELLINGS[text]


def level(value: Any) -> str:
    """Return ``O1`` or ``O2``. Raises `ValueError`, for O3 with the reason."""
    text = str(value).strip().upper()
    if text == "O3":
        raise ValueError("O3 needs DeepSpeed 0.9.2 or older and is not offered; choose O1 or O2")
    return choice(*LEVELS)(text)


def linear_precision(value: Any) -> tuple[bool, bool, bool]:
    """Return three truth values, for fprop, dgrad and wgrad, from one for all or from three. Raises `ValueError`."""
    if isinstance(value, str) and value.strip("() ").count(","):
        value = value.strip("() ").split(",")
    if not isinstance(value, (list, tuple)):
        value = [value] * 3
    if len(value) != 3:
        raise ValueError("expected true, false, or three of them: for fprop, dgrad and wgrad")
    fprop, dgrad, wgrad = (truth(item.strip() if isinstance(item, str) else item) for item in value)
    return fprop, dgrad, wgrad


@dataclass(frozen=True, repr=False, eq=False)
class Setting:
    """Setting: its key, its parser, its default, its description, and the back end that it belongs to.

    Attributes:
        also: other documented spellings of the key.
    """

    key: str
    parse: Callable[[Any], Any]
    default: Any
    doc: str
    backend: str | None
    also: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The documented flag of the launcher, without dashes."""
        return f"fp8_{self.key.removeprefix('fp8_')}"

    @property
    def variable(self) -> str:
        """The documented variable."""
        return f"ACCELERATE_{self.flag.upper()}"


# fmt: off
SETTINGS: dict[str, Setting] = {setting.key: setting for setting in (
    Setting("backend", backend, None, "Library that computes in fp8: te, msamp or ao.", None),
    Setting("use_autocast_during_eval", truth, False, "Compute in fp8 in evaluation too (te).", "TE"),
    Setting("margin", whole(0), 0, "Margin of the scaling factor (te).", "TE"),
    Setting("interval", whole(1), 1, "Steps between two scaling factors (te).", "TE"),
    Setting("fp8_format", choice(*FORMATS), "HYBRID", "HYBRID (e4m3 forward, e5m2 backward), E4M3 or E5M2 (te).", "TE"),
    Setting("amax_history_len", whole(1), 1024, "Steps for which largest values are kept for scaling factors (te).",
            "TE", ("amax_history_length",)),
    Setting("amax_compute_algo", choice(*ALGORITHMS), "most_recent",
            "Choice among those values: max or most_recent (te).", "TE", ("amax_compute_algorithm",)),
    Setting("override_linear_precision", linear_precision, (False, False, False),
            "Products in more precision: fprop, dgrad, wgrad (te).", "TE"),
    Setting("use_mxfp8_block_scaling", truth, False, "One scaling factor for each block of 32 numbers (te).", "TE"),
    Setting("opt_level", level, "O2", "Level of MS-AMP: O1 or O2 (msamp).", "MSAMP", ("optimization_level",)),
    Setting("enable_fsdp_float8_all_gather", truth, False, "Gather shards in float8, with version 2 of FSDP (ao).",
            "AO"),
    Setting("pad_inner_dim", truth, False, "Pad the inner dimension of products to a multiple of 16 (ao).", "AO"),
)}
# fmt: on
SPELLINGS = {
    name: setting
    for setting in SETTINGS.values()
    for name in (setting.key, *setting.also, setting.flag, setting.flag.removeprefix("fp8_"))
}


def normalise(values: Any) -> dict[str, Any]:
    """Return the checked settings of a mapping with documented keys, by key. ``None`` means unset.

    Raises:
        ValueError: an unknown key (with the nearest), a bad value, or settings of different back ends.
    """
    normal = read_mapping(
        values,
        {name: (setting.key, setting.parse) for name, setting in SPELLINGS.items()},
        "{backend: te, fp8_format: HYBRID}",
    )
    check_together(normal)
    return normal


def check_together(found: Mapping[str, Any]) -> None:
    """Raise `ValueError` for parsed settings, by key, of which one belongs to another back end than the rest."""
    chosen = found.get("backend")
    for key, value in found.items():
        setting = SETTINGS[key]
        if setting.backend is None or value == setting.default:
            continue  # files are full of defaults
        if chosen is not None and setting.backend != chosen:
            raise ValueError(f"{key} belongs to the back end {setting.backend.lower()}, and {chosen.lower()} is chosen")
        chosen = setting.backend


def check_with(values: Mapping[str, Any], *, cpu: bool, deepspeed: bool) -> None:
    """Raise `ValueError` where fp8 with the settings *values* cannot be, in a run on CPUs or with DeepSpeed."""
    chosen = values.get("backend")
    if deepspeed and chosen not in (None, "AO"):
        raise ValueError(
            f"the back end {str(chosen).lower()} of fp8 and DeepSpeed do not go together in this version of orc: "
            "choose ao, shard with FSDP, or choose bf16"
        )
    if cpu and chosen not in (None, "AO"):
        raise ValueError(
            f"the back end {str(chosen).lower()} of fp8 computes on NVIDIA GPUs, not on CPUs; ao emulates it"
        )


def variables(values: Any) -> dict[str, str]:
    """Return the environment variables that carry *values*; see `normalise`."""
    return {SETTINGS[key].variable: variable_text(value) for key, value in normalise(values).items()}


def from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the parsed settings of *env* by key. Raises `ValueError` that names the variable."""
    return read_variables(env, ((setting.key, setting.variable, setting.parse) for setting in SETTINGS.values()))


def installed() -> list[str]:
    """Return the back ends whose module is in this installation, in the order in which they are chosen."""
    return [name for name, module in BACKENDS.items() if _is_there(module)]


def choose(wanted: str | None, there: Collection[str]) -> str:
    """Return the back end *wanted*, else the first that is *there*.

    Raises:
        ValueError: it is not there, or none is.
    """
    if wanted is None:
        if chosen := next((name for name in BACKENDS if name in there), None):
            return chosen
        packages = ", ".join(PACKAGES.values())
        raise ValueError(f"mixed_precision=fp8 needs one of the packages {packages}, and none is installed")
    if wanted not in there:
        others = f"; installed: {', '.join(name.lower() for name in BACKENDS if name in there)}" if there else ""
        raise ValueError(
            f"mixed_precision=fp8 with the back end {wanted.lower()} needs the package {PACKAGES[wanted]}, which is "
            f"not installed{others}"
        )
    return wanted


def _is_there(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
