"""`orc estimate-memory`: the memory that a model takes, without loading it."""

from __future__ import annotations

import importlib
from typing import Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, echo_json, table

_DTYPES = ("float32", "float16", "int8", "int4")
_TRAINED = ("float32", "bfloat16", "float16")
_OPTIMIZERS = ("adamw", "adam8bit", "adafactor", "sgd", "momentum")
_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "total")


@click.command("estimate-memory", context_settings=EITHER_SPELLING)
@click.argument("model", metavar="MODEL")
@click.option(
    "--library-name",
    type=click.Choice(["timm", "transformers"]),
    help="Library of the model, if the Hub does not name it.",
)
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
def command(
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
    try:  # by name: no other command may bring torch along
        with waiting("loading torch"):
            models = importlib.import_module("orc.runtime.weights.named_models")
            sizes = importlib.import_module("orc.runtime.memory.sizes")
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed here", hint="pip install 'orc-launch[runtime]'") from None
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
        rows = [
            {"dtype": e.dtype, "largest_layer": e.largest_layer, "total": e.total, "training": e.training}
            for e in estimates
        ]
        echo_json({"model": model, "estimates": rows})
        return
    echo(f"Memory for loading {model}:\n")
    echo(table(["dtype", "Largest Layer", "Total Size", "Training using Adam"], [e.row() for e in estimates]))
    echo("\nInference takes up to a fifth more; activations of training come on top.")


def _on_each_process(model: str, made: Any, parallelism: str, given: dict[str, Any], as_json: bool) -> None:
    memory = importlib.import_module("orc.runtime.weights.parallel_memory")
    sizes = importlib.import_module("orc.runtime.memory.sizes")
    spelled = {"seq_length": "sequence", "activation_checkpointing": "checkpointing"}
    try:
        training = memory.Training(
            memory.parse_parallelism(parallelism), **{spelled.get(name, name): value for name, value in given.items()}
        )
        estimate = memory.estimate_parallel_memory(made, training)
    except ValueError as error:
        raise LaunchError(str(error), where="--parallelism") from None
    stages = [{part: getattr(stage, part) for part in _PARTS} for stage in estimate.stages]
    largest = {part: getattr(estimate.largest, part) for part in _PARTS}
    if as_json:
        echo_json(
            {
                "model": model,
                "parallelism": dict(training.sizes),
                "processes": training.processes,
                "largest": largest,
                "stages": stages,
                "notes": estimate.notes,
            }
        )
        return
    shown = [["" if one[p] is None else sizes.convert_bytes(one[p]) for one in stages] for p in _PARTS]
    heads = ["of each process"] if len(stages) == 1 else [f"stage {number}" for number in range(len(stages))]
    echo(f"Memory for training {model} on {training.processes} processes:\n")
    echo(table(["", *heads], [(part, *row) for part, row in zip(_PARTS, shown, strict=True)]))
    for note in estimate.notes:
        echo(f"\n{note}.")
