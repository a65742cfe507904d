"""Connections of the server: each has to bring the head of a request in time, and heads have a largest size."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PromptConnection(H11Protocol):
    """Connection that is closed where the head of a request does not come to its end.

    uvicorn waits for it without limit, and serves a number of connections only: whoever opens that many and says
    nothing would keep everybody else out. The pure Python parser is used, because the other one has no largest head.
    """

    def __init__(self, *, head_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; what is only the begin of a head has to go on."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._head_timeout_s, self._close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _close(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()
