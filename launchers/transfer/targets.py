"""Snapshot stores of a cluster: one for each host, or one that its nodes share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orc.launchers.errors import BundleError, LaunchError
from orc.launchers.layout import Layout
from orc.launchers.remote.transport import LocalTransport, Transport
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.gc import Collected, Request, collect

if TYPE_CHECKING:
    from orc.launchers.snapshot.manifest import Bundle


@dataclass(frozen=True)
class Targets:
    """Snapshot stores of one cluster, and the ways there. `Backend.stores` makes them."""

    roots: Mapping[str, tuple[Transport, str]]  # by host
    pythons: Mapping[str, str]
    fan_out: bool = False
    shared: bool | Literal["auto"] = False


def deliver(bundles: Sequence[Bundle], store: ContentStore, targets: Targets) -> None:
    """Bring *bundles*, which are in *store*, to all *targets*; on this machine by links where that can be.

    Raises the `LaunchError` of the first host that could not be served; the others are, nevertheless.
    """
    remote: dict[str, tuple[Transport, str]] = {}
    for name, (transport, root) in targets.roots.items():
        if not isinstance(transport, LocalTransport):
            remote[name] = (transport, root)
            continue
        there = ContentStore(Layout.at(transport.expand(root)).store.as_posix())
        for bundle in bundles:
            if not there.use(bundle.digest):
                store.copy_to(there, bundle.digest)
    if remote:
        from orc.launchers.transfer import raise_first, sync

        options: dict[str, Any] = {"fan_out": targets.fan_out, "shared": targets.shared, "pythons": targets.pythons}
        raise_first(sync(bundles, store, remote, **options))


def collect_garbage(targets: Targets, asked: Request) -> dict[str, Collected | LaunchError]:
    """Collect on all hosts, side by side. *asked* is for each root there."""
    from orc.launchers.remote.ssh.fanout import each

    return each({name: name for name in targets.roots}, lambda name: _collect_on(targets, name, asked))


def _collect_on(targets: Targets, host: str, asked: Request) -> Collected:
    from dataclasses import replace

    from orc.launchers.transfer.program import Conversation
    from orc.launchers.transfer.wire import inflate

    transport, root = targets.roots[host]
    asked = replace(asked, root=root)
    if isinstance(transport, LocalTransport):
        try:
            return collect(asked)
        except OSError as error:
            raise BundleError(f"cannot collect: {error.strerror or error}", where=error.filename or root) from None
    with Conversation(transport, host, python=targets.pythons.get(host, "python3"), collecting=True) as talk:
        answer = talk.ask("collect", **asked.to_dict())
        talk.tell("bye")
        return Collected.from_dict(json.loads(inflate(answer.body)))
