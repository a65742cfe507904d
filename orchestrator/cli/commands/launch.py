"""`orc launch`: a script on this machine, on N processes, or as a job. Nothing heavy is imported on its way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.accelerate.keys import FLAGS, GROUPS, OPTIONS, Option
from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.cli.invocation import EITHER_SPELLING, SECONDS, Parsed, json_option
from orc.orchestrator.cli.ui.output import echo, echo_json, stdout_to_stderr

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from orc.launchers.accelerate.merge import Values
    from orc.launchers.accelerate.remote_launch import JobOfLaunch
    from orc.launchers.foreground.launch import LocalLaunch


class _Checked(Parsed):
    """Value that the table of documented options parses."""

    def __init__(self, option: Option) -> None:
        super().__init__("text", self._parse)
        self.option = option

    def _parse(self, text: str) -> Any:
        try:
            return self.option.parse(text)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None

    def shell_complete(self, _ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the choices that begin with what is there."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(one) for one in self.option.choices if one.lower().startswith(incomplete.lower())]


class _Documented(click.Option):
    """Option of the table, which stands in its group of ``--help``."""

    def __init__(self, option: Option) -> None:
        help_text = option.doc if option.effect == "done" else f"{option.doc} [{_SHORT[option.effect]}]"
        if option.switch:
            super().__init__([*option.flags, option.name], is_flag=True, default=None, help=help_text)
        elif option.name == "env":
            super().__init__([*option.flags, option.name], multiple=True, metavar="NAME=VALUE", help=help_text)
        else:
            shown = f"[{'|'.join(option.choices)}]" if option.choices else "VALUE"
            super().__init__([*option.flags, option.name], type=_Checked(option), metavar=shown, help=help_text)
        self.group = option.group


_SHORT = {"ignored": "no effect here", "job": "for jobs", "refused": "not available"}
_MOST_USED = (
    ("train.py --lr 0.1", "on all GPUs, or one process"),
    ("-n 2 train.py --lr 0.1", "on two processes"),
    ("--config_file FILE train.py", "as `accelerate launch` does with FILE"),
)
_OWN = "orc"
_WORDS = "orc.launch.words"


def _narrowed(words: Iterable[str]) -> set[str]:
    """Return the groups that ``--help`` is about where *words* name a paradigm; nothing where they name none."""
    found: set[str] = set()
    for word in words:
        option = FLAGS.get(word.partition("=")[0].replace("-", "_").replace("__", "--", 1))
        if option is not None and option.name in _PAGES:
            found |= _PAGES[option.name]
        elif option is not None and option.group == "fp8":
            found |= {"fp8"}
    return found and found | {_OWN, "launch", "resource"}


_PAGES = {
    "multi_gpu": {"hardware", "machines", "logs"},
    "tpu": {"tpu"},
    "cpu": {"hardware", "machines", "mpi"},
    "use_fsdp": {"fsdp"},
    "use_deepspeed": {"deepspeed"},
    "use_megatron_lm": {"megatron"},
    "use_parallelism_config": {"parallelism"},
}


class _Grouped(click.Command):
    """Command with the documented options in groups, after those of orc."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params += [_Documented(one) for one in OPTIONS.values() if one.flags]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words for `format_options`: ``--help`` is answered before any other option is looked at."""
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines that are used most, under the name that the command was called by, and the text."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_dl([(f"{ctx.command_path} {words}", what) for words, what in _MOST_USED], col_max=44)
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group; beside ``--use_fsdp`` and its like, only those that go with it."""
        groups: dict[str, list[tuple[str, str]]] = {}
        wanted = _narrowed(ctx.meta.get(_WORDS, ()))
        for param in self.get_params(ctx):
            if wanted and getattr(param, "group", _OWN) not in wanted:
                continue
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "group", _OWN), []).append(record)
        for name, title in {_OWN: "Options", **GROUPS}.items():
            if name in groups:
                with formatter.section(title):
                    formatter.write_dl(groups[name])


def _file_values(path: str | None) -> tuple[dict[str, Any], str]:
    """Return the values of a configuration file of Accelerate and where it is: *path*, or the default one if any."""
    from orc.launchers.accelerate.location import default_path

    if path is None and not default_path(os.environ).is_file():
        return {}, ""
    from orc.launchers.accelerate.config_file import find_default, read_config

    if path is not None:
        return read_config(path).values, path
    try:
        found = find_default(os.environ)
        return (read_config(found).values, str(found)) if found is not None else ({}, "")
    except SpecError:
        # Nobody has named this file on the command line: say why it is read, and how to do without.
        place = default_path(os.environ)
        echo(
            f"orc launch reads {place} where no --config_file is given; mend or remove that file, name another with "
            "--config_file, or write it anew with `orc config default --force`",
            err=True,
        )
        raise


def _through_mpirun(request: LocalLaunch, values: Values, nproc: int | None) -> None:
    """Become mpirun, but in a process that mpirun has started."""
    from orc.launchers.accelerate.merge import variables
    from orc.launchers.foreground import mpirun

    if not mpirun.wanted(values, os.environ):
        return
    if nproc is not None:
        raise LaunchError("-n is the number of processes here; with --mpirun_hostfile it is --num_processes")
    env = {**variables(values), **request.env}
    request = replace(request, env=env, module=values.on("module"), no_python=values.on("no_python"))
    mpirun.start(request, values, os.environ)


_OF_TORCHRUN = ("rdzv_backend", "rdzv_conf", "monitor_interval")


@contextmanager
def _usage_errors() -> Iterator[None]:
    """A block whose errors are those of the command line."""
    from orc.runtime.core.config import ConfigError

    try:
        yield
    except (LaunchError, ConfigError) as error:
        raise click.UsageError(str(error), click.get_current_context()) from None


def _elsewhere(options: dict[str, Any], file: dict[str, Any]) -> str | None:
    """Return the place of a launch that runs on other machines; see `orc.launchers.accelerate.remote_launch`."""
    sagemaker = file.get("compute_environment") == "AMAZON_SAGEMAKER"
    if not sagemaker and not any(name.startswith("deepspeed") for name in (*_said(options), *file)):
        return None
    from orc.launchers.accelerate.merge import trains_with_deepspeed
    from orc.launchers.accelerate.remote_launch import place_of

    return place_of({**file, **_said(options)}, trains_with_deepspeed(options, file))


def _said(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, False)}


def _job_elsewhere(
    place: str, request: LocalLaunch, options: dict[str, Any], file: dict[str, Any], own: dict[str, Any], where: str
) -> JobOfLaunch:
    """Return the job that a launch on other machines becomes."""
    from orc.launchers.accelerate import remote_launch
    from orc.launchers.accelerate.merge import Values

    given = _said(options)
    keys = {name: given.pop(name, None) for name in remote_launch.CREDENTIALS}
    if any(keys.values()) and (place != remote_launch.SAGEMAKER or file.get("profile")):
        raise LaunchError(
            "--aws_access_key_id and --aws_secret_access_key are for a configuration file of Amazon SageMaker "
            "that names no profile"
        )
    hide_credentials(keys)
    request = replace(request, module=bool(options["module"]), no_python=bool(options["no_python"]))
    runtime = {name: own[name] for name in ("seed", "stand_in") if own[name] is not None}
    values = Values({**file, **given}, frozenset(given))
    return remote_launch.job_of(place, values, request, nproc=own["nproc"], runtime=runtime, where=where)


_SETTINGS = {**EITHER_SPELLING, "allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


@click.command("launch", cls=_Grouped, context_settings=_SETTINGS)
@click.option(
    "-n", "--nproc", type=click.IntRange(1), metavar="N", help="Processes of this machine. [default: its GPUs, or 1]"
)
@click.option("--python", metavar="PATH", help="Interpreter of the script; by default the one of orc.")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of Python, NumPy and torch.")
@click.option(
    "--stand-in", multiple=True, metavar="PACKAGE", help="Run SCRIPT on orc.runtime although it imports accelerate."
)
@click.option(
    "--grace", type=SECONDS, default=30.0, show_default=True, metavar="S", help="Time from SIGTERM to SIGKILL."
)
@json_option
@click.argument("program", metavar="SCRIPT [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def launch_command(program: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Run SCRIPT on this machine, on N processes.

    Words and options after SCRIPT belong to SCRIPT. The exit status is that of the first failing process.
    Flags take either spelling, --num_processes or --num-processes. All flags: docs/reference/launch.md.
    """
    from orc.launchers.accelerate.merge import merge
    from orc.launchers.foreground.documented import documented
    from orc.launchers.foreground.launch import LocalLaunch, interpreter_flags, launch, log_stderr
    from orc.runtime.core.config import to_env

    own = {name: options.pop(name) for name in ("nproc", "python", "seed", "grace", "stand_in")}
    own["stand_in"] = ",".join(own["stand_in"]) or None
    options["env"] = list(options["env"]) or None
    file, where = _file_values(options["config_file"])
    flags = interpreter_flags(sys.orig_argv)
    request = LocalLaunch(program, python=own["python"] or sys.executable, python_flags=flags)
    with _usage_errors():
        place = _elsewhere(options, file)
        job = _job_elsewhere(place, request, options, file, own, where) if place else None
    if job is not None:
        return submit_and_follow(job, as_json=as_json)
    with _usage_errors():
        values = merge(options, file, os.environ, where)
        env = to_env({"seed": own["seed"], "stand_in": own["stand_in"]})
        request = replace(request, env=env, grace_s=own["grace"])
        if values.get("mpirun_hostfile"):
            _through_mpirun(request, values, own["nproc"])
        described = documented(request, values, os.environ, nproc=own["nproc"])
    for note in described.notes if not described.request.quiet else ():
        log_stderr(note)
    if any(values.get(name) is not None for name in _OF_TORCHRUN):
        _through_torchrun(described.request, values, as_json)
    if not as_json:
        return launch(described.request)

    with stdout_to_stderr():
        status = launch(described.request)
    echo_json({"exit_status": status})
    return status


