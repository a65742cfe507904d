"""The `orc` command: a table of sub-commands whose modules are imported on use, and the frame around every run."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import click

# name -> one-line help, by section of `orc --help`. Static, so that it imports none of their modules.
SECTIONS: dict[str, dict[str, str]] = {
    "Run": {
        "submit": "Send a job to its cluster.",
        "render": "Print exactly what would be sent; touches no network.",
        "run": "Run a script on this machine, on N processes.",
        "launch": "The same as `orc run`.",
        "resubmit": "Run a job again from the same code snapshot.",
        "cancel": "Stop jobs, with grace.",
        "sweep": "Jobs with different values: submit, compare, try again.",
        "array": "Many jobs that differ in a number.",
        "pipeline": "Jobs that wait for each other and pass files on.",
        "schedule": "Submit a job again and again, by the clock.",
    },
    "Look": {
        "status": "State of jobs: attempts, hosts, first failure.",
        "list": "Jobs, newest first.",
        "logs": "Print or follow the logs of a job, by rank.",
        "metrics": "Metrics of a training: newest values and curves.",
        "diff": "Differences of two jobs: spec, code, outcome, metrics.",
        "tag": "Set and remove tags of a job.",
        "cost": "Hours of nodes and GPUs, and their cost.",
        "queue": "Queues of clusters: partitions, why jobs wait, expected starts.",
        "wait": "Wait until jobs have ended.",
        "top": "Load of the nodes of running jobs.",
        "stacks": "Stacks of the ranks of a running job.",
        "exec": "Run a program beside a running job, on its node.",
        "ssh": "A shell on a node of a running job.",
        "events": "The history of a job.",
        "notifications": "Notifications: list, retry, test a target.",
    },
    "Set up": {
        "login": "Use a service instead of the ledger of this machine.",
        "logout": "Forget the token for a service.",
        "whoami": "Service and user of the commands.",
        "init": "Copy a starter job.",
        "config": "Ask how to train here, or convert a file of Accelerate.",
        "estimate-memory": "Estimate the memory of a model, without loading it.",
        "merge-weights": "Merge the shards of a model into one file.",
        "to-fsdp2": "Convert FSDP settings of a file to version 2.",
        "serve": "Serve the ledger to a team: REST API, web page, passes.",
        "token": "Create, list and revoke tokens of the service.",
        "quota": "Limit the jobs, GPUs and cost of users and projects.",
        "clusters": "Show and check the clusters.",
        "hosts": "Run a command on all hosts of a cluster.",
        "tpu-config": "Run commands on all workers of a TPU, to set it up.",
        "sync": "Bring a job's snapshot to a cluster, or show what is missing.",
        "gc": "Remove snapshots and environments that no job needs.",
        "adopt": "Restore jobs that the ledger has lost.",
        "prune": "Delete leftovers in the cloud, or the history of old jobs.",
        "export": "Write the history of all jobs into a file.",
        "import": "Read such a history into this ledger.",
        "test": "Try a short training here or on a cluster.",
        "env": "Versions and platform, to paste into an issue.",
        "doctor": "Check this machine, the state directory and the clusters.",
        "completion": "Print the shell completion script.",
        "schema": "Print the JSON Schema of job.yaml or clusters.yaml.",
        "version": "Print the version.",
    },
}
# Whoever presses Ctrl-C once more so soon means the same: the command is ending.
REPEAT_S = 1.0
HIDDEN = {
    "tick": "One reconciler pass; started by local agents.",
    "reconcile": "Passes until no job is live; started by `orc submit`.",
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()} | HIDDEN
# Modules of `orc.orchestrator.cli.commands` with several commands, or with one of another name.
MODULES = {
    "jobs": "list status wait cancel tag",
    "submit": "resubmit",
    "launch": "run",
    "groups": "sweep array pipeline schedule",
    "insight": "events diff cost queue",
    "nodes": "exec ssh stacks top",
    "hosts": "tpu-config",
    "service": "login logout whoami token quota notifications serve",
    "snapshots": "sync gc",
    "history": "export import prune adopt reconcile tick",
    "models": "estimate-memory merge-weights to-fsdp2",
    "env": "version completion schema",
}
_MODULE_OF = {name: module for module, names in MODULES.items() for name in names.split()}


def load(name: str) -> click.Command:
    """Import the command *name*, ``NAME_command`` of its module."""
    module = importlib.import_module(f"orc.orchestrator.cli.commands.{_MODULE_OF.get(name, name)}")
    command: click.Command = getattr(module, f"{name.replace('-', '_')}_command")
    return command


class LazyGroup(click.Group):
    """A click group over `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names but the hidden ones, in the order of the help text."""
        return [name for name in COMMANDS if name not in HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        if cmd_name not in COMMANDS:
            return None
        return load(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; the error of an unknown name has its counterpart here, or the nearest name."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from orc.orchestrator.cli.foreign_verbs import hint

            raise click.UsageError(f"no such command {name!r}; {hint(name, self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands by section."""
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(10), text) for name, text in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete command names from the table; click's own version imports every command."""
        from click.shell_completion import CompletionItem

        names = [n for n in self.list_commands(ctx) if n.startswith(incomplete)]
        options = [] if names else click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(n, help=COMMANDS[n]) for n in names] + options


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        from orc.orchestrator.cli.ui.output import echo

        echo(f"orc {version('orc-launch')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="The version."
)
def cli() -> None:
    """Send PyTorch training jobs to clusters, watch them, and get them through.

    \b
    orc init digits && cd digits && orc submit job.yaml --follow
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every error ends here as one clear block."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if instruction := os.environ.get("_ORC_COMPLETE"):
        from click.shell_completion import shell_complete

        if instruction == "bash_complete" and "=" in os.environ.get("COMP_WORDS", ""):
            from orc.orchestrator.cli.completion import join_assignments

            join_assignments()
        return shell_complete(cli, {}, "orc", "_ORC_COMPLETE", instruction)
    if argv is None:
        _take_interrupts()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:  # it came when the command had ended, or while its error was printed
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader went away (`orc logs | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 141
    except OSError as error:  # from the flush, or because `_run` has seen that nothing can be written
        from orc.orchestrator.cli.ui.output import echo

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        echo(f"error: cannot write to standard output: {error.strerror}", err=True)
        status = 2
    if argv is None:
        _leave(status)
    return status


