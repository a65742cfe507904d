"""Progress of a submission, and the question about a large snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from orc.orchestrator.cli.ui.output import echo


@contextmanager
def submission_progress(*, silent: bool, yes: bool) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Show a submission on stderr; yields its `on_progress`. *yes* agrees to a large snapshot."""
    from orc.launchers.findings import Finding
    from orc.orchestrator.cli.ui.display import describe, display
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