run_command = launch_command


def _through_torchrun(request: LocalLaunch, values: Values, as_json: bool) -> None:
    """Become torchrun where *values* need it."""
    from orc.launchers.foreground import torchrun

    if not torchrun.wanted(request, values):
        return
    if as_json:
        raise click.UsageError("--json does not work with torchrun, which these rendezvous settings need")
    with _usage_errors():
        torchrun.start(request, values)


def submit_and_follow(launched: JobOfLaunch, *, as_json: bool) -> int:
    """Submit the job of a launch, show the output of all its processes, and return its exit status.

    Raises `LaunchError`, before anything is written where the job itself cannot be.
    """
    from orc.launchers.spec.load import validate
    from orc.launchers.spec.source import Document
    from orc.orchestrator.cli.commands.submit import Following, run
    from orc.orchestrator.cli.invocation import open_ledger
    from orc.orchestrator.engine.job_source import check_document

    client = open_ledger()
    document = Document(dict(launched.job), "orc launch", {}, {})
    validate(document)
    for note in launched.notes:
        echo(f"orc launch: {note.key}: {note.text}", err=True)
    _write_down(launched)
    loaded = check_document(document, launched.directory / "orc-launch")
    everything = Following(wanted=True, all_ranks=True)
    return run(client, lambda told: client.submit(loaded, on_progress=told), everything, as_json=as_json)


