"""Bringing snapshots to many hosts: one conversation with each, side by side, contents passed on from host to host."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from orc.launchers.errors import BackendError, BundleError, LaunchError
from orc.launchers.snapshot.manifest import SYMLINK, Bundle, Entry
from orc.launchers.strict_modes import VARIABLE
from orc.launchers.transfer.exchange import Exchange, Interrupted, Peer
from orc.launchers.transfer.program import ANSWER_S, PRESENCE, Conversation
from orc.launchers.transfer.wire import Content, Message, WireError, compressible, deflate, inflate, send_contents

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.snapshot.content_store import ContentStore

_CONNECTING = 32  # hosts at once
Progress = Callable[[str, int, int], None]  # host, bytes there, bytes it lacked


@dataclass(frozen=True)
class SyncReport:
    """What became of one host."""

    host: str
    error: LaunchError | None = None
    new: tuple[str, ...] = ()  # digests of snapshots that were not there
    contents: int = 0  # that were not there
    size: int = 0  # bytes of these
    sent: int = 0  # bytes that went over the laptop's line to this host
    source: str = ""  # "laptop", "peer NAME", "shared with NAME"; empty when nothing was missing
    seconds: float = 0.0
    missing: frozenset[str] = field(default=frozenset(), repr=False)  # hashes; of a look only

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "host": self.host,
            "error": str(self.error) if self.error else None,
            "new": list(self.new),
            "contents": self.contents,
            "bytes": self.size,
            "sent": self.sent,
            "source": self.source,
            "seconds": round(self.seconds, 3),
        }


def sync(
    bundles: Iterable[Bundle],
    store: ContentStore,
    targets: Mapping[str, tuple[Transport, str]],
    *,
    fan_out: bool = True,
    shared: bool | Literal["auto"] = "auto",
    pythons: Mapping[str, str] | None = None,
    look: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, SyncReport]:
    """Bring *bundles*, which are in *store*, to the stores below the cluster roots of all *targets*.

    A target is a transport and the root there; *pythons* are the interpreters of the hosts, ``python3`` by default.
    A host that fails does not keep the others from theirs: its report has the `error`. With *fan_out*, hosts pass
    contents on to each other, and those that cannot be reached by their peers get them from here. *shared* says
    whether the hosts see one file system; ``auto`` finds out. With *look* nothing is written anywhere.
    """
    wanted = tuple({bundle.digest: bundle for bundle in bundles}.values())
    if not wanted or not targets:
        return {name: SyncReport(name) for name in targets}
    if shared is True and not look:
        return _shared(wanted, store, targets, pythons or {}, on_progress)
    delivery = _Delivery(wanted, store, Exchange(targets, fan_out and not look), shared == "auto", look, on_progress)
    hosts = [_Host(delivery, name, *target, (pythons or {}).get(name, "python3")) for name, target in targets.items()]
    if len(hosts) == 1:
        return {hosts[0].name: hosts[0].run()}
    # A thread for each: those who have theirs wait, and serve, for those who have not.
    with ThreadPoolExecutor(len(hosts), "orc-sync") as pool:
        try:
            return {report.host: report for report in pool.map(_Host.run, hosts)}
        except BaseException:
            delivery.exchange.interrupt()
            for host in hosts:
                host.abort()
            raise


def raise_first(reports: Mapping[str, SyncReport]) -> None:
    """Raise the `LaunchError` of the first host that has one, with the names of the others that failed."""
    failed = [report for report in reports.values() if report.error is not None]
    if not failed:
        return
    error = failed[0].error
    assert error is not None
    others = f" (and on {', '.join(report.host for report in failed[1:])})" if len(failed) > 1 else ""
    raise type(error)(f"{error.what}{others}", where=error.where or failed[0].host, hint=error.hint).of(error.host)


def _shared(
    bundles: Sequence[Bundle],
    store: ContentStore,
    targets: Mapping[str, tuple[Transport, str]],
    pythons: Mapping[str, str],
    on_progress: Progress | None,
) -> dict[str, SyncReport]:
    """The first host that answers does it for all."""
    reports: dict[str, SyncReport] = {}
    done = ""
    for name, target in targets.items():
        if done:
            reports[name] = SyncReport(name, source=f"shared with {done}")
            continue
        found = sync(
            bundles, store, {name: target}, fan_out=False, shared=False, pythons=pythons, on_progress=on_progress
        )
        reports |= found
        if found[name].error is None:
            done = name
    return reports


class _Unreadable(BundleError):
    """The snapshot itself, here, is damaged."""


class _Delivery:
    """What the threads of all hosts share."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        store: ContentStore,
        exchange: Exchange,
        detect: bool,
        look: bool,
        on_progress: Progress | None,
    ) -> None:
        self.bundles = {bundle.digest: bundle for bundle in bundles}
        self.store = store
        self.exchange = exchange
        self.detect = detect
        self.look = look
        self._on_progress = on_progress
        self.connecting = threading.BoundedSemaphore(_CONNECTING)
        self._lock = threading.Lock()
        self._manifests: dict[tuple[str, ...], bytes] = {}
        self._contents: dict[str, Content] = {}

    def manifests(self, digests: Sequence[str]) -> bytes:
        """The manifests of *digests* as they are sent; most hosts want the same."""
        key = tuple(digests)
        with self._lock:
            if key not in self._manifests:
                text = json.dumps([self.bundles[digest].to_dict() for digest in digests], separators=(",", ":"))
                self._manifests[key] = deflate(text.encode())
            return self._manifests[key]

    def entries(self) -> dict[str, Entry]:
        """An entry for each content."""
        return {e.sha256: e for bundle in self.bundles.values() for e in bundle.entries if e.mode != SYMLINK}

    def contents(self, hashes: Iterable[str]) -> list[Content]:
        """Where to read them."""
        with self._lock:
            if not self._contents:
                for bundle in self.bundles.values():
                    sources = self.store.sources(bundle)
                    for entry in bundle.entries:
                        if entry.mode != SYMLINK:
                            self._contents[entry.sha256] = Content(entry.sha256, entry.size, sources[entry.path])
            return [self._contents[sha256] for sha256 in hashes]

    def progress(self, host: str, done: int, total: int) -> None:
        """Pass progress on, from one thread at a time."""
        if self._on_progress is not None:
            with self._lock:
                self._on_progress(host, done, total)

    def damage(self) -> BundleError:
        """Why a content did not arrive as it should be: because it is damaged here."""
        for digest in self.bundles:
            for finding in self.store.verify(digest):
                return _Unreadable(finding.what, where=finding.where, hint=finding.hint)
        return BundleError("contents are damaged on the way", hint="Try again.")


