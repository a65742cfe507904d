"""How cost grows with nodes and ranks, by simulation: object stores, sharded saves, agreement, agents, fan-out.

    python tests/benchmarks/scale_nodes.py [row ...]

Each function measures one row at several sizes. Requests, rounds and bytes are counted; seconds of processor time
stand beside wall time, which other programs of the machine disturb.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from harness import Row, report

ROUND_TRIP_S = float(os.environ.get("ROUND_TRIP_S", "0.02"))


KEY = b"k" * 32  # of the board


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


class Rank:
    """What a meeting wants to know of its rank."""

    def __init__(self, rank: int, ranks: int, board: Any) -> None:
        self.rank, self.world_size, self.store, self.key = rank, ranks, board, KEY
        self.config = SimpleNamespace(timeout_s=300.0)


def _meet_as_others(ranks: int, port: int, times: int) -> None:
    """Hold *times* meetings as all ranks but rank 0, each in a thread with a connection of its own."""
    from orc.runtime.checkpoint.replication.barrier import Barrier
    from orc.runtime.collectives.store_server import RemoteStore

    def meet(rank: int) -> None:
        barrier = Barrier(Rank(rank, ranks, RemoteStore("127.0.0.1", port, KEY)))
        for _ in range(times):
            barrier.hold("agree", [None, rank], len)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def agreement(sizes: tuple[int, ...] = (32, 128, 512), times: int = 5) -> list[Row]:
    """A meeting of all ranks over the board: operations, and processor time on rank 0. The others are one process."""
    from orc.runtime.checkpoint.replication.barrier import Barrier
    from orc.runtime.collectives.store import LocalStore
    from orc.runtime.collectives.store_server import StoreServer

    rows = []
    for ranks in sizes:
        board = LocalStore()
        server = StoreServer(board, KEY, "127.0.0.1")
        asked: Counter[str] = Counter()
        answer = server._answer

        def counted(name: str, *rest: Any, answer: Any = answer, asked: Counter[str] = asked) -> Any:
            asked[name] += 1
            return answer(name, *rest)

        server._answer = counted  # type: ignore[method-assign]
        others = multiprocessing.get_context("fork").Process(
            target=_meet_as_others, args=(ranks, server.port, times + 1)
        )
        others.start()
        barrier = Barrier(Rank(0, ranks, board))
        barrier.hold("agree", [None, 0], len)  # connects
        asked.clear()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(times):
            barrier.hold("agree", [None, 0], len)
        wall, spent = time.perf_counter() - began, time.process_time() - spent
        others.join()
        server.close()
        name = f"agreement of {ranks} ranks"
        operations = sum(asked.values()) / times / (ranks - 1)
        each = spent / times / ranks * 1e6
        rows.append(Row(f"{name}: operations per rank", "", operations, None, "", None, 5, "ours"))
        rows.append(Row(f"{name}: processor time on rank 0, per rank", "", each, None, "µs", None, None))
        rows.append(Row(f"{name}: wall time", "", wall / times, None, "s", None, None))
    return rows


def _bid(rank: int, ranks: int, tensors: int) -> str:
    """What *rank* brings to the planning of a model whose tensors are all cut into as many parts as there are ranks."""
    from torch import Size, float32
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    from orc.runtime.checkpoint.state.planning import _encoded

    offset, whole, kind = Size([4 * rank, 0]), Size([4 * ranks, 64]), TensorProperties(dtype=float32)
    part = TensorWriteData(ChunkStorageMetadata(offset, Size([4, 64])), kind, whole)
    names = [f"layers.{number}.weight" for number in range(tensors)]
    items = [WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=part) for name in names]
    return json.dumps({"f": _encoded(SavePlan(items, planner_data={name: ("model", name) for name in names}))})


def sharded_plans(sizes: tuple[int, ...] = (32, 64, 128), tensors: int = 2000) -> list[Row]:
    """What rank 0 does for the plans of a sharded save and its metadata: at the first save, and at later ones.

    1,024 ranks take some gigabytes: ``sharded_plans((1024,))``.
    """
    from orc.runtime.checkpoint.state.planning import ShardPlans, _uncollected

    rows = []
    for ranks in sizes:
        plans = ShardPlans(cast(Any, None))
        brought = [_bid(rank, ranks, tensors) for rank in range(ranks)]
        written = [json.dumps({"f": [1100] * tensors})] * ranks
        began = time.process_time()
        with _uncollected():
            decided = plans._decide([json.loads(bid) for bid in brought])
            told = [json.dumps(choice) for choice in decided]
        plans._token = decided[0][0]
        plans._digests = ["0" * 64] * ranks
        plans.metadata([json.loads(lengths) for lengths in written])
        first = time.process_time() - began
        short = json.dumps([None, "0" * 64, plans._token])
        began = time.process_time()
        assert plans._as_before([json.loads(short) for _ in range(ranks)])
        plans.metadata([json.loads(lengths) for lengths in written])
        later = time.process_time() - began
        name = f"plans of {ranks} ranks × {tensors} tensors"
        rows.append(Row(f"{name}: first save, processor time on rank 0", "", first, None, "s", None, None))
        rows.append(Row(f"{name}: later saves, processor time on rank 0", "", later, None, "s", None, 2, "ours"))
        rows.append(Row(f"{name}: largest answer to a rank", "", max(map(len, told)), None, "bytes", None, None))
        rows.append(Row(f"{name}: what a rank brings again", "", len(short), None, "bytes", None, 200, "ours"))
    return rows


ROWS = (object_store, sharded_plans, agreement)


def main(names: list[str]) -> None:
    """Measure the rows called *names*, or all."""
    for measure in ROWS:
        if not names or measure.__name__ in names:
            report(measure())


if __name__ == "__main__":
    main(sys.argv[1:])
