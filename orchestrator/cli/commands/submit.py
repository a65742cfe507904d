"""`orc submit` and `orc resubmit`."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import (
    check_jobs,
    cluster_option,
    job_argument,
    job_file_here,
    json_option,
    open_client,
    set_option,
    together,
    yes_option,
)
from orc.orchestrator.cli.ui import jobtext
from orc.orchestrator.cli.ui.display import display, ring, submission_progress
from orc.orchestrator.cli.ui.output import ExitCode, echo, echo_json, of_states

if TYPE_CHECKING:
    from orc.orchestrator.cli.ui.tail import Selection
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import JobView


Submit = Callable[["Callable[[str, Mapping[str, Any]], None]"], "JobView"]


class Following(NamedTuple):
    """Options of a command that shows the output of its new job, and may ring at its end."""

    wanted: bool = False
    ranks: tuple[int, ...] = ()
    all_ranks: bool = False
    bell: bool = False


_follow_options = together(
    click.option("--follow", "-f", "following", is_flag=True, help="Show the job's output until it has ended."),
    click.option(
        "--rank", "ranks", type=click.IntRange(0), multiple=True, help="With --follow: show this rank. [default: 0]"
    ),
    click.option("--all-ranks", is_flag=True, help="With --follow: show all ranks, told apart by a prefix."),
    click.option(
        "--bell", is_flag=True, help="With --follow: ring when the job has ended, in the terminal and on the desktop."
    ),
)


def follow_options(function: Callable[..., int]) -> Callable[..., int]:
    """``--follow`` and what goes with it; the parameter is *follow*, a `Following`."""

    @functools.wraps(function)
    def parsed(*, following: bool, ranks: tuple[int, ...], all_ranks: bool, bell: bool, **given: Any) -> int:
        if (ranks or all_ranks or bell) and not following:
            raise click.UsageError("--rank, --all-ranks and --bell need --follow", click.get_current_context())
        return function(follow=Following(following, ranks, all_ranks, bell), **given)

    decorated: Callable[..., int] = _follow_options(parsed)
    return decorated


reconciler_option = click.option(
    "--reconciler/--no-reconciler",
    default=True,
    help="Leave a process behind that sends retries and queued jobs until the job has ended (the default).",
)


SCRIPT_ARGUMENTS = "orc.submit.arguments"  # of click's context: the words behind `--`


def _unknown_after_script(words: Sequence[str], option: str) -> int:
    """Return the place of the unknown *option* where it stands after a script; 0 elsewhere."""
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    return next((place for place in range(script + 1, len(words)) if words[place].startswith(option)), 0)


class _Submit(click.Command):
    """Command that leaves the words behind ``--`` to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before ``--``."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[SCRIPT_ARGUMENTS] = args[end + 1 :] if end < len(args) else None
        try:
            return super().parse_args(ctx, args[:end])
        except click.NoSuchOption as error:
            if after := _unknown_after_script(args[:end], error.option_name):
                line = shlex.join([*args[:after], "--", *args[after:end], *args[end + 1 :]])
                what = f"No such option {error.option_name!r}; arguments of the script go after `--`"
                raise click.UsageError(f"{what}: {ctx.command_path} {line}", ctx) from None
            raise

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARG...]"]