def _open_standard_streams() -> None:
    """Give a process that was started without some of them (`orc list >&-`) the null device instead.

    Otherwise the next file to be opened, say the ledger, gets the number 1, and whatever is printed goes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115, PTH123


def _take_interrupts() -> None:
    """Let the first Ctrl-C end the command in good order, and one that comes later than `REPEAT_S` at once."""
    first: list[float] = []

    def interrupt(_number: int, _frame: object) -> None:
        now = time.monotonic()
        if not first:
            first.append(now)
            raise KeyboardInterrupt
        if now - first[0] > REPEAT_S:
            os._exit(128 + signal.SIGINT)  # what was begun is found and finished later, as after any crash

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started it wants something else
        signal.signal(signal.SIGINT, interrupt)


def _is_of_output(error: BaseException) -> bool:
    """Return True for an *error* that came up while something was printed."""
    from orc.orchestrator.cli.ui import output, tail

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    printing = {click.echo.__code__.co_filename, output.__file__, tail.__file__}
    return isinstance(error, OSError) and trace is not None and trace.tb_frame.f_code.co_filename in printing


def _leave(status: int) -> NoReturn:
    """End the process without taking the interpreter apart, which takes longer than `orc --help` does (20 ms)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.flush()
    os._exit(status)


def _run(arguments: list[str]) -> int:
    try:
        with cli.make_context("orc", arguments) as context:
            result = cli.invoke(context)
        return int(result or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # the boundary: everything becomes a report
        if _is_of_output(error):
            raise
        from orc.orchestrator.cli.ui.output import report

        return report(error, arguments)


if __name__ == "__main__":
    sys.exit(main())
