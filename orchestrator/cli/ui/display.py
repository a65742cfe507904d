"""Progress while the user waits, on stderr: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from orc.orchestrator.cli.ui.output import echo, rendered

if TYPE_CHECKING:
    from rich.status import Status


class Display:
    """Plain lines: a step is printed once, when it begins; its details are not."""

    def __init__(self) -> None:
        self._step = ""

    def show(self, step: str, detail: str = "") -> None:
        """Show *step*, which has come as far as *detail*."""
        if step != self._step:
            self._step = step
            echo(step, err=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Room for other output."""
        yield

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self.aside():
            echo(text, err=True)

    def close(self) -> None:
        """Nothing goes on any more."""


class TerminalDisplay(Display):
    """Line with a spinner, rewritten in place and gone at the end."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None

    def show(self, step: str, detail: str = "") -> None:
        """Show *step*, which has come as far as *detail*."""
        from rich.text import Text

        text = Text.from_ansi(rendered(f"{step}  {detail}".rstrip()))
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the line away while something else is written, so that the two do not mix."""
        if self._status is None:
            yield
            return
        self._status.stop()
        yield
        self._status.start()

    def close(self) -> None:
        """Take the line away."""
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
def display(*, silent: bool = False) -> Iterator[Display]:
    """Yield the display that suits stderr, closed at the end."""
    shown = SilentDisplay() if silent else TerminalDisplay() if sys.stderr.isatty() else Display()
    try:
        yield shown
    finally:
        shown.close()


_STEPS = {
    "size": "found",
    "hash": "reading",
    "scan": "scanned",
    "environment": "packing the environment",
    "snapshot": "taking a snapshot",
    "stage": "uploading",
    "submit": "submitting",
}


def describe(event: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return a step of a submission (`Client.submit`'s *on_progress*) and how far it is, as text."""
    from orc.orchestrator.cli.ui.output import size

    step = _STEPS.get(event, event)
    if "done" in values and values.get("bytes"):
        done, total = float(values["done"]), float(values["bytes"])
        return step, f"{size(done)} of {size(total)} ({100 * done / total:.0f}%)"
    if "files" in values:
        return step, f"{values['files']} files, {size(values['bytes'])}"
    return step, ""


@contextmanager
def submission_progress(*, silent: bool, yes: bool) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Show a submission on stderr; yields its `on_progress`. *yes* agrees to a large snapshot."""
    from orc.launchers.findings import Finding
    from orc.orchestrator.cli.ui.reporting import warn

    with display(silent=silent) as shown:

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
    from orc.launchers.errors import SpecError
    from orc.orchestrator.cli.ui import questions
    from orc.orchestrator.cli.ui.output import size
    from orc.orchestrator.cli.ui.reporting import block

    folders = ", ".join(f"{folder} ({size(count)})" for folder, count in values["folders"])
    what = f"the snapshot would hold {size(values['bytes'])} in {values['files']} files"
    what += f", more than {size(values['limit'])}"
    where = folders and f"largest folders: {folders}"
    hint = "name in .orcignore what the job does not need, or raise workdir.limit in the job file"
    if not questions.can_ask():
        raise SpecError(what, where=where, hint=f"{hint}; --yes sends it as it is")
    echo(block({"what": what, "where": where, "do": hint}, "warning"), err=True)
    questions.ask("take a snapshot of that size")
