"""Floating point operations of one training step, counted once, and what the hardware could do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Dense matrix products in bf16 or fp16, in TFLOP/s, from the vendors' data sheets, by the words of a device's name.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
    ("MI250X", 191.5),  # one of its two dies, which torch shows as a device
)
_OTHER_KINDS = ("MIG", "Laptop", "Ti", "SUPER", "D")  # of one of those, with another throughput


def peak_tflops(device: torch.device, configured: float | None = None) -> float | None:
    """Return the peak throughput of *device* in TFLOP/s; `None` where it is unknown and not *configured*."""
    if configured is not None:
        return configured
    if device.type != "cuda":
        return None
    import torch

    return known_peak(torch.cuda.get_device_name(device))


def known_peak(name: str) -> float | None:
    """Return the peak of the device called *name*; `None` for one that is not in the table.

    Its words have to be there whole: an RTX A4000 is no A40, an RTX 4090 D or Laptop GPU no RTX 4090, and a part of
    a GPU (MIG) has not all of its throughput.
    """
    words = f" {' '.join(name.replace('-', ' ').split())} "
    if any(f" {other} " in words for other in _OTHER_KINDS):
        return None
    return next((peak for known, peak in PEAK_TFLOPS if f" {known} " in words), None)


class FlopCount:
    """Counts what runs on this thread (and in its backward) between `start` and `stop`; no effect on the results."""

    def __init__(self) -> None:
        self._mode: Any = None

    @property
    def counting(self) -> bool:
        """Between `start` and `stop`."""
        return self._mode is not None

    def start(self) -> None:
        """Begin."""
        from torch.utils.flop_counter import FlopCounterMode

        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()

    def stop(self) -> int:
        """End; the operations counted: multiplications and additions of matrix products, convolutions, attention.

        Of kernels that torch's counter knows: all of CUDA's, not the fused attention of CPUs.
        """
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return int(mode.get_total_flops())
