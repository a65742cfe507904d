"""Questions before something large or final: on a terminal, answered by ``--yes`` elsewhere."""

from __future__ import annotations

import sys

import click

from orc.orchestrator.cli.ui.output import confirm


def can_ask() -> bool:
    """Return True when input and output are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(deed: str) -> None:
    """Return when the user agrees to *deed*, like ``cancel 3 jobs``; else raise `click.exceptions.Exit`, status 2."""
    if not confirm(f"{deed}?"):
        raise click.exceptions.Exit(2)
