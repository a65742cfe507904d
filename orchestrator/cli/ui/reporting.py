"""Errors as users see them: what, where, what to do; on stderr as text, or on stdout as JSON with ``--json``; and
the exit statuses (docs/reference/exit-codes.md).
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.launchers.findings import Finding
from orc.orchestrator.cli.ui.output import echo, echo_json, style

if TYPE_CHECKING:
    from pathlib import Path


class ExitCode(enum.IntEnum):
    """Exit statuses of every command but `orc launch`, which passes on the script's own."""

    OK = 0
    JOB_FAILED = 1  # also: doctor and `clusters check` found an error, `clusters` and `clusters list` a wrong entry
    USAGE = 2  # bad input or usage, or this machine cannot carry it out; nothing was done
    CANCELLED = 3
    NO_SUCH_JOB = 4
    UNREACHABLE = 5
    TIMED_OUT = 6
    INTERNAL = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


# Names of exception classes, so that nothing is imported to compare: the first match in the class's MRO counts.
_BY_CLASS = {
    "JobNotFound": ExitCode.NO_SUCH_JOB,
    "BackendUnreachable": ExitCode.UNREACHABLE,
    "AmbiguousSubmit": ExitCode.UNREACHABLE,
    "LaunchError": ExitCode.USAGE,
}


def of_error(error: BaseException) -> ExitCode:
    """Return the exit status for an exception that ends a command."""
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_CLASS:
            return _BY_CLASS[cls.__name__]
    return ExitCode.INTERNAL


def of_states(states: Iterable[str]) -> ExitCode:
    """Return the exit status for jobs that ended in *states*: failure outranks cancellation, which outranks success."""
    seen = set(states)
    if "FAILED" in seen:
        return ExitCode.JOB_FAILED
    return ExitCode.CANCELLED if "CANCELLED" in seen else ExitCode.OK


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print *error* as text, or as JSON with ``--json``; return the exit status."""
    problems: list[dict[str, Any]] = []
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        echo(error.format_message(), err=True)
        return int(ExitCode.USAGE)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        code, fields = ExitCode.INTERRUPTED, {"what": "interrupted", "where": "", "do": ""}
    elif isinstance(error, click.ClickException):
        code, fields = ExitCode.USAGE, _usage(error)
    elif isinstance(error, LaunchError):
        code, fields = of_error(error), {"what": error.what, "where": error.where, "do": error.hint}
        problems = _problems(error)
    else:
        code, fields = ExitCode.INTERNAL, _internal(error, arguments)
    if wants_json(arguments):
        document = {"kind": type(error).__name__, **fields, "exit_code": int(code), "problems": problems}
        echo_json({"error": document})
    else:
        echo(block(fields), err=True)
    return int(code)


def _problems(error: LaunchError) -> list[dict[str, Any]]:
    """Return the errors of files, one by one; `file`, `line` and `column` are null where there is none."""
    from orc.launchers.spec.problems import SpecProblems

    if isinstance(error, SpecProblems):
        return [{**_position(p.where), "key": p.key, "message": p.what, "hint": p.hint} for p in error.problems]
    return [{**_position(error.where), "key": "", "message": error.what, "hint": error.hint}]


def _position(where: str) -> dict[str, Any]:
    parts = where.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return {"file": parts[0], "line": int(parts[1]), "column": int(parts[2])}
    return {"file": None, "line": None, "column": None}


def block(fields: dict[str, Any], label: str = "error") -> str:
    """Return the text form: ``error: WHAT``, then ``where:`` and ``do:`` where they are known."""
    colour = {"error": "red", "warning": "yellow"}.get(label)
    lines = [f"{style(label + ':', err=True, fg=colour, bold=True)} {_indent(fields['what'], 7)}"]
    for key in ("where", "do"):
        if fields.get(key):
            lines.append(f"  {key + ':':<7}{_indent(fields[key], 9)}")
    return "\n".join(lines)


def warn_unreachable(unreachable: Mapping[str, str], do: str, what: str = "cluster") -> None:
    """Warn about clusters, or *what* else, that did not answer: name -> reason."""
    for name, why in unreachable.items():
        warn(Finding("warning", why, f"{what} {name}", do))


def finding_text(finding: Finding) -> str:
    """Return a finding as a block like an error's."""
    return block({"what": finding.what, "where": finding.where, "do": finding.hint}, finding.level)


def warn(finding: Finding) -> None:
    """Print a finding on stderr."""
    echo(finding_text(finding), err=True)


def _indent(text: str, width: int) -> str:
    return text.rstrip().replace("\n", "\n" + " " * width)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True for ``--json`` among orc's own arguments; what follows ``--`` or launch's script is the script's."""
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if own[:1] in (["launch"], ["run"]):
        own = own[: _script_position(own)]
    if "--json" in own:
        return True
    forms = (["--format", "json"], ["-o", "json"], ["--output", "json"])
    return any(a in ("--format=json", "--output=json", "-ojson") or own[i : i + 2] in forms for i, a in enumerate(own))


def launch_options_with_value() -> set[str]:
    """Return the options of `orc launch` that a value follows, without the command, which reports errors itself."""
    from orc.launchers.accelerate.keys import FLAGS

    own = {"-n", "--nproc", "--python", "--seed", "--stand-in", "--grace"}
    return own | {flag for flag, option in FLAGS.items() if not option.switch}


def _script_position(words: Sequence[str]) -> int:
    """Return the index of launch's script among *words*; parsing may have failed before it got there."""
    with_value = launch_options_with_value()
    position = 1
    while position < len(words) and words[position].startswith("-"):
        position += 2 if words[position] in with_value else 1
    return position


def _usage(error: click.ClickException) -> dict[str, str]:
    context = getattr(error, "ctx", None)
    where = context.command_path if context else ""
    return {
        "what": error.format_message().rstrip("."),
        "where": where,
        "do": f"see `{where} --help`" if where else "",
    }


def _internal(error: BaseException, arguments: Sequence[str]) -> dict[str, str]:
    import traceback

    text = "".join(traceback.format_exception(error))
    summary = f"internal error: {type(error).__name__}: {error}".rstrip(": ")
    if os.environ.get("ORC_DEBUG"):
        echo(text, err=True)
        return {"what": summary, "where": "", "do": "this is a bug in orc; please report it with the traceback above"}
    path = _write_crash(text, arguments)
    if path is None:
        return {"what": summary, "where": "", "do": "run it again with ORC_DEBUG=1 to see the traceback"}
    return {"what": summary, "where": str(path), "do": "this is a bug in orc; please report it with that traceback"}


def _write_crash(text: str, arguments: Sequence[str]) -> Path | None:
    """Keep the traceback in the state directory, private to the user; `None` when that cannot be written either."""
    import time

    try:
        from orc.launchers.paths import state_dir

        folder = state_dir() / "crashes"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.touch(mode=0o600)
        # Arguments may hold `--set env.TOKEN=...`: only the command's name is kept.
        path.write_text(f"orc {' '.join(arguments[:1])}\npython {sys.version}\n\n{text}", encoding="utf-8")
    except Exception:  # noqa: BLE001  a report about a report would hide the first error
        return None
    return path
