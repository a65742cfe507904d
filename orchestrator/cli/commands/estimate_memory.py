"""`orc estimate-memory`: the memory that a model takes, without loading it."""

from __future__ import annotations

import importlib

import click

from orc.orchestrator.cli.options import EITHER_SPELLING, json_option
from orc.orchestrator.cli.ui.output import echo

_DTYPES = ("float32", "float16", "int8", "int4")


@click.command("estimate-memory", context_settings=EITHER_SPELLING)
@click.argument("model", metavar="MODEL")
@click.option("--library-name", type=click.Choice(["timm", "transformers"]), help="Where the Hub does not say it.")
@click.option("--dtypes", "first", type=click.Choice(_DTYPES), multiple=True, help="One or more; all when not given.")
@click.argument("more", nargs=-1, type=click.Choice(_DTYPES), metavar="[DTYPE ...]")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the model's repository brings along.")
@json_option
def command(
    model: str,
    library_name: str | None,
    first: tuple[str, ...],
    more: tuple[str, ...],
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Say what loading MODEL takes, and training it with Adam.

    MODEL is a folder with a config.json, such a file, package.module:Class, file.py:Class, or a name on the Hub. Only
    the configuration is read: the model is made without memory. It needs torch, and the model's library.
    """
    from orc.launchers.errors import LaunchError
    from orc.orchestrator.cli.ui.output import echo_json, table

    if more and not first:
        raise click.UsageError(f"{more[0]}: name dtypes after --dtypes")
    try:  # by name: no other command may bring torch along
        models = importlib.import_module("orc.runtime.weights.named_models")
        sizes = importlib.import_module("orc.runtime.weights.sizes")
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed here", hint="pip install 'orc-launch[runtime]'") from None
    try:
        made = models.empty_model(model, library_name, trust_remote_code)
    except models.ModelNotFound as error:
        raise LaunchError(str(error), where=model) from None
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
