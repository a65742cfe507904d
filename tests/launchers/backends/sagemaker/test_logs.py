"""From CloudWatch's messages back to the logs of ranks and nodes."""

from __future__ import annotations

from typing import Any

from orc.launchers.backends.base import LogSelector
from orc.launchers.backends.sagemaker.logs import Logs

JOB = "orc-digits-k3f9a2-a1"


class CloudWatch:
    """Streams of messages, two to a page; counts what is asked."""

    def __init__(self, **streams: list[str]) -> None:
        self.content = {f"{JOB}/{name.replace('_', '-')}": messages for name, messages in streams.items()}
        self.asked: list[tuple[str, str | None]] = []

    def streams(self, name: str) -> list[str]:
        return [stream for stream in self.content if stream.startswith(f"{name}/")]

    def events(self, stream: str, token: str | None) -> tuple[list[str], str | None]:
        self.asked.append((stream, token))
        start = int(token or 0)
        page = self.content[stream][start : start + 2]
        return page, str(start + len(page))


def read(logs: Logs, offset: int = 0, nproc: int = 1, **selector: Any) -> bytes:
    return b"".join(logs.read(JOB, LogSelector(**selector), offset, nproc=nproc))


def test_a_log_is_read_from_any_byte_on() -> None:
    logs = Logs(CloudWatch(algo_1_9=["[rank 0] abc", "x", "[rank 0] def", "[rank 0] ghi"]))
    whole = read(logs, rank=0)
    assert whole == b"abc\ndef\nghi\n"
    for offset in range(len(whole) + 2):
        assert read(logs, offset, rank=0) == whole[offset:]


def test_following_goes_on_where_it_was() -> None:
    cloud = CloudWatch(algo_1_9=["[rank 0] abc"])
    logs = Logs(cloud)
    assert read(logs, rank=0) == b"abc\n"
    cloud.content[f"{JOB}/algo-1-9"] += ["[rank 0] def", "y"]
    cloud.asked.clear()
    assert read(logs, 4, rank=0) == b"def\n"
    assert all(token is not None for _, token in cloud.asked)  # nothing was read from the start again
    assert read(logs, 8, rank=0) == b""


def test_a_job_that_was_interrupted_goes_on_in_new_streams() -> None:
    cloud = CloudWatch(algo_1_1=["[rank 0] before", "n"])
    logs = Logs(cloud)
    assert read(logs, rank=0) == b"before\n"
    cloud.content[f"{JOB}/algo-1-2"] = ["[rank 0] after"]
    assert read(logs, 7, rank=0) == b"after\n"
    assert read(logs, rank=0) == b"before\nafter\n"


def test_a_rank_is_found_on_whichever_node_it_runs() -> None:
    logs = Logs(CloudWatch(algo_1_1=["[rank 3] three", "[rank 1] one"], algo_2_1=["[rank 0] zero", "[rank 2] two"]))
    assert [read(logs, rank=rank, nproc=2) for rank in range(4)] == [b"zero\n", b"one\n", b"two\n", b"three\n"]


def test_nodes_have_what_is_not_a_ranks() -> None:
    logs = Logs(CloudWatch(algo_1_1=["a", "[rank 0] x"], algo_10_1=["j"], algo_2_1=["b"]))
    assert read(logs, node=0) == b"a\n"
    assert read(logs, node=1) == b"b\n"
    assert read(logs, node=9) == b"j\n"


def test_there_is_a_log_of_each_rank_and_node_that_has_said_something() -> None:
    logs = Logs(CloudWatch(algo_2_1=["b"]))
    found = logs.selectors(JOB, 2, 2)
    assert found == [LogSelector(rank=2), LogSelector(rank=3), LogSelector(node=1)]
    assert Logs(CloudWatch()).selectors(JOB, 2, 2) == []
    assert read(Logs(CloudWatch()), rank=0) == b""
