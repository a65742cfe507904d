"""Option of `accelerate launch`, and the documented ones of sharding, DeepSpeed, the kinds of parallelism, FP8 and
Megatron-LM. Those that the runtime has come from its own tables, so that each setting is described once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orc.runtime.core import deepspeed_keys, fp8_settings, fsdp_settings, megatron_keys, parallelism_settings
from orc.runtime.core.parsing import choice, truth

# done: it does here what is documented. ignored: taken, and nothing follows from it. job: a job file says it instead.
# refused: nothing here can do it.
Effect = Literal["done", "ignored", "job", "refused"]

GROUPS: Mapping[str, str] = {
    "launch": "Program",
    "hardware": "Hardware",
    "resource": "Resources",
    "paradigm": "Training paradigm",
    "machines": "Several machines and restarts",
    "logs": "Logs",
    "mpi": "MPI",
    "dynamo": "Compilation (torch.compile)",
    "tpu": "TPU",
    "fsdp": "Sharded data parallelism (FSDP)",
    "deepspeed": "DeepSpeed",
    "parallelism": "Parallelism",
    "fp8": "FP8",
    "megatron": "Megatron-LM",
    "sagemaker": "Amazon SageMaker",
    "file": "Keys of a file without a flag",
}


@dataclass(frozen=True)
class Option:
    """Option, documented as a flag of `accelerate launch`, as a key of its configuration file, or as both.

    Attributes:
        name: the name of its value, with underscores.
        group: key of `GROUPS`.
        doc: one sentence for ``--help``.
        parse: gives the value from a text or a YAML value; raises `ValueError`.
        effect: see `Effect`.
        does: the effect in words, for the documentation and for errors.
        flags: the documented spellings, with underscores; hyphens are taken too. None: a key of the file only.
        switch: the flag has no value.
        key: dotted path in a configuration file (``fsdp_config.fsdp_version``); `None` for a flag only.
        keys: other documented paths of the same value.
        variable: the documented environment variable that the script sees.
        setting: the key of `orc.runtime.core.config` that carries it to the ranks.
        choices: the values that a text can have.
        default: what is documented when nothing is said.
        job: the key of ``job.yaml`` that says the same.
    """

    name: str
    group: str
    doc: str
    parse: Callable[[Any], Any]
    effect: Effect
    does: str
    flags: tuple[str, ...] = ()
    switch: bool = False
    key: str | None = None
    keys: tuple[str, ...] = ()
    variable: str | None = None
    setting: str | None = None
    choices: tuple[str, ...] = ()
    default: Any = None
    job: str | None = None

    @property
    def flag(self) -> str:
        """The long documented spelling, or the key where there is no flag."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.key or self.name)

    def says_nothing(self, value: Any) -> bool:
        """Return True for the documented default and for empty values, which files are full of."""
        return value in (None, False, "", [], {}, "no", "NO") or value == self.default

    def check(self, value: Any) -> Any:
        """Return *value*, parsed. Raises `ValueError` that begins with the flag or key."""
        try:
            return self.parse(value)
        except ValueError as error:
            raise ValueError(f"{self.flag} {value!r}: {error}") from None


def text(value: Any) -> str:
    """Parse one line of text; numbers are texts too."""
    if isinstance(value, (bool, dict, list)) or value is None:
        raise ValueError("expected text")
    found = str(value)
    if "\n" in found or "\0" in found:
        raise ValueError("expected one line of text")
    return found


def words(value: Any) -> list[str]:
    """Parse a list of words, or one text with commas between them."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of words, or words separated by commas")
    return [text(word) for word in value]


def texts(value: Any) -> list[str]:
    """Parse a list of texts, each as it is with its commas and lines; a single text is a list of one."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) and "\0" not in one for one in found):
        raise ValueError("expected a list of texts")
    return list(found)


def mapping(value: Any) -> dict[str, str]:
    """Parse ``key=value,key=value``, or a mapping."""
    if isinstance(value, Mapping):
        return {str(name): str(item) for name, item in value.items()}
    found: dict[str, str] = {}
    for part in words(value):
        name, equals, item = part.partition("=")
        if not equals or not name:
            raise ValueError("expected key=value,key=value")
        found[name] = item
    return found


def _option(section: str, prefix: str, name: str, doc: str, parse: Callable[[Any], Any], **more: Any) -> Option:
    """Return the option *prefix* + *name* of a *section* of files, and of the part of ``runtime`` of the same name."""
    given: dict[str, Any] = {
        "name": prefix + name,
        "flags": (f"--{prefix}{name}",),
        "key": f"{section}_config.{prefix}{name}",
    }
    does = {"effect": "done", "does": f"Sets it, with --use_{section}.", "job": f"runtime.{section}.{name}"}
    return Option(**{**given, **does, "group": section, "doc": doc, "parse": parse, **more})


_FSDP = tuple(
    _option(
        *("fsdp", "fsdp_", one.key, one.doc, one.parse),
        flags=tuple(f"--fsdp_{name}" for name in (one.key, one.also) if name),
        keys=(f"fsdp_config.fsdp_{one.also}",) if one.also else (),
        variable=one.variable,
    )
    for one in fsdp_settings.SETTINGS.values()
)


