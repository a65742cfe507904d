"""Snapshot of a job that goes to a service: taken into the local store, sent from there as far as it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import SYMLINK
from orc.launchers.transfer.wire import FIRST, LAST, Content, head_of, stream_of

if TYPE_CHECKING:
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.manifest import Bundle, Entry
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.engine.progress import Progress


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
        from orc.orchestrator.engine import snapshots
        from orc.orchestrator.workspace import store_path

        store: ContentStore = ContentStore(store_path(state_dir()))
        self._progress = progress
        destination = ServiceCluster(loaded.spec.cluster)
        code = snapshots.take_code(store, loaded, progress, destination)
        environment = snapshots.take_environment(store, loaded, destination, progress)
        self._trees: dict[str, Bundle] = {"code": code}
        if environment is not None:
            self._trees["environment"] = environment
        self._store = store
        self._sent = 0

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the trees by what they are."""
        return {name: bundle.digest for name, bundle in self._trees.items()}

    def check(self, job: JobSpec) -> None:
        """Raise `SpecError` where the code has not what *job* runs."""
        from orc.orchestrator.engine.snapshots import check_script

        check_script(job, self._trees["code"])

    def bundles(self, digests: Sequence[str]) -> list[Bundle]:
        """Return the manifests of those trees."""
        return [bundle for bundle in self._trees.values() if bundle.digest in digests]

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
            self._progress("upload", {"done": done, "bytes": total})


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
            raise BundleError(
                f"a file of {entry.size} bytes is more than the service takes in one upload ({limit} bytes)",
                where=entry.path,
                hint="exclude it in .orcignore or workdir.exclude and bring it to the cluster in another way",
            )
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
