"""Snapshot stores of a cluster: one for each host, or one that its nodes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from orc.launchers.errors import BackendError, BundleError, LaunchError
from orc.launchers.paths import Layout
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import LocalTransport, Transport
from orc.launchers.snapshot.content_store import ContentStore

if TYPE_CHECKING:
    from orc.launchers.snapshot.gc import GcReport, GcRequest
    from orc.launchers.snapshot.manifest import Bundle


COLLECT_S = 3600.0  # for a large store on a slow file system; a host that is gone is noticed sooner
COLLECTOR = Program(
    "snapshot.gc",
    (
        *("errors", "snapshot.hashing", "snapshot.manifest", "snapshot.presence", "snapshot.tree_store"),
        *("strict_modes", "orc.runtime.core.names"),
    ),
)


@dataclass(frozen=True)
class Targets:
    """Snapshot stores of one cluster, and the ways there. `Backend.stores` makes them."""

    roots: Mapping[str, tuple[Transport, str]]  # by host
    pythons: Mapping[str, str]
    shared: bool | Literal["auto"] = False


def deliver(bundles: Sequence[Bundle], store: ContentStore, targets: Targets) -> None:
    """Bring *bundles*, which are in *store*, to all *targets*; on this machine by links where that can be.

    Raises the `LaunchError` of the first host that could not be served; the others are, nevertheless.
    """
    remote: dict[str, tuple[Transport, str]] = {}
    for name, (transport, root) in targets.roots.items():
        if type(transport) is not LocalTransport:  # a kind of its own may have other files
            remote[name] = (transport, root)
            continue
        there = ContentStore(Layout.at(transport.expand(root)).store.as_posix())
        for bundle in bundles:
            if not there.use(bundle.digest):
                store.copy_to(there, bundle.digest)
    if remote:
        from orc.launchers.transfer.delivery import raise_first, sync

        raise_first(sync(bundles, store, remote, shared=targets.shared, pythons=targets.pythons))


def collect_garbage(targets: Targets, request: GcRequest) -> dict[str, GcReport | LaunchError]:
    """Collect the garbage of all targets, side by side; the root in *request* is replaced by that of each.

    Returns:
        The report, or the error, of each host by its name.
    """
    from orc.launchers.remote.ssh.fanout import each

    return each(
        {name: name for name in targets.roots},
        lambda name: _collect_on(targets, name, replace(request, root=targets.roots[name][1])),
    )


def _collect_on(targets: Targets, host: str, request: GcRequest) -> GcReport:
    from orc.launchers.snapshot import gc

    transport = targets.roots[host][0]
    if isinstance(transport, LocalTransport):
        try:
            return gc.collect(request)
        except OSError as error:
            what = f"cannot collect: {error.strerror or error}"
            raise BundleError(what, where=error.filename or request.root) from None
    python = targets.pythons.get(host, "python3")
    answer, done = transport.ask_program(COLLECTOR, request.to_dict(), python=python, timeout_s=COLLECT_S)
    try:
        if failure := (answer or {}).get("error"):
            where = f"{host}: {failure['where']}"
            raise BundleError(str(failure["what"]), where=where, hint=str(failure["hint"]))
        return gc.GcReport.from_dict((answer or {})["report"])
    except (ValueError, KeyError, TypeError, AttributeError):
        last = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.status}"
        raise BackendError(f"the collection failed: {last.removeprefix('orc: ')}", where=host) from None
