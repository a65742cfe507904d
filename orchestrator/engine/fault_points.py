"""Named places where a test can kill the process, or hold it while something else happens, to show that nothing is lost
there and nothing doubled."""

from __future__ import annotations

import os
import signal

VARIABLE = "ORC_FAULT_POINT"
HOLD = "ORC_FAULT_HOLD"

# Every step of a submission, in order. A test kills a real submission at each of them.
POINTS = (
    "snapshot-taken",  # the code is in the local store, the ledger knows nothing
    "secrets-kept",  # the secrets' file is written, the ledger knows nothing
    "enqueued",  # the job is durable
    "examined",  # the preflight has found nothing
    "prepared",  # its first attempt and the marker are durable
    "staged",  # the snapshot is on the cluster
    "submitting",  # the ledger says that a submit is about to happen
    "submitted",  # the backend has the job, the ledger does not know its handle
    "handle-stored",  # the handle is durable
    "claim-released",  # all is done, the caller has not been told
)
# Those of a pass that brings an attempt further whose machines are being made first.
PASS_POINTS = (
    "advancing",  # the next step is about to be taken
    "advanced",  # it was, and the ledger does not know
)


def fault_point(point: str) -> None:
    """Kill this process with SIGKILL when ``ORC_FAULT_POINT`` names *point*, stop it (until SIGCONT) the first time
    that ``ORC_FAULT_HOLD`` does; otherwise do nothing."""
    if os.environ.get(VARIABLE) == point:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get(HOLD) == point:
        del os.environ[HOLD]
        os.kill(os.getpid(), signal.SIGSTOP)
