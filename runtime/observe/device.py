"""The GPU of this rank: a line about it in the log and on record, and how much of its memory is taken."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.launch.numa import pci_address
from orc.runtime.logging import get_logger

if TYPE_CHECKING:
    import torch

    from orc.runtime.core.context import RunContext

MEMORY = {  # by their names in metrics, those of the allocator's
    "memory_allocated": "allocated_bytes.all.current",
    "memory_reserved": "reserved_bytes.all.current",
    "memory_peak": "allocated_bytes.all.peak",
}
_SYSTEM = Path("/sys")


def announce(context: RunContext) -> None:
    """Write which GPU this rank of a job has into its log, and into ``device-<rank>.json``, once; nothing on CPUs."""
    path = record_path(context)
    if path is None or (path.exists() and json.loads(path.read_text()).get("pid") == os.getpid()):
        return
    facts = device_facts(context)
    sys.stderr.write(start_line(facts) + "\n")
    _write(path, facts)


def record_path(context: RunContext) -> Path | None:
    """Return the path of this rank's record in the node's folder of the attempt; `None` on CPUs or outside of a job."""
    attempt = context.env.job.attempt_dir
    if attempt is None or context.device.type != "cuda":
        return None
    node = Path(attempt) / f"node-{context.node_rank}"
    return node / f"device-{context.rank}.json" if node.is_dir() else None


def device_facts(context: RunContext, system: Path = _SYSTEM) -> dict[str, Any]:
    """Return what this rank trains on: GPU, its place in the machine, and what NCCL has to talk to others over."""
    import torch
    import torch.distributed as dist

    properties: Any = torch.cuda.get_device_properties(context.device)
    try:
        pci = pci_address(context.device.index or 0)
    except AttributeError:  # an older torch does not say
        pci = ""
    numa = _number(system / "bus/pci/devices" / pci / "numa_node") if pci else None
    nccl = torch.cuda.nccl.version() if dist.is_available() and dist.is_nccl_available() else ()
    return {
        "rank": context.rank,
        "world_size": context.world_size,
        "restart": context.env.job.restart,
        "pid": os.getpid(),
        "name": str(properties.name),
        "uuid": str(getattr(properties, "uuid", "")),
        "pci": pci,
        "numa": numa,
        "nccl": ".".join(map(str, nccl)),
        "network": networks(numa, system) if context.world_size > context.local_world_size else [],
    }


def networks(numa: int | None, system: Path = _SYSTEM) -> list[str]:
    """Return what NCCL talks to other nodes over: InfiniBand, or RoCE, that is near the GPU; else the interface that
    it is held to, if any.
    """
    cards = system / "class/infiniband"
    if os.environ.get("NCCL_IB_DISABLE") != "1" and cards.is_dir():
        nodes = {card.name: _number(card / "device/numa_node") for card in sorted(cards.iterdir())}
        if nodes:
            return [name for name, node in nodes.items() if node == numa] or list(nodes)
    return [name.lstrip("=") for name in os.environ.get("NCCL_SOCKET_IFNAME", "").split(",") if name]


def start_line(facts: Mapping[str, Any]) -> str:
    """Return the line for the log: ``orc: rank 1 of 8 trains on NVIDIA L4 (GPU-…, PCI 0000:3b:00.0, NUMA node 1)``."""
    numa = facts["numa"]
    place = [facts["uuid"], facts["pci"] and f"PCI {facts['pci']}"]
    place += [f"NUMA node {numa}"] if numa is not None and numa >= 0 else []
    line = f"orc: rank {facts['rank']} of {facts['world_size']} trains on {facts['name']}"
    line += f" ({', '.join(filter(None, place))})"
    if facts["nccl"] and facts["world_size"] > 1:
        line += f", NCCL {facts['nccl']}"
        line += f" over {', '.join(facts['network'])}" if facts["network"] else ""
    return line


def device_memory(device: torch.device) -> dict[str, int]:
    """Return bytes of *device* that tensors take, that the allocator holds, and the most that tensors have taken.

    Empty for what is no GPU. Asks the allocator alone, so the device does not wait. Callable from any thread.
    """
    if device.type != "cuda":
        return {}
    import torch

    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(counter, 0)) for name, counter in MEMORY.items()}


def note_memory(context: RunContext, memory: Mapping[str, int]) -> None:
    """Bring *memory*, as `device_memory` gives it, into this rank's record, where ``orc top`` reads it."""
    path = record_path(context) if memory else None
    if path is not None and path.exists():
        _write(path, {**json.loads(path.read_text()), **memory})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
    except OSError as error:  # training is worth more than telling about it
        get_logger(__name__).warning(f"{path} is not written: {error}")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
