"""How cost grows with nodes and ranks, by simulation: object stores, sharded saves, agreement, agents, fan-out.

`bench_scale.py` runs it. Each function measures one part at several sizes. Requests, rounds and bytes are counted;
seconds of processor time stand beside wall time, which other programs of the machine disturb.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from harness import Row

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

TESTS = Path(__file__).resolve().parents[1]
ROUND_TRIP_S = float(os.environ.get("ROUND_TRIP_S", "0.02"))


KEY = b"k" * 32  # of the store


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
    from orc.runtime.checkpoint.format.layout import NAME, Manifest
    from orc.runtime.checkpoint.storage.destination import RemoteDestination
    from orc.runtime.checkpoint.storage.durable import FileRecord
    from orc.runtime.checkpoint.storage.remote import Remote, RemoteRoot

    rows = []
    for files in sizes:
        with counting_store() as store:
            names = [f"pytorch_model_0/__{rank}_0.distcp" for rank in range(files)]
            manifest = Manifest("1", 0, 0, 0, files, 0.0, {name: FileRecord(1, 0) for name in names})
            for number in range(checkpoints):
                store.fill({f"run/checkpoint_{number}/{name}": b"x" for name in names})
                store.fill({f"run/checkpoint_{number}/{NAME}": manifest.to_json()})
            root = RemoteRoot(Remote("s3://bucket/run"))
            target = root.numbered(checkpoints)
            store.fill({f"run/checkpoint_{checkpoints}/{name}": b"x" for name in names})
            destination = RemoteDestination(target, "", True)
            destination.take_over(names)
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
    """What a barrier wants to know of its rank."""

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        self.rank, self.world_size, self.store, self.key = rank, ranks, store, KEY
        self.config = SimpleNamespace(timeout_s=300.0)


def _hold_as_others(ranks: int, port: int, times: int) -> None:
    """Hold *times* barriers as all ranks but rank 0, each in a thread with a connection of its own."""
    from orc.runtime.checkpoint.replication.barrier import Barrier
    from orc.runtime.collectives.store_server import RemoteStore

    def hold(rank: int) -> None:
        barrier = Barrier(Rank(rank, ranks, RemoteStore("127.0.0.1", port, KEY)))
        for _ in range(times):
            barrier.hold("agree", [None, rank], len)

    threads = [threading.Thread(target=hold, args=(rank,)) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def agreement(sizes: tuple[int, ...] = (32, 128, 512), times: int = 5) -> list[Row]:
    """A barrier of all ranks over the store: operations, and processor time on rank 0. The others are one process."""
    from orc.runtime.checkpoint.replication.barrier import Barrier
    from orc.runtime.collectives.store_server import StoreServer
    from orc.runtime.core.store import LocalStore

    rows = []
    for ranks in sizes:
        store = LocalStore()
        server = StoreServer(store, KEY, "127.0.0.1")
        asked: Counter[str] = Counter()
        answer = server._answer

        def counted(name: str, *rest: Any, answer: Any = answer, asked: Counter[str] = asked) -> Any:
            asked[name] += 1
            return answer(name, *rest)

        server._answer = counted  # type: ignore[method-assign]
        others = multiprocessing.get_context("fork").Process(
            target=_hold_as_others, args=(ranks, server.port, times + 1)
        )
        others.start()
        barrier = Barrier(Rank(0, ranks, store))
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


def _plan(rank: int, ranks: int, tensors: int) -> SavePlan:
    """Of *rank*, for a model whose tensors are all cut into as many parts as there are ranks."""
    from torch import Size, float32
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    offset, whole, kind = Size([4 * rank, 0]), Size([4 * ranks, 64]), TensorProperties(dtype=float32)
    part = TensorWriteData(ChunkStorageMetadata(offset, Size([4, 64])), kind, whole)
    names = [f"layers.{number}.weight" for number in range(tensors)]
    items = [WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=part) for name in names]
    return SavePlan(items, planner_data={name: ("model", name) for name in names})


def sharded_plans(sizes: tuple[int, ...] = (64, 256, 1024), tensors: int = 2000) -> list[Row]:
    """What rank 0 does for the plans of a sharded save and its metadata: at the first save, and at later ones."""
    from orc.runtime.checkpoint.state.planning import ShardPlans, _boxes, _kinds, _packed

    rows = []
    for ranks in sizes:
        plans = ShardPlans(cast(Any, None))
        said = []  # of each rank in turn: where its parts lie, and on rank 0 also what they are
        for rank in range(ranks):
            plan = _plan(rank, ranks, tensors)
            said.append(json.dumps([None if rank else {"f": _kinds(plan)}, {"f": _boxes(plan)}]))
        written = [json.dumps({"f": _packed([1100] * tensors)})] * ranks
        digests = [[None, ["0" * 64, f"{rank:064}"], None] for rank in range(ranks)]
        asked = [json.dumps(each) for each in digests]
        began = time.process_time()
        assert plans._compare([json.loads(each) for each in asked]) == [0]
        decided = plans._decide([json.loads(each) for each in said])
        told = [json.dumps(choice) for choice in decided]
        metadata = plans.metadata([json.loads(lengths) for lengths in written])
        first = time.process_time() - began
        plans._token = decided[0][0]
        asked = [json.dumps([*each[:2], plans._token]) for each in digests]
        began = time.process_time()
        assert plans._compare([json.loads(each) for each in asked]) is None
        plans.metadata([json.loads(lengths) for lengths in written])
        later = time.process_time() - began
        name = f"plans of {ranks} ranks × {tensors} tensors"
        rows.append(Row(f"{name}: first save, processor time on rank 0", "", first, None, "s", None, 2, "ours"))
        rows.append(Row(f"{name}: later saves, processor time on rank 0", "", later, None, "s", None, 2, "ours"))
        rows.append(Row(f"{name}: largest answer to a rank", "", max(map(len, told)), None, "bytes", None, None))
        rows.append(Row(f"{name}: what a rank brings first", "", max(map(len, said[1:])), None, "bytes", None, None))
        rows.append(Row(f"{name}: what a rank brings again", "", len(asked[0]), None, "bytes", None, 200, "ours"))
        rows.append(Row(f"{name}: metadata", "", len(metadata["f"]) / 2**20, None, "MiB", None, None))
    return rows


def _processor_s(pid: int) -> float:
    """Seconds of processor time that the process *pid* has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def agents(sizes: tuple[int, ...] = (128, 512, 1000), watched_s: float = 20.0) -> list[Row]:
    """Node 0 as it is, and the others as connections of this process: they join, live for a while, and one dies."""
    sys.path[:0] = [str(TESTS / "launchers"), str(TESTS / "testbed")]
    from agent.conftest import Attempt, Linked, attempt
    from agent.test_link_protocol import IDLE, Many

    from orc.launchers.agent.link.channel import PeerDisconnected

    class Patient(Many):
        """They come all at once, and come again where node 0 is too busy for them."""

        async def join(self, node: int, port: int) -> None:
            while node not in self.channels:
                with contextlib.suppress(OSError, PeerDisconnected):
                    await super().join(node, port)
                await asyncio.sleep(0.2)

    rows = []
    for nodes in sizes:
        with tempfile.TemporaryDirectory() as directory:
            making = attempt.__wrapped__(Path(directory))
            job: Attempt = next(making)(IDLE, nnodes=nodes, link=True, peer_timeout_s=30.0, heartbeat_s=2.0)
            first = Linked([job])
            began = time.perf_counter()
            first.start(0)
            many = Patient(first.hub["port"], nodes - 1)
            try:
                many.until_all_have("rendezvous-r0.json", 120)
                job.until_log("ready")
                joined = time.perf_counter() - began
                pids = first.lease(0)["pid"], first.process_of_link(0)
                spent, until_s = [_processor_s(pid) for pid in pids], time.monotonic() + watched_s
                next_beat = time.monotonic()
                while time.monotonic() < until_s:
                    if time.monotonic() >= next_beat:
                        next_beat += min(2.0 * max(1.0, nodes / 256), 30.0 / 6)  # as the agents'
                        for node, channel in many.channels.items():
                            beat = {"restart": 0, "state": "running", "at": time.time(), "ranks_alive": 8}
                            many.send(channel, f"node-{node}/heartbeat.json", beat)
                    many.step()
                spent = [(_processor_s(pid) - before) / watched_s for pid, before in zip(pids, spent, strict=True)]
                dead = nodes // 2
                many.channels[dead].writer.close()
                began = time.perf_counter()
                many.got.pop(dead)
                many.until_all_have("stop-r0.json", 120)
                stopped = time.perf_counter() - began
            finally:
                many.close()
                if not first.over(0):
                    os.kill(first.lease(0)["pid"], signal.SIGKILL)
                making.close()
        name = f"{nodes} agents"
        rows.append(Row(f"{name}: start to rendezvous", "", joined, None, "s", None, 30, "ours"))
        rows.append(Row(f"{name}: agent of node 0, share of a core", "", 100 * spent[0], None, "%", None, None))
        rows.append(Row(f"{name}: its link, share of a core", "", 100 * spent[1], None, "%", None, None))
        rows.append(Row(f"{name}: from the end of one to the stop of all", "", stopped, None, "s", None, 36, "ours"))
    return rows


