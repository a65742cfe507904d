"""Files that only containers hold, while these run and afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from orc.launchers.containers.held import HeldFiles
from orc.launchers.containers.transport import Channel
from orc.launchers.errors import BackendUnreachable

HOME = "/run/orc/a1"
LOG = "[rank 1] one\n[rank 1~] tw\n[rank 1] o\nthe node's own\n"


class Held(HeldFiles):
    """An attempt of two nodes, whose first container ends when it is asked."""

    def __init__(self) -> None:
        super().__init__(HOME, "python3")
        self.has_ended, self.kept_files = False, {"agent.json": b'{"nnodes": 2, "nproc": 1}'}
        self.log, self.asked = LOG, 0

    def kept(self) -> dict[str, bytes]:
        return self.kept_files

    def keep(self, name: str, data: bytes) -> None:
        self.kept_files[name] = data

    def last_words(self) -> dict[int, str]:
        return {0: json.dumps({"exit": {"node": 0, "outcome": "succeeded"}})} if self.has_ended else {1: "no record"}

    def output(self, node: int) -> str | None:
        self.asked += 1
        return self.log if node == 1 else None

    def first(self, command: Sequence[str]) -> Channel | None:
        if self.has_ended:
            return None
        self.has_ended = True
        raise BackendUnreachable("the connection was cut")


def test_a_container_that_ends_while_it_is_read_leaves_its_last_words() -> None:
    exit_record = f"{HOME}/node-0/exit.json"
    found = Held().read_many([exit_record, f"{HOME}/node-1/exit.json", f"{HOME}/agent.json"])
    assert sorted(found) == [f"{HOME}/agent.json", exit_record]
    assert json.loads(found[exit_record])["outcome"] == "succeeded"


def test_the_word_of_how_an_attempt_was_ended_waits_for_no_container() -> None:
    held = Held()
    held.write(f"{HOME}/ended.json", b"{}")
    assert held.kept_files["ended.json"] == b"{}"
    with pytest.raises(BackendUnreachable, match="the connection was cut"):
        held.write(f"{HOME}/cancel.json", b"{}")


def test_the_log_of_a_rank_is_what_its_container_has_printed_from_any_byte_on() -> None:
    held = Held()
    assert held.names(f"{HOME}/logs") == ["node-1.log", "rank-1.log"]
    assert held.read(f"{HOME}/logs/rank-1.log") == b"one\ntwo\n"
    assert held.read(f"{HOME}/logs/rank-1.log", offset=4, limit=2) == b"tw"
    assert held.read(f"{HOME}/logs/node-1.log") == b"the node's own\n"
    assert held.read(f"{HOME}/logs/rank-0.log") == b""


def test_a_log_that_is_read_piece_by_piece_is_fetched_again_for_what_is_new_alone() -> None:
    held, path = Held(), f"{HOME}/logs/rank-1.log"
    pieces = [held.read(path, offset=offset, limit=2) for offset in range(0, 8, 2)]
    assert (b"".join(pieces), held.asked) == (b"one\ntwo\n", 1)
    held.log += "[rank 1] three\n"
    assert held.read(path, offset=8, limit=10) == b"three\n"


def test_what_must_outlive_the_containers_is_kept_and_no_other_file_can_be_written_without_them() -> None:
    held = Held()
    held.has_ended = True
    for name in ("ended.json", "cancel.json"):
        held.write(f"{HOME}/{name}", b"{}")
    assert sorted(held.kept_files) == ["agent.json", "cancel.json", "ended.json"]
    with pytest.raises(BackendUnreachable, match="the first container does not run"):
        held.write(f"{HOME}/calls/a.json", b"{}")
    with pytest.raises(FileNotFoundError):
        held.read(f"{HOME}/calls/a.json")
    assert held.names(f"{HOME}/calls") == []
