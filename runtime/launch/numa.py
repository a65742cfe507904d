"""Keeping a process on the processor cores next to its GPU."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this process run only on the cores of the NUMA node that its GPU is attached to.

    Where the machine does not say which node that is (one node only, a virtual machine), nothing changes.

    Args:
        local_process_index: the number of the GPU, which is that of the process on its machine.
        verbose: log the choice; by default in debug mode.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    import torch

    from orc.runtime.core.config import resolve

    if not torch.cuda.is_available():
        raise RuntimeError("NUMA affinity follows the GPU of a process, but this process has no CUDA device")
    cores = cores_near(pci_address(local_process_index))
    if cores:
        os.sched_setaffinity(0, cores)
    if resolve({}, os.environ).debug_mode if verbose is None else verbose:
        logger.info("process %d runs on the cores %s", local_process_index, sorted(cores) or "it was given")


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """`override_numa_affinity`, done once per process: later calls change nothing.

    Args:
        local_process_index: the rank on this machine.
        verbose: log where the process is bound.
    """
    override_numa_affinity(local_process_index, verbose)


def pci_address(index: int) -> str:
    """The address of CUDA device *index* on the PCI bus: ``0000:3b:00.0``."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)  # the stub does not know its PCI address
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def cores_near(address: str, pci: Path = _PCI, nodes: Path = _NODES) -> set[int]:
    """The cores of the NUMA node of the PCI device *address*; none where the system does not expose them."""
    try:
        node = int((pci / address / "numa_node").read_text())
        return parse_cores((nodes / f"node{node}" / "cpulist").read_text()) if node >= 0 else set()
    except FileNotFoundError:
        return set()


def parse_cores(text: str) -> set[int]:
    """The numbers in ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
