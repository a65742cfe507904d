"""Opening and closing the process group: the thin shell around `torch.distributed`."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orc.runtime.core.compute import TORCH
from orc.runtime.core.config import resolve
from orc.runtime.core.context import RunContext
from orc.runtime.core.environment import LaunchEnvironment
from orc.runtime.core.errors import LaunchError
from orc.runtime.core.parsing import switched_on
from orc.runtime.launch import listening
from orc.runtime.launch.device import (
    binds,
    claim_gpu,
    collective_backend,
    may_be_xla,
    platform_backend,
    process_group_backend,
    record_collectives,
    select_device,
)
from orc.runtime.launch.environment import detect

if TYPE_CHECKING:
    from orc.runtime.core.store import Store
    from orc.runtime.launch.xla import Xla

_opened_here = False
_alone = False  # of one rank; its context has no group
_settles = False
_run_store: tuple[Any, tuple[Store, bytes]] | None = None  # of which process group
# How the ranks met, their store, and how many groups have been opened over it.
_met: tuple[tuple[Any, ...], dist.Store, int] | None = None
_NOTE_BYTES = 512
_CPU_AFFINITY = "ACCELERATE_CPU_AFFINITY"  # the documented switch: `orc launch --enable_cpu_affinity` sets it

_GLOO_WORKER = "pt_gloo_runloop"  # the name torch gives to gloo's threads
SETTLE_S = 2.0


def open_context(
    env: Mapping[str, str],
    *,
    cpu: bool = False,
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
) -> RunContext:
    """The context of this process: ranks from *env*, a device, and the process group when there are peers.

    A process group that the script opened itself is used as it is.

    Args:
        env: the environment variables.
        cpu: stay on the CPU.
        backend: ``gloo`` or ``nccl``; by default, and for nccl without a GPU, what suits the device.
        timeout: of collectives and of the meeting itself; ``ORC_TIMEOUT_S``, then torch's default.
        init_method: a meeting point other than MASTER_ADDR and MASTER_PORT; over torch_xla ``xla://`` is the default.

    Raises:
        LaunchError: the environment is contradictory, there is no usable device, or the peers were not met in time.
    """
    config = resolve({}, env)
    _write_stacks_of_crashes()
    launch = detect(env)
    if timeout is None and config.timeout_s is not None:
        timeout = timedelta(seconds=config.timeout_s)
    if not (cpu or config.use_cpu) and may_be_xla(env):
        from orc.runtime.launch import xla

        if xla.wanted(env):
            return _open_xla(launch, timeout, init_method)
    device = select_device(launch, cpu=cpu or config.use_cpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if switched_on(env, _CPU_AFFINITY):
            from orc.runtime.launch.numa import set_numa_affinity

            set_numa_affinity(device.index)
    if backend is None or (backend == "nccl" and device.type != "cuda"):  # the documented default says nccl
        backend = collective_backend(device)
    if dist.is_initialized():
        # A group with a backend per device has no one name; it is known by that of this process's device.
        opened = dist.get_backend()
        backend = opened if dist.Backend.backend_capability.get(opened) else backend
        return _context(launch, device, backend, dist.get_rank(), dist.get_world_size())
    if launch.world_size == 1:
        return _context(launch, device, None, 0, 1)
    _meet(launch, device, backend, platform_backend(backend, env), timeout, init_method)
    return _context(launch, device, backend, launch.rank, launch.world_size)


def _write_stacks_of_crashes() -> None:
    """A crash in C shows where Python was, whoever has started this process; PYTHONFAULTHANDLER= turns it off."""
    if not faulthandler.is_enabled() and os.environ.get("PYTHONFAULTHANDLER") != "":
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # there is no standard error
            faulthandler.enable()


def _open_xla(launch: LaunchEnvironment, timeout: timedelta | None, init_method: str | None) -> RunContext:
    from orc.runtime.launch import xla

    was_open = dist.is_initialized()
    adapter, place = xla.open_xla(launch, timeout=timeout, init_method=init_method)
    if dist.is_initialized() and not was_open:
        _close_later()
    return _context(place, adapter.device, "xla", place.rank, place.world_size, adapter)


def _meet(
    launch: LaunchEnvironment,
    device: torch.device,
    backend: str,
    opened: str,
    timeout: timedelta | None,
    init_method: str | None,
) -> None:
    global _met
    options: dict[str, Any] = {"backend": opened}
    if timeout is not None:
        options["timeout"] = timeout
    if binds(device, opened):
        options["device_id"] = device
    if init_method is None:
        # torchrun's agent hosts the store itself; env:// is what knows how to join it.
        address = launch.master_addr or ""
        host = f"[{address}]" if ":" in address else address
        init_method = "env://" if launch.platform in ("orc", "torchrun") else f"tcp://{host}:{launch.master_port}"
    if one_node(launch):
        listening.stay_on_loopback()
    elif launch.master_addr:
        listening.face_master(launch.master_addr)
    listening.bind_stores()
    way = os.getpid(), init_method, launch.master_addr, launch.master_port, launch.rank, launch.world_size
    opened_before = 0
    if _met is not None and _met[0] == way:
        # A script that ended its training and begins another one. Whoever comes first would still find the old store
        # at the address, with the old addresses of all ranks in it: they go on with that store, under another prefix.
        _, store, opened_before = _met
        options["store"] = dist.PrefixStore(f"group_{opened_before}", store)
    else:
        options["init_method"] = init_method
    try:
        if device.type == "cuda" and "nccl" in opened:
            record_collectives()
            options["store"] = store = options.get("store") or _store_at(options.pop("init_method"), launch, timeout)
            claim_gpu(store, launch, device)
        dist.init_process_group(rank=launch.rank, world_size=launch.world_size, **options)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = init_method if init_method != "env://" else f"{launch.master_addr}:{launch.master_port}"
        raise LaunchError(
            f"rank {launch.rank} of {launch.world_size} could not join its peers at {where} ({backend}): {error}"
        ) from error
    _note_timeout(timeout)
    store = _met[1] if opened_before and _met is not None else dist.distributed_c10d._get_default_store()
    _met = way, store, opened_before + 1
    _close_later()


def _note_timeout(timeout: timedelta | None) -> None:
    from orc.runtime.core.timeouts import note_timeout  # an Accelerator of one process needs none

    assert dist.group.WORLD is not None
    note_timeout(dist.group.WORLD, timeout)


def _store_at(init_method: str, launch: LaunchEnvironment, timeout: timedelta | None) -> dist.Store:
    """The store at which the ranks meet, as ``init_process_group`` would open it."""
    from torch.distributed.constants import default_pg_timeout

    limit = timeout or default_pg_timeout
    store, _, _ = next(dist.rendezvous(init_method, launch.rank, launch.world_size, timeout=limit))
    store.set_timeout(limit)
    return dist.PrefixStore("default_pg", store)


def open_alone(device: torch.device) -> None:
    """Open a process group of this process alone, which a device mesh needs even where there is one rank."""
    global _alone
    backend = process_group_backend(collective_backend(device))
    options: dict[str, Any] = {"device_id": device} if binds(device, backend) else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    _note_timeout(None)
    _alone = True
    _close_later()


def _close_later() -> None:
    global _opened_here
    if not _opened_here:
        _opened_here = True
        atexit.register(_close_at_exit)


def _context(
    launch: LaunchEnvironment,
    device: torch.device,
    backend: str | None,
    rank: int,
    world_size: int,
    adapter: Xla | None = None,
) -> RunContext:
    global _settles
    if world_size > 1 and not _settles:
        _settles = True
        atexit.register(settle)
    # A group that the script opened itself may be wider than what the environment said.
    local_world = min(launch.local_world_size, world_size) if launch.world_size == world_size else world_size
    local_rank = launch.local_rank if launch.world_size == world_size else rank
    run_store, key = _store_of_group(launch, device, rank) if world_size > 1 else (None, b"")
    return RunContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world,
        node_rank=launch.node_rank,
        device=device,
        backend=backend if world_size > 1 else None,
        env=launch,
        group=dist.group.WORLD if world_size > 1 else None,
        store=run_store,
        key=key,
        compute=adapter or TORCH,
    )


def one_node(launch: LaunchEnvironment) -> bool:
    """Return whether all ranks are on this machine."""
    return launch.master_addr in listening.LOOPBACK or launch.local_world_size == launch.world_size


def _store_of_group(launch: LaunchEnvironment, device: torch.device, rank: int) -> tuple[Store, bytes]:
    """The store of the process group that is open, and its key; a second context of the same group has the same."""
    global _run_store
    from orc.runtime.collectives.store_server import open_store
    from orc.runtime.core.store import StoreError

    group = dist.group.WORLD
    if _run_store is not None and _run_store[0] is group:
        return _run_store[1]
    place = torch.device("cpu") if "cpu:" in str(dist.get_backend_config(group)) else device

    def hand_round(note: bytes | None) -> bytes:
        message = torch.zeros(_NOTE_BYTES, dtype=torch.uint8)
        if note is not None:
            message[: len(note)] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        message = message.to(place)
        dist.broadcast(message, 0)
        return bytes(message.cpu().numpy().tobytes()).rstrip(b"\0")

    token = os.environ.get("ORC_TOKEN")
    master, near = launch.master_addr or "", one_node(launch)
    if launch.world_size != dist.get_world_size() and (given := _host_of_store()):
        # The environment knows nothing of a group that the script opened by itself.
        master, near = given, given in listening.LOOPBACK
    address = "127.0.0.1" if near else listening.own_address(master) if rank == 0 else ""
    try:
        run_store = open_store(rank, bytes.fromhex(token) if token else None, address, master, hand_round)
    except (StoreError, ValueError, OSError) as error:
        raise LaunchError(f"rank {rank} of {dist.get_world_size()} has no way to its peers: {error}") from error
    _run_store = group, run_store
    return run_store


def _host_of_store() -> str:
    """The host at which the ranks have met; empty where that was no host."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def close(context: RunContext | None = None) -> None:
    """Destroy the process group if the runtime opened it; harmless without one, or when *context* has another."""
    global _opened_here, _alone
    alone = _alone and context is not None and context.group is None
    if context is not None and context.group is not dist.group.WORLD and not alone:
        return
    if _opened_here and dist.is_initialized():
        dist.destroy_process_group()
        _opened_here = _alone = False
        atexit.unregister(_close_at_exit)