@click.command("submit", cls=_Submit)
@click.argument("job_file", metavar="[JOB.yaml|SCRIPT.py]", required=False, type=click.Path(), callback=job_file_here)
@cluster_option
@click.option("--nodes", metavar="N", help="Nodes; 2:4 takes two to four, as many as are free.")
@click.option("-n", "--nproc", metavar="N", help="Processes per node.")
@click.option("--gpus", metavar="N", help="GPUs per node, one for each process.")
@set_option
@click.option(
    "--after", multiple=True, metavar="JOB[:CONDITION]",
    help="Start after JOB has ended: with success (the default), any, or failure. May be repeated.",
)  # fmt: skip
@click.option("--array", metavar="N", help="Submit N jobs that differ in ORC_ARRAY_TASK_ID; or indices: 0-9:3.")
@click.option("--max-parallel", type=click.IntRange(1), metavar="N", help="Run N jobs of a group at a time.")
@click.option(
    "--priority", type=click.IntRange(-100, 100), metavar="N",
    help="Priority instead of the job file's; higher goes first.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Send nothing: show what would run, as `orc render` does.")
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path), help="Keep the job file made for SCRIPT.py.")
@follow_options
@reconciler_option
@yes_option
@json_option
def submit_command(
    job_file: str,
    cluster: str | None,
    overrides: tuple[str, ...],
    after: tuple[str, ...],
    dry_run: bool,
    save: Path | None,
    follow: Following,
    reconciler: bool,
    yes: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Send a job to its cluster, from JOB.yaml (default: ./job.yaml) or from SCRIPT.py as it is; print its id.

    \b
    orc submit job.yaml --follow
    orc submit train.py --cluster lab --nodes 2 -- --lr 0.1

    Words after -- are arguments of the script. orc sends the current directory along if the script lies in it.
    The job runs on when this command ends. A sweep, an array or a pipeline becomes several jobs, all of them or none,
    and the id of their group is printed.

    With --follow the exit status says how the job ended: 0 success, 1 failure, 3 cancelled.
    """
    from orc.launchers.spec.groups import LoadedGroup

    context = click.get_current_context()
    is_script = job_file.endswith(".py")
    if save is not None and not is_script:
        raise click.UsageError(f"--save keeps the job file of a script, and {job_file} is one already", context)
    arguments = context.meta[SCRIPT_ARGUMENTS]
    overrides += tuple(
        _override(key, given[option], f"--{option.replace('_', '-')}")
        for option, key in _KEYS.items()
        if given[option] is not None
    )
    if arguments is not None:
        overrides += (_override("args", _yaml_list(arguments), "--"),)
    loaded = check_jobs(job_file, overrides, cluster, needs_clusters=dry_run)
    job_text = _job_file(job_file, overrides, cluster, save) if is_script else ""
    if save is not None:
        _save(job_text, save)
    if dry_run:
        from orc.orchestrator.cli.commands.render import show_any

        if job_text and not as_json:
            echo(job_text)
        show_any(loaded, "json" if as_json else "text", None)
        return 0
    if isinstance(loaded, LoadedGroup):
        from orc.orchestrator.cli.commands.groups import submit_group

        if follow.wanted:
            raise click.UsageError("--follow shows one job, and this is a group", context)
        return submit_group(loaded.after(after), reconciler=reconciler, yes=yes, as_json=as_json)
    loaded = loaded.after(after)
    client = open_client(reconciler=reconciler)
    return run(client, lambda told: client.submit(loaded, on_progress=told), follow, as_json=as_json, yes=yes)


# Options for keys of a job file.
_KEYS = {
    "array": "array",
    "max_parallel": "max_parallel",
    "priority": "priority",
    "nodes": "resources.nodes",
    "nproc": "resources.procs_per_node",
    "gpus": "resources.gpus_per_node",
}


def _override(key: str, value: object, option: str) -> str:
    """Return *value* of *option* as an override of *key*, whose errors name the option."""
    from orc.launchers.spec.source import PlacedText

    return PlacedText.at(f"{key}={value}", f"{option} {value}")


def _yaml_list(words: Sequence[str]) -> str:
    """Return *words* as YAML on one line, each quoted, so that none of them becomes a number."""
    import yaml

    text: str = yaml.safe_dump(list(words), default_flow_style=True, default_style='"', width=1 << 30)
    return text.strip()


def _job_file(script: str, overrides: Sequence[str], cluster: str | None, save: Path | None) -> str:
    """Return the job file of a script, as it would stand in *save*, or beside the script."""
    import yaml

    from orc.launchers.spec.load import read_job_file

    data = read_job_file(script, overrides, cluster)[0].data
    if save is not None:
        given = data.pop("workdir", {})
        workdir = dict(given) if isinstance(given, Mapping) else {"path": given}
        code = Path(script).absolute().parent / workdir.pop("path", ".")
        if (path := os.path.relpath(code, save.absolute().parent)) != ".":
            workdir["path"] = path
        if workdir:
            data = {**data, "workdir": path if list(workdir) == ["path"] else workdir}
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    if "\x85" in text:  # which a reader of YAML takes for the end of a line
        text = yaml.safe_dump(data, sort_keys=False, width=120)
    return f"# The job of `orc submit {script}`.\n{text}"


def _save(text: str, file: Path) -> None:
    """Write a job file, unless it is there: the same command with ``--dry-run`` has written it before."""
    try:
        if file.is_file() and file.read_bytes() == text.encode():
            return
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except OSError as error:
        hint = "choose another name for --save"
        raise LaunchError(f"cannot write the job file: {error.strerror}", where=str(file), hint=hint) from None
    echo(f"wrote {file}", err=True)


def run(client: JobsClient, submit: Submit, follow: Following, *, as_json: bool, yes: bool = False) -> int:
    """Submit, print the result, follow with *--follow*; return the exit status. *yes* agrees to a large snapshot."""
    with submission_progress(silent=as_json, yes=yes) as on_progress:
        view = submit(on_progress)
    if follow.wanted:
        from orc.orchestrator.cli.ui.tail import Selection

        selection = Selection() if follow.all_ranks else Selection(follow.ranks or (0,), asked=bool(follow.ranks))
        view = _follow(client, view, selection, as_json)
        if follow.bell:
            ring("orc", [jobtext.headline(view)])
    if as_json:
        echo_json(view.to_dict())
    elif not follow.wanted:
        echo(view.id)
        waits = f", {view.reason}" if view.state in ("QUEUED", "PREPARED") and view.reason else ""
        echo(f"{view.state} on {view.cluster}{waits}\nnext: orc status {view.id}, orc logs -f {view.id}", err=True)
    return int(of_states([view.state]))


def _follow(client: JobsClient, view: JobView, selection: Selection, as_json: bool) -> JobView:
    """Return the job's output on stdout, with --json on stderr; Ctrl-C leaves the job alone."""
    from orc.orchestrator.cli.ui.tail import Cursor, PlainSink, PrefixSink, conclusion, follow

    stream = sys.stderr.buffer if as_json else sys.stdout.buffer
    sink = PlainSink(stream) if selection.single(view.spec) else PrefixSink(stream)
    echo(f"submitted {view.id} to {view.cluster}", err=True)
    try:
        with display(silent=as_json) as shown:
            cursor = Cursor(client, view.id, sink, around=shown.aside)
            view = follow(client, view.id, cursor, selection, shown, first_attempt=1)  # which may be over by now
    except KeyboardInterrupt:
        echo(f"\nstopped following; the job goes on: orc logs -f {view.id}, orc cancel {view.id}", err=True)
        if as_json:
            raise
        raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
    finally:
        sink.finish()
    if not as_json:
        echo(conclusion(view), err=True)
    return view


@click.command("resubmit")
@job_argument
@set_option
@follow_options
@reconciler_option
@json_option
def resubmit_command(job: str, overrides: tuple[str, ...], follow: Following, reconciler: bool, as_json: bool) -> int:
    """Run JOB again as a new job, from the same code snapshot and specification, as changed with --set.

    For a sweep, an array or a pipeline, submit the unsuccessful jobs once more.
    """
    client = open_client(reconciler=reconciler)
    if "-" in job and client.jobs(group=job, limit=1):
        from orc.orchestrator.cli.commands.groups import retry_group

        if overrides or follow.wanted:
            raise click.UsageError("--set and --follow are for one job", click.get_current_context())
        return retry_group(job, as_json=as_json)
    job_id = client.resolve(job)
    submit = lambda told: client.resubmit(job_id, overrides=overrides, on_progress=told)  # noqa: E731
    return run(client, submit, follow, as_json=as_json)
