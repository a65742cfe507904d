"""Barriers, with ranks that are threads and a store that is served."""

import threading
from types import SimpleNamespace

import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.replication import barrier as barrier_module
from orc.runtime.checkpoint.replication.barrier import Barrier, wait_for_readers
from orc.runtime.collectives.store_server import RemoteStore, StoreServer
from orc.runtime.core.store import LocalStore

KEY = b"k" * 32


class Context:
    """What a barrier wants to know of its rank."""

    def __init__(self, rank, store, group=None):
        self.rank, self.store, self.world_size, self.key, self.group = rank, store, 2, KEY, group
        self.config = SimpleNamespace(timeout_s=30.0)


class SlowStore(RemoteStore):
    """Of a rank that gets no processor when the verdict is there."""

    slow = threading.Event()

    def get(self, key):
        self.slow.wait(30)
        return super().get(key)

    def clone(self, answer_s=30.0):
        return SlowStore(self.host, self.port, self._key, answer_s)


@pytest.fixture
def both():
    store = LocalStore()
    server = StoreServer(store, KEY, "127.0.0.1")
    SlowStore.slow = threading.Event()
    yield Context(0, store), Context(1, SlowStore("127.0.0.1", server.port, KEY))
    SlowStore.slow.set()
    barrier_module._unread.clear()
    server.close()


@pytest.mark.parametrize("fails", [False, True])
def test_rank_0_does_not_end_before_the_others_have_read_the_verdict(both, fails):
    def verdict(values):
        if fails:
            raise CheckpointError("no")
        return sum(values)

    ends = {}

    def meet(context):
        try:
            ends[context.rank] = Barrier(context).hold("saving", context.rank + 1, verdict)
        except CheckpointError as error:
            ends[context.rank] = str(error)

    threads = [threading.Thread(target=meet, args=(context,)) for context in both]
    for thread in threads:
        thread.start()
    threads[0].join(30)
    leaving = threading.Thread(target=wait_for_readers, args=(30,))  # what the end of rank 0's process does
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    SlowStore.slow.set()
    for thread in (leaving, threads[1]):
        thread.join(30)
        assert not thread.is_alive()
    assert ends == dict.fromkeys((0, 1), "no" if fails else 3)