class _Host:
    """One host's part."""

    def __init__(self, delivery: _Delivery, name: str, transport: Transport, root: str, python: str) -> None:
        self.name = name
        self._delivery = delivery
        self._transport, self._root, self._python = transport, root, python
        self._talk: Conversation | None = None
        self._report = SyncReport(name)

    def run(self) -> SyncReport:
        """All of it. Errors are in the report."""
        began = time.monotonic()
        try:
            with self._delivery.connecting:
                if not self._delivery.look and self._has_all():
                    return replace(self._report, seconds=time.monotonic() - began)
                talk = self._talk = Conversation(self._transport, self.name, python=self._python)
            with talk:
                try:
                    self._converse(talk)
                finally:
                    self._report = replace(self._report, sent=self._report.sent + talk.channel.sent)
        except Interrupted:
            self._report = replace(self._report, error=BackendError("interrupted", where=self.name))
        except _Unreadable as error:  # here, which is no host's fault
            self._report = replace(self._report, error=error)
        except LaunchError as error:
            named = self.name in error.where or self.name in error.what
            where = error.where if named else ": ".join(filter(None, (self.name, error.where)))
            known = error if named else type(error)(error.what, where=where, hint=error.hint)
            self._report = replace(self._report, error=known.of(self.name))
        finally:
            self._delivery.exchange.settle(self.name)
        return replace(self._report, seconds=time.monotonic() - began)

    def abort(self) -> None:
        """End the conversation from another thread."""
        if self._talk is not None:
            with suppress(LaunchError):
                self._talk.hang_up()

    def _has_all(self) -> bool:
        """Whether nothing is to be done: most of the time, and that question costs a host far less than the rest."""
        trusted = os.environ.get(VARIABLE, "")
        asked = json.dumps({"root": self._root, "digests": list(self._delivery.bundles), "trusted": trusted}).encode()
        self._report = replace(self._report, sent=len(asked))
        done = self._transport.run_program(PRESENCE, python=self._python, timeout_s=ANSWER_S, stdin=asked)
        try:
            answer = json.loads(done.stdout.strip().rpartition("\n")[2])
            return bool(answer["clean"]) and set(answer["have"]) == set(self._delivery.bundles)
        except ValueError:
            return False  # the rest can say what is wrong

    def _converse(self, talk: Conversation) -> None:
        delivery, exchange = self._delivery, self._delivery.exchange
        idle = lambda: talk.tell("wait")  # noqa: E731
        lacking, identity = self._hello(talk)
        leader = ""
        while lacking and delivery.detect and identity:
            found = exchange.lead(self.name, identity, idle)
            if found is None:
                break
            leader = found
            lacking, identity = self._hello(talk)
        if not lacking:
            if leader:
                self._report = replace(self._report, source=f"shared with {leader}")
            talk.tell("bye")
            return
        secret = secrets.token_hex(16) if exchange.wanted(self.name) else ""
        answer = talk.ask("manifests", delivery.manifests(lacking), look=delivery.look, serve=secret)
        missing = _hashes(answer)
        size = int(answer.head["size"])
        self._report = replace(self._report, new=tuple(lacking), contents=len(missing), size=size)
        if delivery.look:
            self._report = replace(self._report, missing=frozenset(missing))
            talk.tell("bye")
            return
        if missing:
            serving = None
            if "port" in answer.head:
                serving = Peer(self.name, tuple(answer.head["addresses"]), int(answer.head["port"]), secret)
            self._obtain(talk, missing, size, serving, idle)
        with suppress(LaunchError):
            talk.tell("bye")

    def _hello(self, talk: Conversation) -> tuple[list[str], str]:
        """Digests that are not there, and the identity of the store."""
        digests = list(self._delivery.bundles)
        trusted = os.environ.get(VARIABLE, "")
        answer = talk.ask("hello", root=self._root, digests=digests, look=self._delivery.look, trusted=trusted)
        have = set(answer.head["have"])
        return [digest for digest in digests if digest not in have], str(answer.head["identity"])

    def _obtain(
        self, talk: Conversation, missing: list[str], size: int, serving: Peer | None, idle: Callable[[], None]
    ) -> None:
        """Get what is missing from a peer or from here; others get it from this host while it still comes."""
        exchange = self._delivery.exchange
        source = exchange.source(self.name, True, idle)
        try:
            if serving is not None:
                exchange.offer(serving)
            if source is not None:
                missing = self._from_peer(talk, source, missing)
                if missing:
                    exchange.source(self.name, False, idle)
            if missing:
                try:
                    self._from_here(talk, missing, size)
                finally:
                    exchange.release(None)
            exchange.settle(self.name)
            if serving is not None:
                with suppress(LaunchError):  # the host has its own by now; others go elsewhere
                    exchange.until_all_settled(idle)
        finally:
            if serving is not None:
                exchange.withdraw(serving)

    def _from_peer(self, talk: Conversation, peer: Peer, missing: list[str]) -> list[str]:
        """What is still missing afterwards."""
        exchange = self._delivery.exchange
        label, token = peer.ticket()
        failed = True
        try:
            answer = talk.ask("fetch", addresses=peer.addresses, port=peer.port, label=label, token=token)
            failed = bool(answer.head["problem"])
        finally:
            exchange.release(peer, failed)
        left = _hashes(answer)
        if len(left) < len(missing):
            self._report = replace(self._report, source=f"peer {peer.host}")
            self._delivery.progress(self.name, self._report.size, self._report.size)
        return left

    def _from_here(self, talk: Conversation, missing: list[str], size: int) -> None:
        contents = self._delivery.contents(missing)
        done = 0

        def sent(count: int) -> None:
            nonlocal done
            done += count
            self._delivery.progress(self.name, min(done, size), size)

        try:
            compress = compressible(contents)
            talk.tell("contents", compressed=compress)
            send_contents(talk.channel, contents, compress, sent)
        except OSError as error:
            raise _Unreadable(
                f"cannot read the snapshot: {error.strerror}", where=str(self._delivery.store.root), hint="Try again."
            ) from None
        except WireError as error:
            raise _Unreadable(str(error), where=str(self._delivery.store.root), hint="Try again.") from None
        except BackendError as error:
            raise talk.why(error) from None
        self._report = replace(self._report, source="laptop")
        if _hashes(talk.answer()):
            raise self._delivery.damage()


def _hashes(answer: Message) -> list[str]:
    return [str(sha256) for sha256 in json.loads(inflate(answer.body))]
