"""Ranks for tests: `run_ranks(2, function, *args)` runs a function in a real process group of forked processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

SERVER = Path(__file__).with_name("rank_server.py")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time; the text holds every failing rank's traceback and output."""


class RankPool:
    """The fork server of this test session. Calling it runs one function on several ranks and returns their results."""

    def __init__(self):
        mine, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ORC_", "ACCELERATE_", "SLURM_", "OMPI_"))}
        for name in LAUNCH_VARIABLES:
            env.pop(name, None)
        env["OMP_NUM_THREADS"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=env
        )
        theirs.close()
        self.connection = mine
        sys.path.insert(0, str(SERVER.parent))
        try:
            import rank_wire
        finally:
            sys.path.remove(str(SERVER.parent))
        self.wire = rank_wire
        assert self.wire.receive(self.connection) == "ready"

    def __call__(self, world_size, function, *args, env=None, timeout=60.0, nodes=1):
        """The results of ``function(*args)`` on ranks 0 to *world_size* - 1, in order of rank.

        The ranks get the variables of a launch on loopback and a free port; the function makes its own Accelerator.
        Function and arguments may be local: they are pickled by value. *env* holds more variables, for all ranks or,
        as a list, for each. *nodes* spreads the ranks over simulated machines. Raises `RankFailure`.
        """
        __tracebackhide__ = True
        module = sys.modules.get(function.__module__)
        if module is not None and not function.__module__.startswith(("orc.", "torch")):
            cloudpickle.register_pickle_by_value(module)
        with held_port() as port:
            envs = self._envs(world_size, nodes, port, env)
            call = cloudpickle.dumps((function, args))
            imports = tuple(getattr(module, "RANKS_IMPORT", ()))
            self.wire.send(self.connection, {"call": call, "envs": envs, "timeout": float(timeout), "imports": imports})
            answers = self.wire.receive(self.connection)
        if answers is None:
            raise RankFailure(f"the rank server ended (exit status {self.process.poll()})")
        failed = [f"--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(answers) if kind == "error"]
        if failed:
            raise RankFailure("\n".join(failed))
        return [cloudpickle.loads(payload) for _, payload in answers]

    @staticmethod
    def _envs(world_size, nodes, port, env):
        local = world_size // nodes
        envs = []
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "GROUP_RANK": str(rank // local),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            variables.update((env[rank] if isinstance(env, (list, tuple)) else env) or {})
            envs.append(variables)
        return envs

    def close(self):
        self.connection.close()
        self.process.wait(timeout=30)


@contextlib.contextmanager
def held_port():
    """A TCP port on loopback that nobody else is given inside the block, however late the ranks are.

    Bound, but not listened on: who sets SO_REUSEADDR, as torch's store does, can listen there all the same.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def free_port():
    """``free_port()``: a port for a process group of this test's own; nobody else is given it until the test ends."""
    with contextlib.ExitStack() as held:
        yield lambda: held.enter_context(held_port())


@pytest.fixture(scope="session")
def run_ranks():
    """``run_ranks(n, function, *args, env=None, timeout=60, nodes=1)``; see `RankPool.__call__`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def fresh_context():
    """Every test starts without a process context and a process group, and leaves none behind."""
    yield
    context = sys.modules.get("orc.runtime.core.context")
    if context is not None:
        context.reset_default()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
