"""Stop: why the ranks of an attempt are being ended."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class StopRequest:
    """Reason for ending the ranks before they end by themselves."""

    def __init__(
        self,
        outcome: str,
        reason: str,
        grace_s: float,
        *,
        forward: bool = True,
        failure: dict[str, Any] | None = None,
        exit_status: int = 1,
        lost: bool = False,
        lost_node: int | None = None,
        announced: bool = False,
    ) -> None:
        self.outcome = outcome
        self.reason = reason
        self.grace_s = grace_s
        self.forward = forward  # send SIGTERM at once; a rank that left with 75 shows that the others are leaving too
        self.failure = failure
        self.exit_status = exit_status
        self.lost = lost
        self.lost_node = lost_node  # which one, where that is known
        self.announced = announced  # learned from another node, so it need not be told
