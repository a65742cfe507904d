"""Preparation of a node: secrets, working copy, environment, setup lines."""

from __future__ import annotations

import errno
import os
import time

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.failures import start_timed_out
from orc.launchers.agent.processes import agent_argv, background, decode_wait_status, describe_exit, spawn, users_umask
from orc.launchers.agent.procfs import process_start
from orc.launchers.agent.ranks import job_environment
from orc.launchers.agent.records import log_tail, read_json
from orc.launchers.agent.state import FAST_POLL_S, NodeState
from orc.launchers.agent.supervision import Supervisor, end_processes


def make_work(tree: str, work: str) -> None:
    """Make the job's working copy of its snapshot, all at once under its final name. Kept if it is there."""
    if os.path.isdir(work):
        return
    temporary = f"{work}.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        _copy(tree, temporary)
        try:
            os.rename(temporary, work)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            _remove(temporary)  # another agent was faster, with the same content
    except BaseException:
        _remove(temporary)
        raise


def _copy(source: str, target: str) -> None:
    """Copy a directory; the snapshot is read-only, the copy is not.

    `shutil` takes longer to import than most copies do.
    """
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                _copy(entry.path, path)
            else:
                with open(entry.path, "rb") as reader, open(path, "xb") as writer:
                    while data := reader.read(1 << 20):
                        writer.write(data)
                _keep(entry.path, path, 0o600)
    _keep(source, target, 0o700)


def _keep(source: str, target: str, more: int) -> None:
    """Give *target* the times and the mode of *source*, and *more* permissions."""
    status = os.stat(source)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chmod(target, status.st_mode & 0o7777 | more)


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def load_secrets(node: NodeState) -> None:
    """Read the values of the job's secrets; they live in memory and in the ranks' environment only."""
    names = list(node.config.secrets)
    if not names:
        return
    path = os.path.join(node.private, "secrets.json")
    values = read_json(path)
    if values is None:
        raise LaunchFailure(f"the job's secrets are gone: {path} cannot be read")
    missing = [name for name in names if name not in values]
    if missing:
        raise LaunchFailure(f"no value for the secret {', '.join(missing)} in {path}")
    node.secrets = {name: str(values[name]) for name in names}
    if not node.config.core_dumps:  # this process and all that it starts have the values in their memory
        import resource

        # One byte is less than any core file; unlike 0 it also keeps the kernel from starting a program for it.
        # A limit of 0 that is set already cannot be raised.
        limit = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
        resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def prepare(node: Supervisor) -> bool:
    """Make the working copy, then run the setup lines; False when a stop came in between."""
    if (node.node == 0 or node.linked) and not os.path.isdir(node.work):
        status = step(node, background(lambda: make_work(node.config.code_tree, node.work), node.log_fd))
        if status and node.stop is None:
            raise LaunchFailure(f"cannot copy the snapshot to {node.work}: {last_words(node)}")
    elif node.node and not node.linked and not node.until(lambda: os.path.isdir(node.work) or start_timed_out(node, 0)):
        return False
    if node.stop or (node.config.environment and not make_environment(node)):
        return False
    env = job_environment(node)
    null = os.open(os.devnull, os.O_RDONLY)
    for line in node.config.setup:
        node.log(f"setup: {line}")
        began = os.fstat(node.log_fd).st_size
        argv = ["/bin/sh", "-e", "-c", line]
        status = step(node, spawn(argv, env, cwd=node.work, stdin=null, output=node.log_fd, umask=users_umask()))
        if node.stop:
            break
        if status:
            tail = log_tail(os.path.join(node.logs, f"node-{node.node}.log"), began, list(node.secrets.values()))
            how = describe_exit(*decode_wait_status(status))
            raise LaunchFailure(f"setup on node {node.node} failed: `{line}` {how}" + (f"\n{tail}" if tail else ""))
    os.close(null)
    return node.stop is None


def make_environment(node: Supervisor) -> bool:
    """Have the environment step make the job's environment here, and take its answer; False when a stop came."""
    answer = os.path.join(node.dir, "environment.json")
    argv = [*environment_argv(node), "prepare", os.path.join(node.attempt_dir, "agent.json"), answer]
    null = os.open(os.devnull, os.O_RDONLY)
    status = step(node, spawn(argv, job_environment(node), cwd=node.work, stdin=null, output=node.log_fd))
    os.close(null)
    if node.stop:
        return False
    made = read_json(answer) or {}
    if status or "python" not in made:
        reason = made.get("error") or f"the step {describe_exit(*decode_wait_status(status))}"
        raise LaunchFailure(f"no environment on node {node.node}: {node.masked(str(reason))}")
    node.prepared, node.python = made, str(made["python"])
    return True


def environment_argv(node: NodeState) -> list[str]:
    """Return the command line of the environment step, without its role."""
    return [*agent_argv(node.config.runtime_tree), "environment"]


def step(node: Supervisor, pid: int) -> int:
    """Wait for one child in its own session, ending it when a stop comes; returns its wait status."""
    node.sessions[pid] = process_start(pid) or ""
    node.record_pids()
    if not node.until(lambda: pid in node.ended):
        end_processes(node, lambda: [pid] if pid not in node.ended else [])
    return node.ended.get(pid, 0)


def last_words(node: NodeState) -> str:
    """Return the last line of this node's log."""
    tail = log_tail(os.path.join(node.logs, f"node-{node.node}.log"), 0, list(node.secrets.values()))
    return tail.splitlines()[-1] if tail else "no output"


def end_containers(node: NodeState) -> None:
    """End the containers of this node: what a container runtime runs is not below this process."""
    if not node.prepared.get("container"):
        return
    argv = [*environment_argv(node), "clean", os.path.join(node.attempt_dir, "agent.json"), str(node.node)]
    try:
        pid = spawn(argv, os.environ, output=node.log_fd)
    except LaunchFailure as error:
        node.log(str(error))
        return
    deadline = time.monotonic() + 30.0
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        if time.monotonic() >= node.next_beat:
            node.write_heartbeat(node.state)
        time.sleep(FAST_POLL_S)
