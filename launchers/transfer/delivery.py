"""Delivery of snapshots to the stores of hosts: one conversation with each, side by side; what would be sent."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from orc.launchers.agent.messages import encode_message
from orc.launchers.errors import BackendError, BackendUnreachable, BundleError, LaunchError
from orc.launchers.remote.programs import Program
from orc.launchers.remote.ssh.fanout import each
from orc.launchers.remote.transport import CommandTimeout, Process, Transport
from orc.launchers.snapshot.manifest import SYMLINK, Bundle, Entry
from orc.launchers.strict_modes import VARIABLE
from orc.launchers.transfer.wire import (
    CHUNK,
    ByteSource,
    Content,
    WireError,
    is_compressible,
    pack_manifests,
    read_message,
    send_contents,
    skip_greeting,
)

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.snapshot.content_store import ContentStore

_KEPT_BYTES = 64 << 20  # of contents; so many are packed once for all hosts
Progress = Callable[[str, int, int], None]  # host, bytes there, bytes it lacked


@dataclass(frozen=True)
class SyncReport:
    """Result of a delivery to one host."""

    host: str
    error: LaunchError | None = None
    new: tuple[str, ...] = ()  # digests of snapshots that were not there
    contents: int = 0  # that were not there
    size: int = 0  # bytes of these
    sent: int = 0  # bytes that went over the laptop's line to this host
    source: str = ""  # "laptop", "shared", "shared with NAME"; empty when nothing was missing
    seconds: float = 0.0
    missing: frozenset[str] = field(default=frozenset(), repr=False)  # hashes; of a dry run only

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
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
    shared: bool | Literal["auto"] = "auto",
    pythons: Mapping[str, str] | None = None,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, SyncReport]:
    """Bring snapshots to the stores below the cluster roots of all targets.

    A host that fails does not keep the others from theirs: its report has the `error`. Hosts that see one file system
    follow one another, and what the first has brought is not sent again.

    Args:
        bundles: Snapshots that are in *store*.
        store: The store on this machine.
        targets: Transport and cluster root of each host, by its name.
        shared: True where all hosts see one file system: then the first that answers is served for all.
        pythons: Interpreters of the hosts, by their names; ``python3`` by default.
        dry_run: Find out what is missing; nothing is written anywhere.
        on_progress: Called with a host's name, the bytes that it has got and the bytes that it lacked.

    Returns:
        A report for each host, by its name.
    """
    delivery = _Delivery(bundles, store, pythons or {}, dry_run, on_progress)
    if not delivery.bundles or not targets:
        return {name: SyncReport(name) for name in targets}
    if shared is True and not dry_run:
        return delivery.to_first(targets)
    try:
        reports = each({name: (name, *target) for name, target in targets.items()}, lambda host: delivery.to(*host))
    except BaseException:
        delivery.abort()
        raise
    return {
        name: report if isinstance(report, SyncReport) else SyncReport(name, error=report)
        for name, report in reports.items()
    }


def raise_first(reports: Mapping[str, SyncReport]) -> None:
    """Raise the `LaunchError` of the first host that has one, with the names of the others that failed."""
    failed = [report for report in reports.values() if report.error is not None]
    if not failed:
        return
    error = failed[0].error
    assert error is not None
    others = f" (and on {', '.join(report.host for report in failed[1:])})" if len(failed) > 1 else ""
    raise type(error)(f"{error.what}{others}", where=error.where or failed[0].host, hint=error.hint).of(error.host)


class _UnreadableSnapshot(BundleError):
    """The snapshot on this machine is damaged, which is no host's fault."""