def _close_at_exit() -> None:
    # After an uncaught exception a collective may be in flight, and destroying would wait for peers that never come.
    if getattr(sys, "last_type", None) is None:
        close()


def settle(limit_s: float = SETTLE_S) -> None:
    """Wait, at most *limit_s* seconds, until gloo's threads have put away the collectives that are done.

    A thread that has finished a collective drops its tensors, and needs the interpreter's lock for that. When the
    interpreter ends first, torch aborts the process: a script whose last line is a collective would die of SIGABRT,
    now and then. Sleeping hands the lock over and wakes a thread that wants it; on a busy machine it may come too late
    and sleep on, but it has been awake. One that has not been, twice, is idle or waits for a peer.
    """
    deadline = time.monotonic() + limit_s
    before: list[tuple[str, ...]] = []
    idle = 0
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
        now = list(_gloo_threads())
        idle = idle + 1 if now == before and all(state == "S" for _, state, *_ in now) else 0
        before = now


def _gloo_threads() -> Iterator[tuple[str, ...]]:
    """Of each of gloo's threads: number, state, and how often it has gone to sleep; nothing where there is no /proc."""
    try:
        names = os.listdir("/proc/self/task")
    except OSError:
        return
    for name in names:
        try:
            lines = Path("/proc/self/task", name, "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status.get("Name") == _GLOO_WORKER:
            yield name, status["State"][:1], status.get("voluntary_ctxt_switches", "")