def _write_down(launched: JobOfLaunch) -> None:
    """Add the cluster to clusters.yaml, where passes find it, unless it is there."""
    import yaml

    from orc.launchers.paths import clusters_file
    from orc.launchers.spec.clusters import read_clusters
    from orc.orchestrator.cli.commands.clusters import append

    file = clusters_file()
    if launched.name in read_clusters()[0]:
        return
    append(launched.name, yaml.safe_dump({launched.name: dict(launched.cluster)}, sort_keys=False), file)
    echo(f"orc launch: the cluster {launched.name} was added to {file}", err=True)


def hide_credentials(given: Mapping[str, str | None]) -> None:
    """Start this command again with credentials as variables and not in its command line, which all can read.

    *given* are values by the name of their flag. Returns where there are none. Raises `LaunchError` for one of two.
    """
    if not any(given.values()):
        return
    if missing := [f"--{name}" for name, value in given.items() if not value]:
        raise LaunchError(f"{' '.join(missing)} is missing: the two keys go together")
    env = {name: value for name, value in os.environ.items() if name != "AWS_SESSION_TOKEN"}  # of other keys
    env |= {name.upper(): value or "" for name, value in given.items()}
    words = _without(sys.orig_argv[1:], {f"--{name}" for name in given})
    os.execve(sys.executable, [sys.executable, *words], env)  # noqa: S606 — no shell


def _without(words: list[str], flags: set[str]) -> list[str]:
    """Return the command line *words* without the first of each of *flags* and its value."""
    kept: list[str] = []
    left, rest = set(flags), iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        spelled = flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag
        if spelled not in left:
            kept.append(word)
            continue
        left.discard(spelled)
        if not equals:
            next(rest, None)
    return kept
