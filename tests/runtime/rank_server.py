"""A process that has imported torch and forks ranks from that clean state, so that a test does not pay for the import.

Started by conftest.py; reads requests from the socket whose number is its only argument. One request at a time:
``{"call": cloudpickled (function, args), "envs": [dict per rank], "timeout": seconds, "imports": names}``; the answer
is a list with one ``("ok", pickled result)`` or ``("error", text)`` per rank. Where *imports* are asked for, a server
that was forked from this one and has imported them, too, forks the ranks; it is kept for as long as the same are asked
for.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
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
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # the first optimizer and the first DistributedDataParallel import it: more than a second
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch.utils.data
from rank_wire import receive, send

import orc.runtime

for _package in ("checkpoint", "collectives", "core", "data", "parallel", "train"):
    for _module in pkgutil.walk_packages(
        [*(f"{path}/{_package}" for path in orc.runtime.__path__)], f"orc.runtime.{_package}."
    ):
        importlib.import_module(_module.name)
importlib.import_module("orc.runtime.accelerator")

torch.set_num_threads(1)

ASKED = signal.SIGUSR2  # a rank that gets this shows its stacks and ends


def run_rank(call, env, result_fd, release_fd, output):
    """The life of one forked rank; never returns."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(ASKED, file=sys.stderr, chain=True)
    rank = os.getpid()
    # Its own children must not keep the pipe open: the end of the pipe is the end of the answer.
    os.register_at_fork(after_in_child=lambda: os.close(result_fd) if os.getppid() == rank else None)
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
            run_rank(request["call"], env, result_write, release_read, output)
        os.close(result_write)
        ranks.append((pid, result_read, output))
    os.close(release_read)
    answers = collect([fd for _, fd, _ in ranks], time.monotonic() + request["timeout"])
    os.close(release_write)
    for (pid, _, _), answer in zip(ranks, answers, strict=True):
        if answer is None:
            os.kill(pid, ASKED)
    late = time.monotonic() + 5
    for index, (pid, fd, output) in enumerate(ranks):
        os.close(fd)
        failed = answers[index] is not None and answers[index][0] == "error"
        status = reap(pid, 0 if failed else late)
        output.seek(0)
        text = output.read().decode(errors="replace")
        if answers[index] is None:
            died = f"ended by signal {status & 127}" if status & 127 else f"exited with {status >> 8}"
            answers[index] = ("error", f"no result within {request['timeout']:g} s ({died})\n{text}")
        elif answers[index][0] == "error":
            answers[index] = ("error", f"{answers[index][1]}\n{text}")
    return answers


def reap(pid, deadline):
    """The status of the rank *pid*, which is killed at *deadline*, and then whatever it has left."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


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


class WarmServer:
    """A fork of this server that has imported *names* before it forks ranks."""

    def __init__(self, names, inherited):
        self.names = names
        self.connection, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            inherited.close()
            self.connection.close()
            for name in names:
                importlib.import_module(name)
            answer_requests(theirs)
            coverage_stop()
            os._exit(0)
        theirs.close()

    def __call__(self, request):
        send(self.connection, {**request, "imports": ()})
        return receive(self.connection)

    def close(self):
        self.connection.close()
        os.waitpid(self.pid, 0)


def answer_requests(connection):
    """Answer the requests of *connection* until its other end is closed."""
    gc.collect()
    gc.freeze()  # a collection in a rank does not touch, and so copy, the memory of what is imported here
    send(connection, "ready")
    warm = None
    while (request := receive(connection)) is not None:
        if not request["imports"]:
            send(connection, serve(request))
            continue
        if warm is None or warm.names != request["imports"]:
            if warm is not None:
                warm.close()
            warm = WarmServer(request["imports"], connection)
            receive(warm.connection)
        send(connection, warm(request))
    if warm is not None:
        warm.close()


if __name__ == "__main__":
    answer_requests(socket.socket(fileno=int(sys.argv[1])))
