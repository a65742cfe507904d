"""Snapshots of jobs that are submitted to a service: the upload of what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import SYMLINK
from orc.launchers.transfer.wire import FIRST, LAST, Content, head_of, stream_of
from orc.orchestrator.api.access import find_missing
from orc.orchestrator.api.call import Digests, SnapshotMissing
from orc.orchestrator.clients.http_session import put_contents, put_tree

if TYPE_CHECKING:
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.manifest import Bundle, Entry
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.clients.http_session import HttpSession, Request
    from orc.orchestrator.engine.steps import Progress

Answer = TypeVar("Answer")
_UPLOADS = 3  # what was uploaded may be collected before it is used


def send_with(session: HttpSession, request: Request[Answer], snapshots: Sequence[LocalSnapshot]) -> Answer:
    """Send *request*, after an upload of the trees of *snapshots* that the service turns out to lack, each once."""
    snapshots[0].progress("submit", {})
    for _ in range(_UPLOADS):
        try:
            return session.ask(request)
        except SnapshotMissing as missing:
            left = set(missing.digests)
            for snapshot in snapshots:
                _upload(session, snapshot, sorted(left))
                left -= set(snapshot.digests.given().values())
    return session.ask(request)


def _upload(session: HttpSession, snapshot: LocalSnapshot, digests: Sequence[str]) -> None:
    for bundle in snapshot.bundles(digests):
        wanted = list(snapshot.contents(bundle))
        for _ in range(_UPLOADS):
            lacking = find_missing(session, wanted)
            for content, size in snapshot.uploads(bundle, lacking.missing, lacking.limit):
                session.ask(put_contents(content, size))
            wanted = session.ask(put_tree(bundle.digest, bundle.to_dict()))
            if not wanted:
                break


class ServiceCluster:
    """Cluster of a service, of which nothing but the name is known here: it is elsewhere."""

    is_remote = True
    root = ""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def cluster(self) -> Cluster:
        """A cluster without settings: those that count are the service's."""
        from orc.launchers.spec.clusters import Cluster

        return Cluster(name=self._name, kind="service")


class LocalSnapshot:
    """Trees of a job in the local store, and what of them has to be sent."""

    def __init__(self, loaded: LoadedJob, progress: Progress) -> None:
        from orc.launchers.paths import state_dir
        from orc.launchers.snapshot.content_store import ContentStore
        from orc.orchestrator.engine import job_source
        from orc.orchestrator.workspace import store_path

        self.progress, destination = progress, ServiceCluster(loaded.spec.cluster)
        self._store: ContentStore = ContentStore(store_path(state_dir()))
        self.code = job_source.take_code(self._store, loaded, progress, destination)
        environment = job_source.take_environment(self._store, loaded, destination, progress)
        self._trees = [self.code, *([environment] if environment else [])]
        self.digests = Digests(self.code.digest, environment.digest if environment else None)

    def bundles(self, digests: Sequence[str]) -> list[Bundle]:
        """Return the manifests of those trees."""
        return [bundle for bundle in self._trees if bundle.digest in digests]

    def contents(self, bundle: Bundle) -> dict[str, Entry]:
        """Return the contents of a tree by hash."""
        return {entry.sha256: entry for entry in bundle.entries if entry.mode != SYMLINK}

    def uploads(
        self, bundle: Bundle, hashes: Sequence[str], limit: int
    ) -> Iterator[tuple[Callable[[], Iterator[bytes]], int]]:
        """Yield the streams that bring the contents *hashes* of a tree, each with its size."""
        known, sources = self.contents(bundle), self._store.sources(bundle)
        wanted = [known[one] for one in hashes if one in known]
        total = sum(entry.size for entry in wanted)
        done = 0
        for entries, size in batches(wanted, limit):
            yield partial(_stream, [Content(entry.sha256, entry.size, sources[entry.path]) for entry in entries]), size
            done += sum(entry.size for entry in entries)
            self.progress("upload", {"done": done, "bytes": total})


def batches(entries: Iterable[Entry], limit: int) -> Iterator[tuple[list[Entry], int]]:
    """Yield contents that travel together, in streams of *limit* bytes at most, each with its size.

    Raises `BundleError` for a content that fits in none.
    """
    frame = len(FIRST) + len(LAST)
    chosen: list[Entry] = []
    size = frame
    for entry in entries:
        cost = len(head_of(entry)) + entry.size
        if frame + cost > limit:
            what = f"a file of {entry.size} bytes is more than the service takes in one upload ({limit} bytes)"
            hint = "exclude it in .orcignore or workdir.exclude and bring it to the cluster in another way"
            raise BundleError(what, where=entry.path, hint=hint)
        if size + cost > limit:
            yield chosen, size
            chosen, size = [], frame
        chosen.append(entry)
        size += cost
    if chosen:
        yield chosen, size


def _stream(contents: Sequence[Content]) -> Iterator[bytes]:
    try:
        yield from stream_of(contents)
    except OSError as error:
        what = f"cannot read the snapshot: {error.strerror or error}"
        raise BundleError(what, where=str(error.filename), hint="submit again") from None
