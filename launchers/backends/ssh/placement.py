"""Choice of the hosts of a job. Pure: the same job and the same free slots always give the same hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Placement
from orc.launchers.backends.ssh.hostfile import Host
from orc.launchers.backends.ssh.settings import JobOptions, Settings, read_job_options
from orc.launchers.errors import NoRoom, RenderError

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec


def slots_of(job: JobSpec, options: JobOptions) -> int:
    """Return the slots that *job* takes on each of its hosts: one for each GPU, or for each process without GPUs."""
    return options.slots or job.resources.gpus_per_node or job.resources.nproc


def candidates(job: JobSpec, settings: Settings) -> tuple[str, ...]:
    """Return every host that *job* could run on, were nothing else there, in order of preference."""
    options = read_job_options(job, settings)
    return tuple(host.name for host in _fitting(options, slots_of(job, options), settings))


def place(job: JobSpec, settings: Settings, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
    """Choose hosts for *job* beside the slots that others hold: as many as are free, up to its maximum.

    Hosts are filled in the order of the cluster's list. Raises `NoRoom` when too few are free now, `RenderError`
    when there are too few at all.
    """
    options = read_job_options(job, settings)
    slots = slots_of(job, options)
    fewest, most = job.resources.min_nodes, job.resources.max_nodes
    fitting = _fitting(options, slots, settings)
    if len(fitting) < fewest:
        raise _never(job, options, slots, fitting, settings)
    good = [host for host in fitting if host.name not in avoid]
    usable = good if len(good) >= fewest else [*good, *(host for host in fitting if host.name in avoid)]
    free = [host for host in usable if _free(host, taken) >= slots]
    if len(free) < fewest:
        busy = [host.name for host in usable if host not in free]
        wanted = f"{fewest} host{'s' if fewest > 1 else ''}" + (f" with {slots} free slots each" if slots > 1 else "")
        raise NoRoom(f"waiting for {wanted}; {len(free)} free, taken: {', '.join(busy)}", where=job.name)
    return Placement(tuple(host.name for host in free[:most]), slots)


def capacity(host: Host, slots: int) -> int:
    """Return all the slots of *host*, as the agents of a job that takes *slots* there count them."""
    return host.slots or slots


def _free(host: Host, taken: Mapping[str, int]) -> float:
    held = taken.get(host.name, 0)
    if not host.slots:  # one job at a time, however large
        return 0 if held else float("inf")
    return host.slots - held


def _fitting(options: JobOptions, slots: int, settings: Settings) -> list[Host]:
    hosts: Sequence[Host] = [settings.host(name) for name in dict.fromkeys(options.hosts)] or settings.hosts
    return [
        host
        for host in hosts
        if host.name not in options.exclude
        and set(options.labels) <= set(host.labels)
        and (not host.slots or host.slots >= slots)
    ]


def _never(job: JobSpec, options: JobOptions, slots: int, fitting: Sequence[Host], settings: Settings) -> RenderError:
    nodes, total, left = job.resources.min_nodes, len(settings.hosts), len(fitting)
    asked = [f"the label {label}" for label in options.labels]
    if any(host.slots and host.slots < slots for host in settings.hosts):
        asked.append(f"{slots} slots")
    wanted = f"{nodes} host{'s' if nodes > 1 else ''}" + (f" with {' and '.join(asked)}" if asked else "")
    if asked or options.hosts or options.exclude:
        what = ("are left" if left > 1 else "is left") if not asked else "are such" if left > 1 else "is one"
        has = f"{left or 'none'} of the cluster's {total} hosts {what}"
    else:
        has = f"the cluster has {total}"
    return RenderError(
        f"the job needs {wanted}, and {has}",
        where=job.name,
        hint="Lower resources.nodes or resources.procs_per_node, or add hosts (or slots) to the cluster.",
    )
