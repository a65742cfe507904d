"""Commands about models: `orc estimate-memory`, `orc merge-weights`, `orc to-fsdp2`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click
import yaml

from orc.launchers.errors import LaunchError
from orc.launchers.spec import source
from orc.orchestrator.cli.invocation import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, echo_json, echo_result, table
from orc.runtime.core import fsdp_settings as settings

_DTYPES = ("float32", "float16", "int8", "int4")
_TRAINED = ("float32", "bfloat16", "float16")
_OPTIMIZERS = ("adamw", "adam8bit", "adafactor", "sgd", "momentum")
_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "total")


def _of_runtime(*names: str) -> list[Any]:
    """Return modules of the runtime, by name: no other command may bring torch along. Raises `LaunchError`."""
    try:
        return [importlib.import_module(f"orc.runtime.{name}") for name in names]
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed here", hint="pip install 'orc-launch[runtime]'") from None


@click.command("estimate-memory", context_settings=EITHER_SPELLING)
@click.argument("model", metavar="MODEL")
@click.option(
    "--library-name", type=click.Choice(["timm", "transformers"]),
    help="Library of the model, if the Hub does not name it.",
)  # fmt: skip
@click.option(
    "--dtypes", "first", type=click.Choice(_DTYPES), multiple=True, help="Data types, one or more. [default: all]"
)
@click.argument("more", nargs=-1, type=click.Choice(_DTYPES), metavar="[DTYPE ...]")
@click.option("--trust-remote-code", is_flag=True, help="Run code of the model's repository.")
@click.option("--parallelism", metavar="DIM=N,...", help="Training on each process: dp_shard=4,tp=2,pp=2,cp=2.")
@click.option("--batch", type=click.IntRange(1), help="Rows of one process; with --parallelism.")
@click.option("--seq-length", type=click.IntRange(1), help="Tokens of a row.")
@click.option(
    "--dtype", type=click.Choice(_TRAINED), help="Data type of parameters, gradients and states.   [default: float32]"
)
@click.option(
    "--mixed-precision", type=click.Choice(("no", "bf16", "fp16")), help="Precision of activations.  [default: no]"
)
@click.option("--optimizer", type=click.Choice(_OPTIMIZERS), help="[default: adamw]")
@click.option("--microbatches", type=click.IntRange(1), help="Micro-batches of a pipeline.  [default: its stages]")
@click.option("--activation-checkpointing", is_flag=True, help="Layers are computed again in backward.")
@json_option
def estimate_memory_command(
    model: str,
    library_name: str | None,
    first: tuple[str, ...],
    more: tuple[str, ...],
    trust_remote_code: bool,
    as_json: bool,
    parallelism: str | None,
    **training: Any,
) -> None:
    """Estimate the memory for loading MODEL and for training it with Adam; with --parallelism, of each process.

    MODEL is a folder with a config.json, such a file, package.module:Class, file.py:Class, or a name on the Hub. Only
    the configuration is read: the model is made without memory. It needs torch, and the model's library.
    """
    if more and not first:
        raise click.UsageError(f"{more[0]}: name dtypes after --dtypes")
    given = {name: value for name, value in training.items() if value}
    if parallelism is None and given:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} works with --parallelism alone")
    if parallelism is not None and first:
        raise click.UsageError("--dtypes does not go with --parallelism; --dtype names the type that is trained")
    with waiting("loading torch"):
        models, sizes = _of_runtime("weights.named_models", "memory.sizes")
    try:
        with waiting(f"making {model} without memory"):
            made = models.empty_model(model, library_name, trust_remote_code)
    except models.ModelNotFound as error:
        raise LaunchError(str(error), where=model) from None
    if parallelism is not None:
        _on_each_process(model, made, parallelism, given, as_json)
        return
    wanted = [dtype for dtype in _DTYPES if dtype in {*first, *more}] or list(_DTYPES)
    estimates = sizes.estimate_memory(made, wanted)
    if as_json:
        names = ("dtype", "largest_layer", "total", "training")
        echo_json({"model": model, "estimates": [{name: getattr(e, name) for name in names} for e in estimates]})
        return
    echo(f"Memory for loading {model}:\n")
    echo(table(["dtype", "Largest Layer", "Total Size", "Training using Adam"], [e.row() for e in estimates]))
    echo("\nInference takes up to a fifth more; activations of training come on top.")


def _on_each_process(model: str, made: Any, parallelism: str, given: dict[str, Any], as_json: bool) -> None:
    memory, sizes = _of_runtime("weights.parallel_memory", "memory.sizes")
    spelled = {"seq_length": "sequence", "activation_checkpointing": "checkpointing"}
    named = {spelled.get(name, name): value for name, value in given.items()}
    try:
        training = memory.Training(memory.parse_parallelism(parallelism), **named)
        estimate = memory.estimate_parallel_memory(made, training)
    except ValueError as error:
        raise LaunchError(str(error), where="--parallelism") from None
    stages = [{part: getattr(stage, part) for part in _PARTS} for stage in estimate.stages]
    largest = {part: getattr(estimate.largest, part) for part in _PARTS}
    if as_json:
        told = {"model": model, "parallelism": dict(training.sizes), "processes": training.processes}
        echo_json({**told, "largest": largest, "stages": stages, "notes": estimate.notes})
        return
    shown = [["" if one[p] is None else sizes.convert_bytes(one[p]) for one in stages] for p in _PARTS]
    heads = ["of each process"] if len(stages) == 1 else [f"stage {number}" for number in range(len(stages))]
    echo(f"Memory for training {model} on {training.processes} processes:\n")
    echo(table(["", *heads], [(part, *row) for part, row in zip(_PARTS, shown, strict=True)]))
    for note in estimate.notes:
        echo(f"\n{note}.")


@click.command("merge-weights", context_settings=EITHER_SPELLING)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("output_path", metavar="OUT", type=click.Path(path_type=Path, file_okay=False))
@click.option("--unsafe-serialization", is_flag=True, help="Write pytorch_model.bin instead of model.safetensors.")
@click.option("--remove-checkpoint-dir", is_flag=True, help="Remove the shards afterwards.")
@json_option
def merge_weights_command(
    directory: Path, output_path: Path, unsafe_serialization: bool, remove_checkpoint_dir: bool, as_json: bool
) -> None:
    """Merge the shards of a model in DIR (pytorch_model_0 of a checkpoint, or the checkpoint) into one file in OUT.

    It needs torch, and memory for the whole model once.
    """
    merge, errors = _of_runtime("checkpoint.merge", "checkpoint.errors")
    try:
        with waiting(f"merging the shards in {directory}"):
            file = merge.merge_fsdp_weights(directory, output_path, not unsafe_serialization, remove_checkpoint_dir)
    except (errors.CheckpointError, OSError, ValueError) as error:
        raise LaunchError(str(error), where=str(directory)) from None
    echo_result(as_json, {"file": file}, f"wrote {file}")


# Where the settings lie: in a job file, or in a configuration file of Accelerate.
_PLACES = (("runtime", "fsdp"), ("fsdp_config",))
_DROPPED = {
    "backward_prefetch_policy": "version 2 prefetches by itself",
    "use_orig_params": "version 2 always keeps the parameters of the model",
    "sync_module_states": "version 2 does it when it shards",
}


class NotConvertibleError(ValueError):
    """A file without settings of version 1, or with one that version 2 does not have."""


def convert(text: str, where: str) -> tuple[str, list[str]]:
    """Return *text* (YAML) with its FSDP settings in version 2, and a note for each that has no counterpart.

    *where* names the file in messages.

    Raises:
        SpecError: it is no YAML.
        NotConvertibleError: there is nothing to convert, or it cannot be; the message has the reason.
    """
    document = source.compose(text, where)
    node = next((found for place in _PLACES if (found := _below(document, place))), None)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise NotConvertibleError("no FSDP settings in it, neither runtime.fsdp nor fsdp_config")
    if node.flow_style:
        raise NotConvertibleError("write the FSDP settings one a line, not in braces")
    edits: list[tuple[int, int, str]] = []
    notes: list[str] = []
    prefix = "fsdp_" if node.value[0][0].value.startswith("fsdp_") else ""
    begin = node.value[0][0].start_mark
    versioned = False
    for key, value in node.value:
        setting = settings.find(key.value)
        if setting is None:
            raise NotConvertibleError(f"line {key.start_mark.line + 1}: unknown key {key.value!r}")
        if not isinstance(value, yaml.ScalarNode):
            continue  # a list of classes
        try:
            parsed = setting.parse(value.value) if value.value.strip() else None
        except ValueError as error:
            raise NotConvertibleError(f"line {key.start_mark.line + 1}: {key.value}: {error}") from None
        line = text.rfind("\n", 0, key.start_mark.index) + 1, (text + "\n").find("\n", value.end_mark.index) + 1
        span = key.start_mark.index, value.end_mark.index
        if setting.key == "version":
            if parsed == 2:
                raise NotConvertibleError("it is of version 2 already")
            edits.append((*span, f"{key.value}: 2"))
            versioned = True
        elif setting.key in _DROPPED:
            edits.append((*line, ""))
            notes.append(f"{key.value} is left out: {_DROPPED[setting.key]}")
        elif setting.key in ("sharding_strategy", "reshard_after_forward") and isinstance(parsed, str):
            if parsed == "NO_SHARD":
                raise NotConvertibleError("NO_SHARD has no counterpart: version 2 always shards; train with DDP")
            edits.append((*span, f"{prefix}reshard_after_forward: {str(settings.reshards(parsed)).lower()}"))
            if parsed.startswith("HYBRID"):
                notes.append(f"{parsed}: give the number of replicas of the sharded model as dp_replicate_size")
        elif setting.key == "state_dict_type" and parsed == "LOCAL_STATE_DICT":
            edits.append((*span, f"{key.value}: SHARDED_STATE_DICT"))
            notes.append("LOCAL_STATE_DICT does not exist in version 2; SHARDED_STATE_DICT is the nearest")
    if not versioned:
        start = begin.index - begin.column
        edits.append((start, start, f"{' ' * begin.column}{prefix}version: 2\n"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, notes


def _below(node: yaml.Node | None, path: tuple[str, ...]) -> yaml.Node | None:
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for key, value in node.value if key.value == name), None)
    return node


@click.command("to-fsdp2", context_settings=EITHER_SPELLING)
@click.argument("config", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--config-file", type=click.Path(path_type=Path, dir_okay=False), help="The same as CONFIG.")
@click.option(
    "--output-file", type=click.Path(path_type=Path, dir_okay=False),
    help="File for the result instead of the terminal.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Write the result to CONFIG, or over an existing output file.")
@json_option
def to_fsdp2_command(
    config: Path | None, config_file: Path | None, output_file: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Convert the FSDP settings of CONFIG, a job file or a configuration of Accelerate, to version 2.

    The result is printed unless --output-file or --overwrite is given.
    """
    file = config or config_file
    if file is None or (config and config_file):
        raise click.UsageError("give one file: orc to-fsdp2 CONFIG", click.get_current_context())
    try:
        converted, notes = convert(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise LaunchError(f"the file cannot be read: {reason}", where=str(file)) from None
    except NotConvertibleError as error:
        raise LaunchError(str(error), where=str(file), hint="docs/how-to/fsdp.md has the table") from None
    target = output_file or (file if overwrite else None)
    if target is not None:
        if target.exists() and not overwrite:
            raise LaunchError("there is a file of that name", where=str(target), hint="add --overwrite")
        try:
            target.write_text(converted, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"the file cannot be written: {error.strerror}", where=str(target)) from None
    if as_json:
        echo_json({"converted": None if target else converted, "file": str(target) if target else None, "notes": notes})
        return
    for note in notes:
        echo(f"note: {note}", err=True)
    echo(f"wrote {target}" if target else converted.rstrip("\n"))
