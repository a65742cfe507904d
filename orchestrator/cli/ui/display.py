"""Display of what the user waits for, on stderr: a live line on a terminal, one plain line per step elsewhere;
the bell when it is there, and the questions before something large or final."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.control_characters import escape_controls
from orc.launchers.errors import SpecError
from orc.launchers.findings import Finding
from orc.orchestrator.cli.ui.output import clock, confirm, duration, echo, rendered, size, warn

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

QUIET_S = 1.0  # a command that has printed nothing for so long says what it waits for
_OPEN = "orc.display"  # of click's context: True while a display shows what a part of the command waits for


class Display:
    """Plain lines: a step is printed once, with the time since when it is waited for.

    It is printed when it begins; with *quiet_s* only when nothing was printed for so many seconds.
    """

    def __init__(self, quiet_s: float = 0.0) -> None:
        self._quiet_s = quiet_s
        self._step, self._detail, self._since = "", "", 0.0
        self._printed_at = time.monotonic()
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()

    def show(self, step: str, detail: str = "") -> None:
        """Show *step*, which has come as far as *detail*."""
        with self._lock:
            self._detail = detail
            if step == self._step:
                return
            self._step, self._since = step, time.time()
            left = self._quiet_s - (time.monotonic() - self._printed_at)
            if not self._quiet_s:
                self._print()
            elif self._timer is None:
                self._timer = threading.Timer(max(left, 0.0), self._fire)
                self._timer.daemon = True
                self._timer.start()

    def _fire(self) -> None:
        with self._lock:
            if self._timer is not None:  # else it was closed meanwhile
                self._timer = None
                self._printed_at = time.monotonic()
                self._print()

    def _print(self) -> None:
        since = f", since {clock(self._since)}" if self._quiet_s else ""
        echo(f"{self._step}{f' ({self._detail})' if self._quiet_s and self._detail else ''}{since}", err=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Room for other output."""
        with self._lock:
            yield

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self.aside():
            echo(text, err=True)

    def close(self) -> None:
        """Nothing goes on any more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


class TerminalDisplay(Display):
    """Line with a spinner and the time that the step takes, rewritten in place and gone at the end."""

    def __init__(self, quiet_s: float = 0.0) -> None:
        super().__init__(quiet_s)
        self._status: Status | None = None

    def _print(self) -> None:
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status(self)
            self._status.start()

    def __rich__(self) -> Text:
        """Return the line as it is now."""
        from rich.text import Text

        took = time.time() - self._since
        words = (self._step, self._detail, duration(took) if took >= QUIET_S else "")
        return Text.from_ansi(rendered("  ".join(filter(None, words))))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the line away while something else is written, so that the two do not mix."""
        with self._lock:
            if self._status is None:
                yield
                return
            self._status.stop()
            yield
            self._status.start()

    def close(self) -> None:
        """Take the line away."""
        super().close()
        if self._status is not None:
            self._status.stop()
            self._status = None


class SilentDisplay(Display):
    """Nothing at all, for ``--json``."""

    def show(self, step: str, detail: str = "") -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


@contextmanager
def display(*, silent: bool = False, quiet_s: float = 0.0) -> Iterator[Display]:
    """Yield the display that suits stderr, closed at the end; *quiet_s* as of `Display`."""
    shown = SilentDisplay() if silent else (TerminalDisplay if sys.stderr.isatty() else Display)(quiet_s)
    context = click.get_current_context(silent=True)
    meta = context.meta if context else {}
    outer, meta[_OPEN] = meta.get(_OPEN, False), True
    try:
        yield shown
    finally:
        meta[_OPEN] = outer
        shown.close()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A block that may take long: after `QUIET_S` it is shown that the command waits for *what*, and since when.

    Nothing is shown where the command prints JSON, and where another display is open, which says it already.
    """
    context = click.get_current_context(silent=True)
    values = context.params if context else {}
    document = values.get("as_json") or values.get("form") in ("json", "yaml", "name")
    if document or (context and context.meta.get(_OPEN)):
        yield
        return
    with display(quiet_s=QUIET_S) as shown:
        shown.show(what)
        yield


_STEPS = {
    "environment": "packing the environment",
    "snapshot": "storing the snapshot",
    "stage": "uploading",
    "submit": "handing the job to the cluster",
    "upload": "uploading to the service",
}
READING = "reading the files of the job"


def describe(event: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return a step of a submission (`Client.submit`'s *on_progress*) and how far it is, as text."""
    step = _STEPS.get(event, READING)
    if "done" in values and values.get("bytes"):
        done, total = float(values["done"]), float(values["bytes"])
        return step, f"{size(done)} of {size(total)} ({100 * done / total:.0f}%)"
    if "files" in values:
        return step, f"{values['files']} files, {size(values['bytes'])}"
    return step, ""


@contextmanager
def submission_progress(*, silent: bool, yes: bool) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Show a submission on stderr; yields its `on_progress`. *yes* agrees to a large snapshot."""
    with display(silent=silent, quiet_s=QUIET_S) as shown:
        shown.show(READING)

        def on_progress(event: str, values: Mapping[str, Any]) -> None:
            if event == "finding":
                if values["level"] == "info":
                    return
                with shown.aside():
                    warn(Finding(values["level"], values["what"], values["where"], values["hint"]))
            elif event == "size" and values["bytes"] > values["limit"] and not yes:
                with shown.aside():
                    _agree_to_size(values)
            else:
                shown.show(*describe(event, values))

        yield on_progress


def _agree_to_size(values: Mapping[str, Any]) -> None:
    """Confirm that a large snapshot is meant. Raises `SpecError` where there is no terminal, and as `ask`."""
    folders = ", ".join(f"{folder} ({size(count)})" for folder, count in values["folders"])
    what = f"the snapshot would hold {size(values['bytes'])} in {values['files']} files"
    what += f", more than {size(values['limit'])}"
    where = folders and f"largest folders: {folders}"
    hint = "name in .orcignore what the job does not need, or raise workdir.limit in the job file"
    if not can_ask():
        raise SpecError(what, where=where, hint=f"{hint}; --yes sends it as it is")
    warn(Finding("warning", what, where, hint))
    ask("take a snapshot of that size")


def can_ask() -> bool:
    """Return True when input and output are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agree(deed: str) -> None:
    """Ask whether to do *deed*, as `ask`. Raises `click.UsageError` where orc cannot ask."""
    if not can_ask():
        raise click.UsageError(f"--yes is needed to {deed} where orc cannot ask", click.get_current_context())
    ask(deed)


def ask(deed: str) -> None:
    """Return when the user agrees to *deed*, like ``cancel 3 jobs``; else raise `click.exceptions.Exit`, status 2."""
    if not confirm(f"{deed}?"):
        raise click.exceptions.Exit(2)


_PATIENCE_S = 5.0


def ring(title: str, lines: Sequence[str]) -> None:
    """Ring the terminal's bell, and show *title* and *lines* on the desktop where ``notify-send`` can."""
    if sys.stderr.isatty():
        click.echo("\a", err=True, nl=False)
    program = shutil.which("notify-send")
    if program and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        # A body may hold markup; names and reasons hold none of ours.
        body = "\n".join(escape_controls(line) for line in lines).replace("&", "&amp;").replace("<", "&lt;")
        words = [program, "--app-name=orc", "--", escape_controls(title), body]
        try:
            subprocess.run(words, timeout=_PATIENCE_S, check=False, capture_output=True)
        except (OSError, subprocess.TimeoutExpired):
            return  # no desktop answers: the terminal has been told