class _Delivery:
    """A call of `sync`."""

    def __init__(
        self,
        bundles: Iterable[Bundle],
        store: ContentStore,
        pythons: Mapping[str, str],
        dry_run: bool,
        on_progress: Progress | None,
    ) -> None:
        self.bundles = {bundle.digest: bundle for bundle in bundles}
        self._store = store
        self._pythons = pythons
        self._dry_run = dry_run
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._packing = threading.Lock()
        self._sessions: list[ReceiverSession] = []
        self._manifests: dict[tuple[str, ...], str] = {}
        self._contents: dict[str, Content] = {}
        self._archives: dict[tuple[str, ...], list[tuple[bytes, int]]] = {}

    def to_first(self, targets: Mapping[str, tuple[Transport, str]]) -> dict[str, SyncReport]:
        """Deliver to the first host that answers, for all of them."""
        reports: dict[str, SyncReport] = {}
        served = ""
        for name, target in targets.items():
            reports[name] = SyncReport(name, source=f"shared with {served}") if served else self.to(name, *target)
            if not served and reports[name].error is None:
                served = name
        return reports

    def to(self, host: str, transport: Transport, root: str) -> SyncReport:
        """Deliver to one host. Errors are in the report."""
        began = time.monotonic()
        report = SyncReport(host)
        try:
            report = self._deliver(report, transport, root)
        except _UnreadableSnapshot as error:
            report = replace(report, error=error)
        except LaunchError as error:
            named = host in error.where or host in error.what
            where = error.where if named else ": ".join(filter(None, (host, error.where)))
            known = error if named else type(error)(error.what, where=where, hint=error.hint)
            report = replace(report, error=known.of(host))
        return replace(report, seconds=time.monotonic() - began)

    def abort(self) -> None:
        """Let the programs on all hosts end, from another thread."""
        for session in self._sessions:
            with suppress(LaunchError):
                session.close_input()

    def _deliver(self, report: SyncReport, transport: Transport, root: str) -> SyncReport:
        host, python = report.host, self._pythons.get(report.host, "python3")
        request = {"root": root, "trusted": os.environ.get(VARIABLE, ""), "dry_run": self._dry_run}
        question = {**request, "digests": list(self.bundles)}
        answer, _ = transport.ask_program(PRESENCE, question, python=python, timeout_s=ANSWER_S)
        try:
            have, clean = set((answer or {})["have"]), bool((answer or {})["clean"])
        except (KeyError, TypeError):
            have, clean = set(), False  # the receiver reports what is wrong
        report = replace(report, sent=len(json.dumps(question)))
        lacking = tuple(digest for digest in self.bundles if digest not in have)
        if not lacking and (clean or self._dry_run):
            return report
        with ReceiverSession(transport, host, python) as session:
            self._sessions.append(session)
            answer = session.request(**request, manifests=self._packed(lacking))
            missing = [str(sha256) for sha256 in answer["missing"]]
            report = replace(report, new=tuple(answer["new"]), contents=len(missing), size=int(answer["size"]))
            if self._dry_run:
                return replace(report, missing=frozenset(missing))
            if lacking:
                if missing:
                    self._send(session, missing, report.size)
                session.close_input()
                if session.answer()["missing"]:
                    raise self._damage()
            source = "laptop" if missing else "" if report.new or not lacking else "shared"
            return replace(report, source=source, sent=report.sent + session.sent)

    def _send(self, session: ReceiverSession, missing: Sequence[str], size: int) -> None:
        where, done = str(self._store.root), 0

        def sent(count: int) -> None:
            nonlocal done
            done += count
            if self._on_progress is not None:
                with self._lock:  # from one thread at a time
                    self._on_progress(session.host, min(done, size), size)

        try:
            contents = self._sources(missing, session.host)
            if size <= _KEPT_BYTES:
                for piece, count in self._archive(contents):
                    if piece:
                        session.write(piece)
                    sent(count)
            else:
                send_contents(contents, session.write, compress=is_compressible(contents), sent=sent)
        except OSError as error:
            what = f"cannot read the snapshot: {error.strerror or error}"
            raise _UnreadableSnapshot(what, where=where, hint="Try again.") from None

    def _packed(self, digests: tuple[str, ...]) -> str:
        """Return the manifests of *digests* as they are sent; most hosts want the same."""
        with self._lock:
            if digests not in self._manifests:
                self._manifests[digests] = pack_manifests([self.bundles[digest].to_dict() for digest in digests])
            return self._manifests[digests]

    def _archive(self, contents: Sequence[Content]) -> list[tuple[bytes, int]]:
        """Return the archive of *contents* in pieces, each with the bytes before compression; most hosts want one."""
        key = tuple(content.sha256 for content in contents)
        with self._packing:
            if key not in self._archives:
                pieces: list[tuple[bytes, int]] = []
                send_contents(
                    contents,
                    lambda piece: pieces.append((piece, 0)),
                    compress=is_compressible(contents),
                    sent=lambda count: pieces.append((b"", count)),
                )
                self._archives = {key: pieces}
            return self._archives[key]

    def _sources(self, hashes: Iterable[str], host: str) -> list[Content]:
        """Return the files that hold these contents. Raises `BackendError` for a hash that is in no manifest."""
        with self._lock:
            if not self._contents:
                for bundle in self.bundles.values():
                    sources = self._store.sources(bundle)
                    for entry in bundle.entries:
                        if entry.mode != SYMLINK:
                            self._contents[entry.sha256] = Content(entry.sha256, entry.size, sources[entry.path])
            try:
                return [self._contents[sha256] for sha256 in hashes]
            except KeyError as error:
                raise BackendError(f"it asks for {error}, which is in no snapshot", where=host) from None

    def _damage(self) -> BundleError:
        """Return the error for contents that did not arrive as they should be: mostly, they are damaged here."""
        for digest in self.bundles:
            for finding in self._store.verify(digest):
                return _UnreadableSnapshot(finding.what, where=finding.where, hint=finding.hint)
        return BundleError("contents are damaged on the way", hint="Try again.")


