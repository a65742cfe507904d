"""The loss on a CUDA device as a number, for a thread that writes metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def _pinned() -> Tensor:
    return torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)


class LossReader:
    """Reader of a loss for a line of metrics. The thread that trains brings it to the host, and waits for nothing.

    Another thread must not: it would wait for the device's default stream, and any call of its to CUDA breaks a graph
    that is captured at that moment. A copy that was asked for directly after backward also has the loss of a model
    that is compiled to CUDA graphs, whose memory the next step fills again.

    Attributes:
        wanted: set by whoever reads `value`, when it may be renewed.
        value: the last loss that arrived; `None` before the first.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.wanted = False
        self.value: float | None = None
        self._cuda = cuda
        self._host: Tensor | None = None
        self._travelling: Any = None  # event after the copy

    def note(self, loss: Tensor) -> None:
        """See *loss*, which has gone backward: take what has arrived, and begin to bring this one if it is wanted."""
        travelling = self._travelling
        if (travelling is None and not self.wanted) or self._cuda.is_current_stream_capturing():
            return
        if travelling is not None:
            if not travelling.query():
                return
            assert self._host is not None
            self.value, self._travelling = self._host.item(), None
        if self.wanted and loss.numel() == 1 and type(loss) is torch.Tensor:  # no DTensor
            self.wanted = False
            if self._host is None:
                self._host = _pinned()
            self._host.copy_(loss.reshape(()), non_blocking=True)
            self._travelling = self._cuda.Event()
            # Copied on the stream of its own device, which may be another GPU's.
            self._travelling.record(self._cuda.current_stream(loss.device if loss.is_cuda else None))