# Settings of DeepSpeed's launcher: `orc.launchers.accelerate.remote_launch`.
_ON_HOSTS = {
    "deepspeed_hostfile": "Runs as a job on these hosts, reached by SSH, and shows the output of all processes.",
    "deepspeed_exclusion_filter": "Leaves these hosts of the file out: `worker-2@worker-3`.",
    "deepspeed_inclusion_filter": "Takes these hosts of the file alone: `worker-0@worker-1`.",
    "deepspeed_multinode_launcher": "With --deepspeed_hostfile. pdsh: orc's agents start the processes; openmpi, "
    "mpich, impi: DeepSpeed starts them so; standard, nossh: the file is left alone, and somebody starts one launch on "
    "each machine.",
}
_RUNNERS = ("pdsh", "standard", "nossh", "openmpi", "mpich", "impi", "mvapich", "slurm")


def _deepspeed() -> Iterator[Option]:
    for one in deepspeed_keys.KEYS.values():
        if one.name == "gradient_accumulation_steps":
            continue  # an option of every run
        more: dict[str, Any] = {"variable": one.variable}
        if one.name in _ON_HOSTS:
            more |= {"does": _ON_HOSTS[one.name], "job": "launcher.options"}
        if one.name == "deepspeed_multinode_launcher":
            # pdsh is what is documented when nothing is said; files of the wizard have it without meaning it
            more |= {"parse": choice(*_RUNNERS), "default": "pdsh"}
        yield _option("deepspeed", "", one.name, one.doc, **{"parse": one.parse, **more})


_SIZES = {
    "dp_replicate": "Copies of the model, each trained on other samples.",
    "dp_shard": "Processes over which each copy is sharded.",
    "tp": "Processes that share the matrices of each layer (tensor parallelism).",
    "cp": "Processes that share each sequence (context parallelism).",
    "sp": "Processes that share each sequence by attention heads (sequence parallelism).",
    "pp": "Processes that hold one stage of the layers each (pipeline parallelism).",
}


def _parallelism() -> Iterator[Option]:
    others: tuple[tuple[str, Any, str], ...] = (
        ("enable_async_tp", False, "Overlap the exchanges of tensor parallelism, where models are compiled."),
        ("cp_backend", "torch", "Library for context parallelism."),
        ("cp_comm_strategy", "allgather", "Exchange of keys and values (cp)."),
        ("sp_backend", "deepspeed", "Library for sequence parallelism."),
        ("sp_seq_length", None, "The length of all sequences (sp)."),
        ("sp_seq_length_is_variable", True, "The length varies from batch to batch (sp)."),
        ("sp_attn_implementation", "sdpa", "Attention (sp)."),
    )
    for name, default, doc in (*((f"{name}_size", 1, doc) for name, doc in _SIZES.items()), *others):
        yield _option(
            *("parallelism", "parallelism_config_", name, doc, parallelism_settings.PARSERS[name]),
            does="Sets it, with --use_parallelism_config.",
            variable=parallelism_settings.variable(name),
            default=default,
        )


def _spellings(one: fp8_settings.Setting) -> list[str]:
    """Return the keys of a file; where there is a longer form the wizard's files have that."""
    longer = [name for name in one.also if name.startswith("amax_")]
    return list(dict.fromkeys([*longer, one.key, one.flag, *one.also]))


def _listed(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *parse* with lists, which files have, instead of tuples."""

    def parsed(value: Any) -> Any:
        found = parse(value)
        return list(found) if isinstance(found, tuple) else found

    return parsed


_FP8 = tuple(
    _option(
        *("fp8", "", one.flag, one.doc, _listed(one.parse)),
        does="Sets it, with --mixed_precision fp8.",
        switch=one.key == "use_autocast_during_eval",
        key=f"fp8_config.{_spellings(one)[0]}",
        keys=tuple(f"fp8_config.{name}" for name in _spellings(one)[1:]),
        variable=one.variable,
        job=f"runtime.fp8.{one.key}",
    )
    for one in fp8_settings.SETTINGS.values()
)


_NO_MEGATRON = (
    "The engine does not follow it; a script sets more of Megatron-LM in MegatronLMPlugin(other_megatron_args)."
)


def _megatron() -> Iterator[Option]:
    for one in megatron_keys.KEYS.values():
        yield _megatron_option(one.name, one.doc, one.parse, variable=one.variable, job=f"runtime.megatron.{one.name}")
    others: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
        *((name, truth, "Setting of Megatron-LM.") for name in _MEGATRON_SWITCHES),
        *((name, text, "Setting of Megatron-LM.") for name in _MEGATRON_TEXTS),
        ("other_megatron_args", mapping, "Further settings of Megatron-LM."),
    )
    for name, parse, doc in others:
        variable = f"MEGATRON_LM_{name.upper()}"
        yield _megatron_option(name, doc, parse, effect="refused", does=_NO_MEGATRON, variable=variable, job=None)


def _megatron_option(name: str, doc: str, parse: Callable[[Any], Any], **more: Any) -> Option:
    return _option("megatron_lm", "megatron_lm_", name, doc, parse, group="megatron", **more)


_MEGATRON_SWITCHES = (
    *("use_custom_fsdp", "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim"),
    *("optimizer_cpu_offload", "use_precision_aware_optimizer", "attention_softmax_in_fp32"),
    *("calculate_per_token_loss", "use_rotary_position_embeddings"),
)
_MEGATRON_TEXTS = (
    *("decoder_last_pipeline_num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("attention_backend", "expert_model_parallel_size", "context_parallel_size", "attention_dropout"),
    *("hidden_dropout", "expert_tensor_parallel_size"),
)

FEATURES: tuple[Option, ...] = (*_FSDP, *_deepspeed(), *_parallelism(), *_FP8, *_megatron())
