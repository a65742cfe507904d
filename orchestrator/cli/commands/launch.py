"""`orc launch`: a script on this machine, on N processes. Nothing heavy is imported on its way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from orc.orchestrator.cli.options import SECONDS, json_option
from orc.runtime.core import deepspeed_keys
from orc.runtime.core.fsdp_settings import SETTINGS


def pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping. Raises `click.UsageError`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise click.UsageError(f"--env takes NAME=VALUE, not {text!r}", click.get_current_context())
        found[name] = value
    return found


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Leave stdout to the JSON result: what the ranks print there goes to stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def fsdp_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--use-fsdp`` and an option for every setting of sharded data parallelism; values are checked all at once."""
    for setting in reversed(SETTINGS.values()):
        names = [f"--fsdp-{name.replace('_', '-')}" for name in (setting.key, setting.also) if name]
        option = click.option(*names, f"fsdp_{setting.key}", metavar="VALUE", help=setting.doc)
        function = option(function)
    return click.option("--use-fsdp", is_flag=True, help="Shard the model over the processes (FSDP).")(function)


def fsdp_settings(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the given settings of sharded data parallelism; `None` without ``--use-fsdp``.

    Raises `click.UsageError` for settings without it, and for those that cannot be.
    """
    given = {key: value for key in SETTINGS if (value := options[f"fsdp_{key}"]) is not None}
    if not options["use_fsdp"]:
        if given:
            name = next(iter(given)).replace("_", "-")
            raise click.UsageError(f"--fsdp-{name} has no effect without --use-fsdp", click.get_current_context())
        return None
    from orc.runtime.core.config import ConfigError, check

    try:
        checked: dict[str, Any] = check("fsdp", given)
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    return checked


def deepspeed_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--use-deepspeed`` and an option for every setting of DeepSpeed; values are checked all at once."""
    for key in reversed(deepspeed_keys.KEYS.values()):
        if key.name != "gradient_accumulation_steps":  # an option of every run
            function = click.option(f"--{key.name.replace('_', '-')}", metavar="VALUE", help=key.doc)(function)
    return click.option("--use-deepspeed", is_flag=True, help="Train with DeepSpeed.")(function)


def deepspeed_settings(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the given settings of DeepSpeed; `None` without ``--use-deepspeed``.

    Raises `click.UsageError` for settings without it, and for those that cannot be.
    """
    given = {name: value for name in deepspeed_keys.KEYS if (value := options[name]) is not None}
    if not options["use_deepspeed"]:
        if name := next((name for name in given if name != "gradient_accumulation_steps"), None):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} has no effect without --use-deepspeed", click.get_current_context())
        return None
    if options["use_fsdp"]:
        raise click.UsageError("--use-deepspeed and --use-fsdp exclude each other", click.get_current_context())
    try:
        return deepspeed_keys.normalise(given)
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None


def stand_ins(packages: tuple[str, ...]) -> str | None:
    """Return the value of ``ORC_STAND_IN``; `None` without packages. Raises `click.UsageError`."""
    if not packages:
        return None
    from orc.runtime.core.config import ConfigError, check

    try:
        return str(check("stand_in", ",".join(packages)))
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None


# Documented options have underscores in Accelerate and hyphens here: both spellings are taken.
_EITHER_SPELLING = {"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}


@click.command("launch", context_settings=_EITHER_SPELLING)
@click.option("-n", "--nproc", type=click.IntRange(1), default=1, show_default=True, help="Number of processes.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is any program.")
@click.option("--python", metavar="PATH", help="The interpreter; the one that runs orc by default.")
@click.option("--mixed-precision", type=click.Choice(["no", "fp16", "bf16"]), help="Precision of forward and backward.")
@click.option("--gradient-accumulation-steps", type=click.IntRange(1), metavar="N", help="Batches per optimizer step.")
@click.option("--cpu", is_flag=True, help="Train on the CPU even where an accelerator is present.")
@click.option("--debug", is_flag=True, help="Check shapes and structure before every collective.")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of Python, NumPy and torch.")
@click.option(
    "--stand-in", multiple=True, metavar="PACKAGE", help="Run SCRIPT on orc.runtime although it imports accelerate."
)
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable for the script. Repeatable.")
@click.option(
    "--log-dir", type=click.Path(path_type=Path), metavar="DIR", help="Also write one log file per rank there."
)
@fsdp_options
@deepspeed_options
@click.option("--max-restarts", type=click.IntRange(0), default=0, metavar="N", help="Start again after a failure.")
@click.option("--grace", type=SECONDS, default=30.0, show_default=True, metavar="S", help="From SIGTERM to SIGKILL.")
@json_option
@click.argument("program", metavar="SCRIPT [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(program: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Run SCRIPT on this machine, on N processes.

    Everything after SCRIPT is SCRIPT's own, options included. The exit status is that of the first failing process.
    """
    if options["module"] and options["no_python"]:
        raise click.UsageError("--module and --no-python exclude each other", click.get_current_context())
    from orc.launchers.foreground.launch import LocalLaunch, launch
    from orc.runtime.core.config import to_env

    settings = {
        "mixed_precision": options["mixed_precision"],
        "gradient_accumulation_steps": options["gradient_accumulation_steps"],
        "use_cpu": options["cpu"] or None,
        "debug_mode": options["debug"] or None,
        "seed": options["seed"],
        "stand_in": stand_ins(options["stand_in"]),
        "fsdp": fsdp_settings(options),
        "deepspeed": deepspeed_settings(options),
    }
    interpreter = {"python": options["python"]} if options["python"] else {}
    request = LocalLaunch(
        program,
        nprocs=options["nproc"],
        module=options["module"],
        no_python=options["no_python"],
        env={**to_env(settings), **pairs(options["variables"])},
        log_dir=options["log_dir"],
        max_restarts=options["max_restarts"],
        grace_s=options["grace"],
        **interpreter,
    )
    if not as_json:
        return launch(request)
    from orc.orchestrator.cli.ui.output import echo_json

    with _stdout_to_stderr():
        status = launch(request)
    echo_json({"exit_status": status})
    return status
