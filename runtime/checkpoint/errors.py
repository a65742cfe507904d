"""Exceptions that saving and loading raise, and what they tell besides."""

from __future__ import annotations

import sys
from types import TracebackType

from orc.runtime.core.errors import OrcRuntimeError

# Of a process that such an error ends (EX_CONFIG): to run the same job again would end the same way. The orchestrator
# knows it (`orc.orchestrator.engine.updates`).
REFUSED_EXIT_STATUS = 78


def tell(text: object) -> None:
    """Write *text* to the log of the run."""
    print(f"orc: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the log of the run


class CheckpointError(OrcRuntimeError, ValueError):
    """A checkpoint that cannot be written, is incomplete or damaged, or does not fit what was prepared."""


class RankMissing(CheckpointError):
    """A rank did not come to save or load with the others."""


class RanksElsewhere(RankMissing):
    """The ranks that are missing will not come.

    Attributes:
        reasons: what each of them does, by rank.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank} {reason}" for rank, reason in sorted(reasons.items())))
        self.reasons = reasons


class CheckpointMisfit(CheckpointError):
    """A whole checkpoint that does not fit what was prepared: every further attempt of this job would be refused too.

    When nobody catches it the process ends with `REFUSED_EXIT_STATUS`, and no attempt is wasted on a repetition.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        outer = sys.excepthook

        def refuse(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            outer(kind, error, traceback)
            cause: BaseException | None = error
            while cause is not None and cause is not self:
                cause = cause.__cause__ or cause.__context__
            if cause is self:
                raise SystemExit(REFUSED_EXIT_STATUS)

        sys.excepthook = refuse
