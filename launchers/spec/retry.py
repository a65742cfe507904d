"""The section ``retry:`` of job.yaml."""

from __future__ import annotations

import importlib
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from orc.launchers.spec import grammar
from orc.launchers.spec.options import Duration, FrozenModel, Whole, several

_LONGEST_PATTERN = 500


def _pattern(value: Any) -> str:
    """Return a regular expression that can be searched for in bounded time."""
    text = grammar.line(value)
    if not text or len(text) > _LONGEST_PATTERN:
        raise ValueError(f"expected a regular expression of 1 to {_LONGEST_PATTERN} characters")
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if _repeats_itself(text):
        raise ValueError(f"{text!r} repeats what is repeated already, as in (a+)+: a search could take for ever")
    if re.search(text, ""):
        raise ValueError(f"{text!r} matches every line")
    return text


def _repeats_itself(pattern: str) -> bool:
    """Return True where an unbounded repeat is within another one, as in ``(a+)+``: the usual way to run for ever."""
    parser = importlib.import_module("re._parser")

    def visit(part: Any, inside: bool) -> bool:
        if not isinstance(part, (list, tuple, parser.SubPattern)):
            return False
        if isinstance(part, tuple) and len(part) == 3 and part[1] is parser.MAXREPEAT:  # (least, most, what)
            return inside or visit(part[2], True)
        return any(visit(each, inside) for each in part)

    return visit(parser.parse(pattern), False)


class LogRule(FrozenModel):
    """Rule about a line in the log of a failed attempt."""

    pattern: Annotated[str, BeforeValidator(_pattern)] = Field(description="Regular expression, searched in each line.")
    action: Literal["retry", "fail", "exclude_node"] = Field(description="What a line that matches means.")


class Retry(FrozenModel):
    """Policy for the attempts after a failed one."""

    max_attempts: Whole = Field(3, ge=1, le=1000, description="Attempts in all.")
    on: Annotated[tuple[Literal["crash", "node_failure", "preempted", "timeout"], ...], several] = Field(
        ("node_failure", "preempted"), description="Causes that are worth another attempt."
    )
    backoff: Duration = Field(10, description="Seconds before the second attempt; doubles each time, 600 at most.")

    on_log: tuple[LogRule, ...] = Field(
        (), max_length=32, description="Rules about what a failed attempt has logged; the first that matches decides."
    )