@dataclass(frozen=True)
class Comparison:
    """Differences of a snapshot from an earlier one. Entries are those of the newer, but for the removed ones."""

    new: tuple[Entry, ...]
    changed: tuple[Entry, ...]  # in content, mode or link target
    removed: tuple[Entry, ...]
    unchanged: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "new": [entry.path for entry in self.new],
            "changed": [entry.path for entry in self.changed],
            "removed": [entry.path for entry in self.removed],
            "unchanged": self.unchanged,
        }


def compare(old: Bundle | None, new: Bundle) -> Comparison:
    """Return the differences of *new* from *old*; without one everything is new."""
    before = old.by_path if old else {}
    added = tuple(entry for entry in new.entries if entry.path not in before)
    changed = tuple(entry for entry in new.entries if entry.path in before and entry != before[entry.path])
    removed = tuple(entry for path, entry in before.items() if path not in new)
    return Comparison(added, changed, removed, len(new.entries) - len(added) - len(changed))


def lacking(bundle: Bundle, missing: Collection[str]) -> list[Entry]:
    """Return the files of *bundle* whose contents are *missing* (hashes)."""
    return [entry for entry in bundle.entries if entry.mode != SYMLINK and entry.sha256 in missing]


ANSWER_S = 30.0  # of silence on a channel, after which the host is given up; working, it says so more often
PRESENCE = Program("snapshot.presence", ("strict_modes",))
RECEIVER = Program(
    "transfer.receiver",
    (
        *("agent.messages", "errors", "snapshot.hashing", "snapshot.manifest", "snapshot.presence"),
        *("snapshot.tree_store", "strict_modes", "transfer.wire", "orc.runtime.core.names"),
    ),
)


class ReceiverSession:
    """Conversation with the receiver on one host. Raises `LaunchError` that name the host."""

    def __init__(self, transport: Transport, host: str, python: str) -> None:
        self.host = host
        self.sent = 0  # bytes
        self._python = python
        self._silent = False  # it does not answer any more
        self._process: Process = transport.stream_program(RECEIVER, python=python, timeout_s=ANSWER_S)
        self._output = io.BufferedReader(ByteSource(self._process.read), CHUNK)
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, LaunchError) and not self._silent:
            with suppress(LaunchError):  # let it clean up before it is ended
                self.close_input()
                self._process.wait()
        self._process.__exit__(kind, error, trace)

    def close_input(self) -> None:
        """Let the program end by itself, which it does when it hears that nothing more comes. From any thread."""
        # Where another thread is writing at this moment, it is that one which fails.
        with suppress(OSError, ValueError):
            self._process.close_stdin()

    def request(self, **fields: Any) -> dict[str, Any]:
        """Send a message and return the answer. Raises `LaunchError`."""
        self.write(encode_message(fields))
        return self.answer()

    def write(self, data: bytes) -> None:
        """Send bytes. Raises the `LaunchError` that the host has reported, or that it cannot be written to."""
        self.sent += len(data)
        try:
            self._process.write(data)
        except CommandTimeout as error:
            raise self._explain(error) from None
        except BackendError as error:
            self.close_input()
            self.answer()  # what it has reported before it ended
            raise self._explain(error) from None

    def answer(self) -> dict[str, Any]:
        """Return the next message, signs of life left out. Raises `LaunchError`."""
        try:
            if not self._started:
                skip_greeting(self._output)
                self._started = True
            while "busy" in (message := read_message(self._output)):
                continue
        except (BackendError, WireError) as error:
            raise self._explain(error) from None
        if reported := message.get("error"):
            where = f"{self.host}: {reported['where']}"
            raise BundleError(str(reported["what"]), where=where, hint=str(reported["hint"]))
        return message

    def _explain(self, error: LaunchError | WireError) -> LaunchError:
        """Return the error that the program's end explains, otherwise that the transfer was cut off."""
        what = error.what if isinstance(error, LaunchError) else str(error)
        cut = BackendUnreachable(f"the sync was cut off: {what}", where=self.host, hint="Try again.")
        if isinstance(error, CommandTimeout):
            self._silent = True
            return cut
        try:
            self.close_input()
            ended = self._process.wait()
        except LaunchError:
            self._silent = True
            return cut
        last = ended.stderr.strip().rpartition("\n")[2]
        if ended.status == 127:  # a wrapper around an interpreter that is gone
            hint = "Set `python:` of the cluster or the host to a Python 3.9 or newer that is there."
            return BackendError(f"{self._python}: command not found", where=self.host, hint=hint)
        if ended.status > 0 and last and not last.startswith("orc: "):
            return BackendError(f"the sync failed: {last}", where=self.host)
        return BackendUnreachable(f"the sync was cut off: {last.removeprefix('orc: ') or what}", where=self.host)
