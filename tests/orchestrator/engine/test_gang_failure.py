"""Failure of one node: the attempt ends on all nodes at once, and the next one runs alone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from hosts_testbed import eventually

from orc.launchers.spec import load_job
from orc.orchestrator.client import Client

NODES = 3
# Each node says that it is there; the first attempt waits for ever, the second looks for ranks of the first.
RANK = """
import os, time
from pathlib import Path
here = Path(os.environ["ORC_JOB_DIR"])
if os.environ["ORC_ATTEMPT"] == "1":
    (here / f"pid-{os.environ['ORC_NODE_RANK']}").write_text(str(os.getpid()))
    time.sleep(600)
for path in here.glob("pid-*"):
    status = Path(f"/proc/{path.read_text()}/status")
    assert not status.exists() or "State:\\tZ" in status.read_text(), f"{path} still runs"
"""


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("whom", ["agent", "rank"])
def test_one_dead_node_of_three_ends_the_attempt_everywhere(orc_home, tmp_path, whom):
    (tmp_path / "train.py").write_text(RANK)
    job = {
        "name": "gang",
        "script": "train.py",
        "launcher": "python",
        "resources": {"nodes": NODES},
        "grace": 5,
        "retry": {"max_attempts": 2, "on": ["crash", "node_failure"], "backoff": 0},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with Client() as client:
        view = client.submit(load_job(tmp_path / "job.yaml"))
        directory = Path(view.attempt.native_id).parent
        pids = [directory / f"pid-{node}" for node in range(NODES)]
        eventually(lambda: all(path.exists() and path.read_text() for path in pids), timeout_s=60)
        ranks = [int(path.read_text()) for path in pids]
        lease = json.loads((directory / "a1" / "node-1" / "lease.json").read_text())
        os.kill(lease["pid"] if whom == "agent" else ranks[1], signal.SIGKILL)
        began = time.monotonic()
        eventually(lambda: not any(alive(pid) for pid in ranks), timeout_s=60)
        assert time.monotonic() - began < 45  # nobody waits for a time-out of a collective
        (done,) = client.wait([view.id], timeout_s=120)
    assert (done.state, len(done.attempts)) == ("SUCCEEDED", 2), [
        (a.reason, a.exit.first_failure) for a in done.attempts
    ]
    assert done.attempts[0].cause == ("node_failure" if whom == "agent" else "crash")
