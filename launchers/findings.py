"""Findings of a check of a plan, a host, a snapshot or a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from orc.launchers.errors import BackendUnreachable, LaunchError


@dataclass(frozen=True)
class Finding:
    """Result of a check, for people: its level, the problem, its place and the remedy."""

    level: Literal["info", "warning", "error"]
    what: str
    where: str = ""  # the name of a host of the placement when that host is to blame: another may be taken instead
    hint: str = ""
    unreachable: bool = False  # an error because nobody answered: it says nothing about the plan

    @classmethod
    def of(cls, error: LaunchError, where: str) -> Finding:
        """Return the finding that the check itself has failed with *error*."""
        return cls("error", error.what, where, error.hint, unreachable=isinstance(error, BackendUnreachable))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return *findings* with the errors first, then the warnings."""
    return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.level))
