"""A job whose ranks note every sample when they train it: two attempts that train at the same time are seen.

The first attempt goes on for ever, the second one is short. Each host has a file of its own beside the working copy.
"""

from __future__ import annotations

from command_line import Orc
from hosts_testbed import HostsTestbed

SCRIPT = """
import os, time
fd = os.open(os.environ["ORC_JOB_DIR"] + "/samples", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
attempt = os.environ["ORC_ATTEMPT"]
print("up", flush=True)
sample = 0
while attempt == "1" or sample < 50:
    os.write(fd, f"{attempt} {time.time()}\\n".encode())
    sample += 1
    time.sleep(0.02)
"""


class TracedJob:
    """A job of `SCRIPT` on two hosts, which is made again when it has lost one."""

    def __init__(self, orc: Orc, hosts: HostsTestbed) -> None:
        self._orc, self._hosts = orc, hosts
        orc.write_job(SCRIPT, retry={"on": ["node_failure"], "backoff": 0})
        self.id = orc.submit("--set", "resources.nodes=2", "--set", "resources.procs_per_node=1")
        for rank in (0, 1):
            orc.until_log(self.id, rank, "up")

    def trained(self, attempt: int) -> dict[str, list[float]]:
        """When each host trained its samples in an attempt, by the clock that all hosts share."""
        found: dict[str, list[float]] = {}
        for host in self._hosts.names:
            file = self._hosts.root(host) / "jobs" / self.id / "samples"
            lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
            times = [float(at) for number, at in lines if int(number) == attempt]
            if times:
                found[host] = times
        return found

    def check_one_after_the_other(self, lost: str, broken_at: float = 0) -> tuple[float, float]:
        """The second attempt has trained alone, although the host *lost* trained on after *broken_at* in the first.

        Returns when the first attempt trained its last sample and the second one its first.
        """
        view = self._orc.job(self.id)
        first, _ = view["attempts"]
        assert (view["state"], first["state"], first["cause"]) == ("SUCCEEDED", "LOST", "node_failure"), view
        older, newer = self.trained(1), self.trained(2)
        assert max(older[lost]) > broken_at, "the fault itself has ended the rank, nothing was left to be fenced"
        assert [len(times) for times in newer.values()] == [50, 50]
        last, begin = max(map(max, older.values())), min(map(min, newer.values()))
        assert last < begin, "two attempts have trained at the same time"
        return last, begin