def verdict(sizes: tuple[int, ...] = (100, 300, 1000), ranks: int = 8) -> list[Row]:
    """The records and logs of an attempt whose rank in the middle failed first, all others because of it."""
    from orc.launchers.attempts.reader import log_selectors, read_attempts, read_log
    from orc.launchers.attempts.records import LogSelector
    from orc.launchers.remote.transport import LocalTransport

    class Counting(LocalTransport):
        calls, size = 0, 0

        def read_many(self, *given: Any, **options: Any) -> dict[str, bytes]:
            self.calls += 1
            return super().read_many(*given, **options)

        def read(self, *given: Any, **options: Any) -> bytes:
            data = super().read(*given, **options)
            self.size += len(data)
            return data

    rows = []
    for nodes in sizes:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "logs").mkdir()
            Path(directory, "agent.json").write_text(json.dumps({"format": 1, "nnodes": nodes, "nproc": ranks}))
            first = nodes * ranks // 2
            for node in range(nodes):
                own = range(node * ranks, (node + 1) * ranks)
                for rank in own:
                    Path(directory, "logs", f"rank-{rank}.log").write_text(f"line of rank {rank}\n" * 1000)
                failed = first if first in own else own[0]
                failure = {"rank": failed, "node": node, "exit_code": 1, "signal": None, "at": 10.0 + (failed != first)}
                ends = {str(rank): {"exit_code": 1, "signal": None} for rank in own}
                common = {"restart": 0, "node": node, "host": f"h{node}", "at": 1.0}
                end = {"outcome": "crash", "exit_status": 1, "first_failure": failure, "ended_at": 12.0, "ranks": ends}
                (Path(directory) / f"node-{node}").mkdir()
                for name, record in (("lease", common), ("exit", {**common, **end})):
                    Path(directory, f"node-{node}", f"{name}.json").write_text(json.dumps(record))
            transport = Counting()
            spent = time.process_time()
            found = read_attempts(transport, [directory])[directory].verdict
            spent = time.process_time() - spent
            assert found is not None
            assert found.first_failure is not None
            assert found.first_failure.rank == first
            listed, calls = len(log_selectors(transport, directory)), transport.calls
            chunks = list(read_log(transport, directory, LogSelector(rank=first)))
            assert (listed, len(chunks)) == (nodes * ranks, 1)
        name = f"{nodes * ranks} ranks of {nodes} nodes"
        rows.append(Row(f"{name}: round trips to the verdict", "", calls, None, "", None, 3, "ours"))
        rows.append(Row(f"{name}: processor time to the verdict", "", spent, None, "s", None, None))
        rows.append(
            Row(f"{name}: bytes of logs read to list all and show one", "", transport.size, None, "", None, None)
        )
    return rows


