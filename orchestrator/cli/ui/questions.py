"""Questions: before something large or final, answered by ``--yes`` where orc cannot ask, and for values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.ui.output import confirm, echo


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


_YES, _NO = ("yes", "y", "true", "1"), ("no", "n", "false", "0")


class Prompts:
    """Questions as lines on stderr, answers as lines of stdin; an empty one takes the default."""

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        """Return one of *choices*, answered by its number, its name or the beginning of its name."""
        listed = ", ".join(f"[{number}] {choice}" for number, choice in enumerate(choices))

        def parse(text: str) -> str:
            lowered = text.lower()
            exact = [one for one in choices if one.lower() == lowered]
            near = exact or [one for one in choices if one.lower().startswith(lowered)]
            if len(near) == 1:
                return near[0]
            if text.isdecimal() and int(text) < len(choices):
                return choices[int(text)]
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")

        return str(self._ask(f"{question} ({listed}) [{default}]: ", default, parse))

    def confirm(self, question: str, default: bool = False) -> bool:
        """Return yes or no."""

        def parse(text: str) -> bool:
            if text.lower() in (*_YES, *_NO):
                return text.lower() in _YES
            raise ValueError(f"{text!r} is neither yes nor no")

        return bool(self._ask(f"{question} [{'YES/no' if default else 'yes/NO'}]: ", default, parse))

    def text(self, question: str, default: Any = None, parse: Callable[[str], Any] = str) -> Any:
        """Return the parsed text, or *default* for an empty line; without a default there has to be one."""
        return self._ask(f"{question} [{default}]: " if default is not None else f"{question} ", default, parse)

    def say(self, text: str) -> None:
        """Print a remark."""
        echo(text, err=True)

    def _ask(self, question: str, default: Any, parse: Callable[[str], Any]) -> Any:
        while True:
            echo(question, err=True, nl=False)
            line = sys.stdin.readline()
            if not sys.stdin.isatty():
                echo(line.rstrip("\n"), err=True)  # so that the record of a run reads like a conversation
            if not line:
                raise _ended(question)
            text = line.strip()
            if not text and default is not None:
                return parse(default) if isinstance(default, str) else default
            try:
                if not text:
                    raise ValueError("an answer is needed")
                return parse(text)
            except ValueError as error:
                echo(f"  {error}", err=True)


def _ended(question: str) -> LaunchError:
    return LaunchError(f"the answers end before the question: {question.strip()}")
