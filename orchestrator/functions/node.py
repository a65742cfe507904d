"""Program of a rank of a function job: unpickle the call, make it, and leave its result in the job's directory.

Runs on the nodes, from the job's snapshot; standard library, Python 3.9 or newer. ``function.json`` beside it holds the
settings, ``call-<n>.pkl`` the calls of a map.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import io
import json
import os
import pickle
import signal
import sys
import time
import traceback
from typing import Any, Dict, Tuple

KEY_VARIABLE = "ORC_FUNCTION_KEY"  # a secret of the job: what is unpickled later is signed with it
TIMEOUTS_EXCEEDED = 78  # as of a checkpoint that does not fit: another attempt would end the same way
SAVED = 75  # run me again
SLOT_POLL_S = 0.1


def result_name(attempt: int, rank: int) -> str:
    """Return the name of a rank's result in the job's directory."""
    return f"results/a{attempt}-rank-{rank}.pkl"


def signed(key: str, name: str, data: bytes) -> bytes:
    """Return *data* with its signature, as the file *name*."""
    return signature(key, name, data) + data


def verified(key: str, name: str, content: bytes) -> bytes:
    """Return the data of a signed file. Raises `ValueError` for one that was not written with *key* as *name*."""
    if not hmac.compare_digest(content[:32], signature(key, name, content[32:])):
        raise ValueError(f"{name} was not written by this job")
    return content[32:]


def signature(key: str, name: str, data: bytes) -> bytes:
    """Return the HMAC of a file."""
    return hmac.new(bytes.fromhex(key), name.encode() + b"\0" + data, hashlib.sha256).digest()


def main(number: str) -> int:
    """Make call *number* and return the exit status of this rank."""
    began = time.time()
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "function.json")) as file:
        settings = json.load(file)
    environ = os.environ
    rank = int(environ.get("RANK", "0"))
    key = environ.pop(KEY_VARIABLE)
    result = result_name(int(environ["ORC_ATTEMPT"]), rank)
    state = f"function-{rank}.pkl"
    saved = os.path.join(environ["ORC_CHECKPOINT_DIR"], state)
    state = f"{environ['ORC_JOB_ID']}/{state}"  # what is signed is this job's: all calls of a map share a key
    if settings["saves"]:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(SAVED))  # nothing is lost yet
    environ.update(submitit_environment(rank))
    sys.path += [path for path in settings["paths"] if os.path.isdir(path)]
    if settings["at_once"]:
        # Below the cluster's root, which all calls of the map share; held until this process ends.
        take_slot(os.path.join(environ["ORC_JOB_DIR"], "..", "..", "functions", settings["id"]), settings["at_once"])
    try:
        stream = io.BytesIO(call_of(number, here, saved, state, key))
        timeouts = pickle.load(stream)  # noqa: S301 - from the snapshot, or verified
        if timeouts > settings["max_timeouts"]:
            limit = settings["max_timeouts"]
            leave(key, result, ("error", f"its time limit was reached {timeouts} times, and max_timeouts is {limit}"))
            return TIMEOUTS_EXCEEDED
        function, args, kwargs = pickle.load(stream)  # noqa: S301
    except Exception:
        note = ""
        if list(sys.version_info[:2]) != settings["python"]:
            note = f": it was pickled by Python {settings['python']}, and this is {list(sys.version_info[:2])}"
        return leave(key, result, ("error", f"{traceback.format_exc()}the call cannot be read on this node{note}"))
    if settings["saves"]:

        def save(*_: object) -> None:
            timed_out = settings["time_s"] is not None and time.time() - began >= settings["time_s"] / 2
            delayed = function.checkpoint(*args, **kwargs)
            if delayed is None:
                os._exit(128 + signal.SIGTERM)
            call = (delayed.function, delayed.args, delayed.kwargs)
            write(saved, signed(key, state, pickle.dumps(timeouts + timed_out) + pickler().dumps(call)))
            os._exit(SAVED)

        signal.signal(signal.SIGTERM, save)
    try:
        outcome: Tuple[str, Any] = ("success", function(*args, **kwargs))
    except BaseException:
        traceback.print_exc()
        outcome = ("error", traceback.format_exc())
    return leave(key, result, outcome)


def call_of(number: str, here: str, saved: str, state: str, key: str) -> bytes:
    """Return the pickled call: the one that was saved, or the one of the snapshot."""
    try:
        with open(saved, "rb") as file:
            return verified(key, state, file.read())
    except FileNotFoundError:
        with open(os.path.join(here, f"call-{number}.pkl"), "rb") as file:
            return file.read()


def leave(key: str, name: str, outcome: Tuple[str, Any]) -> int:
    """Write the *outcome* of the call; return the exit status that goes with it."""
    try:
        data = pickler().dumps(outcome)
    except Exception:
        traceback.print_exc()
        outcome = ("error", "its result cannot be pickled\n" + traceback.format_exc())
        data = pickle.dumps(outcome)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has ended; what it returned is all that is left to save
    write(os.path.join(os.environ["ORC_JOB_DIR"], name), signed(key, f"{os.environ['ORC_JOB_ID']}/{name}", data))
    return 0 if outcome[0] == "success" else 1


def pickler() -> Any:
    """Return cloudpickle where it is installed, else pickle."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle
    return cloudpickle


def write(path: str, data: bytes) -> None:
    """Write a file that is there completely or not at all, for its owner alone."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def take_slot(directory: str, count: int) -> int:
    """Wait for one of *count* slots, files locked with flock(2); return the descriptor that holds it."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    paths = [os.path.join(directory, f"slot-{number}") for number in range(count)]
    slots = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in paths]
    while True:
        for slot in slots:
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return slot
        time.sleep(SLOT_POLL_S)


def submitit_environment(rank: int) -> Dict[str, str]:
    """Return the variables that `submitit.JobEnvironment` reads."""
    names = {"JOB_ID": "ORC_JOB_ID", "NTASKS": "WORLD_SIZE", "LOCALID": "LOCAL_RANK", "NODEID": "ORC_NODE_RANK"}
    names.update(JOB_NUM_NODES="ORC_NNODES")
    found = {"SUBMITIT_LOCAL_" + name: os.environ.get(variable, "") for name, variable in names.items()}
    found.update(SUBMITIT_EXECUTOR="local", SUBMITIT_LOCAL_GLOBALID=str(rank))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