def fan_out(sizes: tuple[int, ...] = (16, 64, 256), patience_s: float = 300.0) -> list[Row]:
    """A snapshot of 8 MB to hosts that are directories of this machine; the first answers when all others have it."""
    sys.path.insert(0, str(TESTS / "launchers"))
    from transfer.conftest import Host, targets

    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.scan import scan
    from orc.launchers.transfer.delivery import sync

    class Late(Host):
        def stream(self, argv: Any, **options: Any) -> Any:
            end = time.monotonic() + patience_s
            while (left := without()) and time.monotonic() < end:
                time.sleep(0.2)
            delayed.append(left)
            return super().stream(argv, **options)

    def without() -> int:
        """How many of the other hosts do not have it."""
        others = [host for name, host in hosts.items() if name != "node0"]
        return sum(not host.store.root.joinpath("trees", bundle.digest).exists() for host in others)

    rows = []
    for count in sizes:
        delayed: list[int] = []
        with tempfile.TemporaryDirectory() as directory:
            tree, store = Path(directory, "tree"), ContentStore(Path(directory, "store"))
            tree.mkdir()
            for number in range(200):
                (tree / f"module_{number}.py").write_text(f"VALUE = {number}\n" * 3000)
            bundle = store.ingest(scan(tree))
            hosts = {
                f"node{number}": (Host if number else Late)(f"node{number}", Path(directory, f"hosts/{number}"))
                for number in range(count)
            }
            began, spent = time.perf_counter(), time.process_time()
            reports = sync([bundle], store, targets(hosts))
            wall, spent = time.perf_counter() - began, time.process_time() - spent
            assert not [report.error for report in reports.values() if report.error]
        name = f"a snapshot to {count} hosts"
        streams = max(len(host.started) for host in hosts.values())
        rows.append(Row(f"{name}: streams per host", "", streams, None, "", None, 1, "ours"))
        rows.append(
            Row(f"{name}: sent to each", "", max(one.sent for one in reports.values()), None, "bytes", None, None)
        )
        rows.append(Row(f"{name}: processor time here, per host", "", 1e3 * spent / count, None, "ms", None, None))
        rows.append(Row(f"{name}: hosts that a slow one delays", "", delayed[0], None, "", None, 0, "ours"))
        rows.append(Row(f"{name}: wall time", "", wall, None, "s", None, None))
    return rows


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "object-store": lambda full: object_store() if full else object_store((150,)),
    "sharded-plans": lambda full: sharded_plans() if full else sharded_plans((16,)),
    "agreement": lambda full: agreement() if full else agreement((32,)),
    "agents": lambda full: agents() if full else agents((64,), 5.0),
    "verdict": lambda full: verdict() if full else verdict((100,)),
    "fan-out": lambda full: fan_out() if full else fan_out((8,)),
}
