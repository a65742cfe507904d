"""How cost grows with nodes and ranks, by simulation: object stores, sharded saves, agreement, agents, fan-out.

    python tests/benchmarks/scale_nodes.py [row ...]

Each function measures one row at several sizes. Requests, rounds and bytes are counted; seconds of processor time
stand beside wall time, which other programs of the machine disturb.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from harness import Row, report

ROUND_TRIP_S = float(os.environ.get("ROUND_TRIP_S", "0.02"))


class CountingStore:
    """S3 as moto plays it, in which every request is counted and takes a round trip."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.requests: Counter[str] = Counter()
        client.meta.events.register("before-send.s3", self._count)

    def _count(self, request: Any, event_name: str, **_: Any) -> None:
        self.requests[event_name.rpartition(".")[2]] += 1
        time.sleep(ROUND_TRIP_S)

    def fill(self, objects: dict[str, bytes]) -> None:
        """Put *objects* into the bucket, without a request."""
        from moto.s3.models import s3_backends

        backend = next(iter(s3_backends.values()))["aws"]
        for key, content in objects.items():
            backend.put_object("bucket", key, content)


@contextmanager
def counting_store() -> Iterator[CountingStore]:
    """A bucket called bucket."""
    from moto.server import ThreadedMotoServer

    from orc.runtime.checkpoint.storage import s3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    os.environ["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
    s3._client.cache_clear()
    try:
        client = s3._client(os.getpid())
        client.create_bucket(Bucket="bucket")
        yield CountingStore(client)
    finally:
        s3._client.cache_clear()
        server.stop()


def object_store(sizes: tuple[int, ...] = (150, 500, 1500), checkpoints: int = 5) -> list[Row]:
    """Commit of a checkpoint of so many files, and retention of the newest of *checkpoints* + 1."""
    from orc.runtime.checkpoint.format.manifest import NAME, Manifest
    from orc.runtime.checkpoint.storage.destination import RemoteDestination
    from orc.runtime.checkpoint.storage.durable import FileRecord
    from orc.runtime.checkpoint.storage.remote import Remote, RemoteRoot

    rows = []
    for files in sizes:
        with counting_store() as store:
            names = [f"pytorch_model_0/__{rank}_0.distcp" for rank in range(files)]
            manifest = Manifest("1", 0, 0, 0, files, 0.0, {name: FileRecord(1, (0,)) for name in names})
            for number in range(checkpoints):
                store.fill({f"run/checkpoint_{number}/{name}": b"x" for name in names})
                store.fill({f"run/checkpoint_{number}/{NAME}": manifest.to_json()})
            root = RemoteRoot(Remote("s3://bucket/run"))
            target = root.numbered(checkpoints)
            store.fill({f"run/checkpoint_{checkpoints}/{name}": b"x" for name in names})
            destination = RemoteDestination(target, "", True)
            for what, action, limit in (
                ("commit", partial(destination.commit, manifest), 3),
                ("retention", partial(root.retain, 1), 10 * (checkpoints + 1)),
            ):
                store.requests.clear()
                began = time.perf_counter()
                action()
                wall = time.perf_counter() - began
                count = sum(store.requests.values())
                name = f"{what} of {files} files × {1 if what == 'commit' else checkpoints}"
                print(f"{name}: {wall:.2f} s, {dict(store.requests)}", file=sys.stderr)
                rows.append(Row(f"object store: {name}", "", count, None, "requests", None, limit, "ours"))
                rows.append(Row(f"object store: {name}", "", wall, None, "s", None, None))
    return rows


ROWS = (object_store,)


def main(names: list[str]) -> None:
    """Measure the rows called *names*, or all."""
    for measure in ROWS:
        if not names or measure.__name__ in names:
            report(measure())


if __name__ == "__main__":
    main(sys.argv[1:])
