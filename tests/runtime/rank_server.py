"""A process that has imported torch and forks ranks from that clean state, so that a test does not pay for the import.

Started by conftest.py; reads requests from the socket whose number is its only argument. One request at a time:
``{"call": cloudpickled (function, args), "envs": [dict per rank], "timeout": seconds}``; the answer is a list with one
``("ok", pickled result)`` or ``("error", text)`` per rank.
"""

import faulthandler
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings

import cloudpickle
import pytest  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.parallel
import torch.utils.data
from rank_wire import receive, send

import orc.runtime.accelerator  # noqa: F401 (the ranks find it imported)

torch.set_num_threads(1)


def run_rank(call, env, timeout, result_fd, release_fd, output):
    """The life of one forked rank; never returns."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.dump_traceback_later(max(timeout - 1, 0.5), file=sys.stderr)
    os.environ.update(env)
    warnings.simplefilter("error", FutureWarning)  # nobody would see it: the output of a rank that succeeds is dropped
    try:
        function, args = cloudpickle.loads(call)
        answer = ("ok", cloudpickle.dumps(function(*args)))
    except BaseException:
        answer = ("error", traceback.format_exc())
    with os.fdopen(result_fd, "wb") as pipe:
        pickle.dump(answer, pipe)
    # Nobody leaves before all are done: a closed store or connection would break the others.
    os.read(release_fd, 1)
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()
    coverage_stop()
    os._exit(0)


def coverage_stop():
    """Keep the coverage data of a forked rank, which leaves without the interpreter's own exit."""
    if "coverage" in sys.modules:
        current = sys.modules["coverage"].Coverage.current()
        if current is not None:
            current.stop()
            current.save()


def serve(request):
    release_read, release_write = os.pipe()
    ranks = []
    for env in request["envs"]:
        result_read, result_write = os.pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115
        pid = os.fork()
        if pid == 0:
            os.close(result_read)
            os.close(release_write)
            run_rank(request["call"], env, request["timeout"], result_write, release_read, output)
        os.close(result_write)
        ranks.append((pid, result_read, output))
    os.close(release_read)
    answers = collect([fd for _, fd, _ in ranks], time.monotonic() + request["timeout"])
    os.close(release_write)
    late = time.monotonic() + 5
    for index, (pid, fd, output) in enumerate(ranks):
        os.close(fd)
        if answers[index] is None or answers[index][0] == "error" or time.monotonic() > late:
            os.killpg(pid, signal.SIGKILL) if group_exists(pid) else None
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
        if answers[index] is None:
            died = f"ended by signal {status & 127}" if status & 127 else f"exited with {status >> 8}"
            answers[index] = ("error", f"no result within {request['timeout']:g} s ({died})\n{text}")
        elif answers[index][0] == "error":
            answers[index] = ("error", f"{answers[index][1]}\n{text}")
    return answers


def group_exists(pid):
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def collect(fds, deadline):
    """What each rank wrote to its pipe before *deadline*; `None` for those that wrote nothing.

    When one rank has failed, the others get two more seconds: they may hang in a collective that it left.
    """
    answers, parts = [None] * len(fds), [[] for _ in fds]
    with selectors.DefaultSelector() as selector:
        for index, fd in enumerate(fds):
            selector.register(fd, selectors.EVENT_READ, index)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                index = key.data
                part = os.read(key.fd, 1 << 20)
                if part:
                    parts[index].append(part)
                    continue
                selector.unregister(key.fd)
                if parts[index]:
                    answers[index] = pickle.loads(b"".join(parts[index]))
                if answers[index] is None or answers[index][0] == "error":
                    deadline = min(deadline, time.monotonic() + 2)
    return answers


def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    send(connection, "ready")
    while (request := receive(connection)) is not None:
        send(connection, serve(request))


if __name__ == "__main__":
    main()
