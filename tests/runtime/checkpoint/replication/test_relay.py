"""Files from one rank to others through the store."""

import os

import pytest

pytestmark = pytest.mark.distributed


def relays(directory, broken=None):
    """Rank 0 sends three files; what the others got, or what went wrong; and the keys that stay in the store."""
    from pathlib import Path

    from orc.runtime import Accelerator
    from orc.runtime.checkpoint.replication import relay as module
    from orc.runtime.checkpoint.replication.barrier import Barrier
    from orc.runtime.checkpoint.storage.durable import HashingFile

    module.PIECE = 1000
    context = Accelerator().ctx
    target = Path(directory, f"rank-{context.rank}")
    target.mkdir()
    names = ["empty", "large", "small"]
    contents = {"empty": b"", "large": os.urandom(9500), "small": b"abc"}
    barrier = Barrier(context, timeout_s=60)
    barrier.hold("begin", None, len)
    relay = barrier.relay()
    result = None
    try:
        if context.rank == 0:
            for name in names:
                (target / name).write_bytes(contents[name])
            if broken == "sender":
                (target / "small").unlink()
            relay.send(target, names, context.world_size - 1)
        else:

            def create(name):
                if broken == "reader" and context.rank == 1 and name == "large":
                    raise OSError("no room")
                return None if (context.rank, name) == (2, "small") else HashingFile(target / name)

            before = len(os.listdir("/proc/self/fd"))
            try:
                result = sorted(relay.receive(names, create))
            finally:
                assert len(os.listdir("/proc/self/fd")) == before
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    barrier.hold("end", None, len)
    keys = [key for key in context.store.list_keys() if "relay" in key] if context.is_main else []
    context.barrier()
    found = {name: (target / name).read_bytes() for name in names if (target / name).exists()}
    return result, {name: len(data) for name, data in found.items()}, keys


def test_every_reader_gets_what_it_wants_and_the_store_is_left_empty(tmp_path, run_ranks):
    (sent, _, keys), (first, files, _), (second, fewer, _) = run_ranks(3, relays, str(tmp_path))
    assert (sent, first, second) == (None, ["empty", "large", "small"], ["empty", "large"])
    assert files == {"empty": 0, "large": 9500, "small": 3}
    assert fewer == {"empty": 0, "large": 9500}
    for name in ("empty", "large", "small"):
        assert (tmp_path / "rank-0" / name).read_bytes() == (tmp_path / "rank-1" / name).read_bytes()
    assert keys == []


def test_a_sender_that_cannot_read_tells_its_readers(tmp_path, run_ranks):
    (sent, *_), *readers = run_ranks(3, lambda path: relays(path, "sender"), str(tmp_path))
    assert sent.startswith("FileNotFoundError")
    for result, *_ in readers:
        assert result.startswith("CheckpointError: another rank cannot read what it has to send")


def test_a_reader_that_cannot_write_does_not_stop_the_others(tmp_path, run_ranks):
    (sent, _, keys), (first, *_), (second, files, _) = run_ranks(3, lambda path: relays(path, "reader"), str(tmp_path))
    assert (sent, first) == (None, "OSError: no room")
    assert (second, files) == (["empty", "large"], {"empty": 0, "large": 9500})
    assert keys == []
