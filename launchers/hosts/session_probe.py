"""Program on a node of a running job for `orc exec`, `ssh`, `top` and `stacks`. Sent as text: standard library only.

    exec <attempt> <node> [--rank=R] [--tty] [--attend] -- program args...
                                                                  become a program of the job (no program: a shell)
    sample <attempt> <node> <interval> <count>                    print measurements, one JSON object per line
    stacks <attempt> <node> <seconds>                             ask the agents for the stacks of all ranks

The attempt's directory may begin with ``~``. The agent is imported from the job's own runtime tree: the environment is
made by the code that made the ranks'.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

GRACE_S = 5.0  # between SIGHUP and SIGKILL
_HZ = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class NodeSessionError(Exception):
    """The session on the node failed; the message is shown to people."""


def read(path: str) -> dict[str, Any] | None:
    """Return a JSON record; `None` when it is not there."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def config_of(directory: str) -> dict[str, Any]:
    """Return the configuration of the attempt's agents."""
    config = read(os.path.join(directory, "agent.json"))
    if config is None:
        raise NodeSessionError(f"{directory} is not on this host: the attempt has not come here, or was removed")
    return config


def find_agent(config: dict[str, Any]) -> None:
    """Let ``orc.launchers.agent`` be imported as this job runs it."""
    tree = str(config["runtime_tree"])
    lib = os.path.join(tree, "lib")
    if not os.path.exists(os.path.join(lib, "orc", "launchers", "agent")):
        if os.path.isdir(tree):
            raise NodeSessionError("an earlier version of orc started this job: use that version")
        raise NodeSessionError(f"the job's runtime tree {tree} was removed")
    sys.path.insert(0, lib)


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process of this user was started with; empty when it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return {}
    return {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (word.partition(b"=") for word in words) if name
    }


def processes(directory: str, node: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield pid and environment of the job's processes on this node."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        env = environ_of(int(name))
        if env.get("ORC_ATTEMPT_DIR") == directory and env.get("ORC_NODE_RANK") == str(node):
            yield int(name), env


# --- exec ----------------------------------------------------------------------------------------------------------


def enter(directory: str, node: int, options: Sequence[str], program: Sequence[str]) -> NoReturn:
    """Become *program*, in the job's working copy, with its environment."""
    config = config_of(directory)
    rank = next((option.partition("=")[2] for option in options if option.startswith("--rank=")), None)
    answer = read(os.path.join(directory, f"node-{node}", "environment.json")) or {}
    env = rank_environment(directory, node, rank) if rank is not None else node_environment(config, node, answer)
    for name in ("TERM", "SSH_TTY", "COLUMNS", "LINES"):
        if name in os.environ:
            env[name] = os.environ[name]
    work = os.path.join(str(config["job_dir"]), "work")
    try:
        os.chdir(work)
    except OSError as error:
        raise NodeSessionError(
            f"{work}: {error.strerror}; the job's setup has not begun, or the job was removed"
        ) from None
    prefix = list(answer.get("prefix") or ())
    if prefix and "--tty" in options:
        prefix.insert(prefix.index("--"), "--tty")
    shell = "/bin/sh" if prefix else os.environ.get("SHELL") or "/bin/sh"
    argv = [*prefix, *(program or [shell])]
    if "--attend" in options:
        attend(argv, env)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise NodeSessionError(f"{argv[0]}: {error.strerror}") from None


def attend(argv: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Run a program and end it when its output is not read any more: sshd ends the programs of terminals only."""
    import select
    import shutil
    import signal

    if shutil.which(argv[0], path=env.get("PATH")) is None:
        raise NodeSessionError(f"{argv[0]}: No such file or directory")
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            os.execvpe(argv[0], list(argv), env)
        finally:
            os._exit(125)
    try:
        os.setpgid(pid, pid)  # on both sides: it may be told to end before it has got as far
    except OSError:  # it has, and has gone on
        pass
    poll = select.poll()
    poll.register(1, 0)  # a hang-up is always reported
    told_at = float("inf")
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        if told_at == float("inf") and poll.poll(20):
            told_at = time.monotonic()
            poll.unregister(1)
            os.killpg(pid, signal.SIGHUP)
        elif time.monotonic() > told_at + GRACE_S:
            os.killpg(pid, signal.SIGKILL)
        elif told_at != float("inf"):
            time.sleep(0.02)


def rank_environment(directory: str, node: int, rank: str) -> dict[str, str]:
    """Return the environment that one rank was started with."""
    found = sorted((pid, env) for pid, env in processes(directory, node) if env.get("RANK") == rank)
    if not found:
        raise NodeSessionError(f"rank {rank} does not run on this node now")
    return found[0][1]


def node_environment(config: dict[str, Any], node: int, answer: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the job's processes on this node, with that of the agent as its base."""
    find_agent(config)
    from orc.launchers.agent.config import AgentConfig
    from orc.launchers.agent.node import Node
    from orc.launchers.agent.ranks import job_environment

    directory = str(config["attempt_dir"])
    lease = read(os.path.join(directory, f"node-{node}", "lease.json")) or {}
    surroundings = environ_of(int(lease.get("pid") or 0)) if lease else {}
    if surroundings:
        os.environ.clear()
        os.environ.update(surroundings)
    one = Node(AgentConfig(config), node, str(lease.get("owner") or ""), int(lease.get("restart") or 0))
    one.prepared = answer
    one.secrets = {name: str(value) for name, value in (read(os.path.join(directory, "secrets.json")) or {}).items()}
    return job_environment(one)


# --- sample --------------------------------------------------------------------------------------------------------


def machine() -> tuple[float, float]:
    """Return seconds of all processors since the start: busy and in all."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / _HZ, sum(ticks) / _HZ


def usage(pid: int) -> tuple[float, int] | None:
    """Return processor seconds and resident bytes of one process."""
    from orc.launchers.agent.procfs import process_stat

    fields = process_stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return (int(fields[11]) + int(fields[12])) / _HZ, int(fields[21]) * _PAGE


def memory() -> tuple[int, int]:
    """Return bytes used and in all."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in file)}
    return lines["MemTotal"] - lines["MemAvailable"], lines["MemTotal"]


def gpus() -> list[dict[str, Any]]:
    """Return the rows of nvidia-smi; none where there is no such program."""
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=index,utilization.gpu,memory.used,memory.total,temperature.gpu"
    try:
        done = subprocess.run([program, query, "--format=csv,noheader,nounits"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.decode().splitlines()]
    names = ("index", "utilisation", "memory_used_mib", "memory_mib", "temperature_c")
    return [{n: int(w) if w.isdigit() else None for n, w in zip(names, row)} for row in rows if len(row) == 5]  # noqa: B905


def device_memory(home: str, rank: str) -> dict[str, int]:
    """Return the bytes of its GPU that a rank has last told of; nothing where it trains on none."""
    told = (read(os.path.join(home, f"device-{rank}.json")) or {}) if rank.isdigit() else {}
    names = ("memory_allocated", "memory_reserved", "memory_peak")
    return {name: told[name] for name in names if isinstance(told.get(name), int)}


class Sampler:
    """Measurements of one node; rates are those since the measurement before."""

    def __init__(self, directory: str, node: int) -> None:
        self.directory, self.node = directory, node
        find_agent(config_of(directory))
        self.before = self.measure()

    def measure(self) -> dict[str, Any]:
        """Return the counters as they are now."""
        ranks: dict[str, dict[str, Any]] = {}
        for pid, env in processes(self.directory, self.node):
            used = usage(pid)
            if used is None:
                continue
            one = ranks.setdefault(env.get("RANK", ""), {"pids": {}, "rss": 0})
            one["pids"][pid] = used[0]
            one["rss"] += used[1]
        return {"at": time.time(), "clock": time.monotonic(), "machine": machine(), "ranks": ranks}

    def sample(self) -> dict[str, Any]:
        """Return one line of output."""
        before, now = self.before, self.measure()
        self.before = now
        length = max(now["clock"] - before["clock"], 1e-3)
        busy, every = (after - earlier for after, earlier in zip(now["machine"], before["machine"]))  # noqa: B905
        used, total = memory()
        home = os.path.join(self.directory, f"node-{self.node}")
        beat = read(os.path.join(home, "heartbeat.json")) or {}
        ended = read(os.path.join(home, "exit.json"))
        return {
            "node": self.node,
            "host": os.uname().nodename,
            "at": now["at"],
            "state": str(ended["outcome"]) if ended else beat.get("state"),
            "cpus": os.cpu_count(),
            "cpu_percent": round(100.0 * busy / every, 1) if every else 0.0,
            "load": round(os.getloadavg()[0], 2),
            "memory_used": used,
            "memory_total": total,
            "gpus": gpus(),
            "ranks": [
                {**self.rank(number, now, before, length), **device_memory(home, number)}
                for number in sorted(now["ranks"], key=order)
            ],
            "progress": read(os.path.join(home, "progress.json")) or beat.get("progress") or {},
        }

    @staticmethod
    def rank(number: str, now: dict[str, Any], before: dict[str, Any], length: float) -> dict[str, Any]:
        """Return usage of one rank with all its processes; those without a rank (launcher, setup) have none."""
        one = now["ranks"][number]
        earlier = before["ranks"].get(number, {"pids": {}})["pids"]
        spent = sum(used - earlier.get(pid, used) for pid, used in one["pids"].items())
        return {
            "rank": int(number) if number.isdigit() else None,
            "processes": len(one["pids"]),
            "cpu_percent": round(100.0 * spent / length, 1),
            "rss": one["rss"],
        }


def order(number: str) -> tuple[bool, int]:
    """Return the sort key of a rank; processes without one come last."""
    return not number.isdigit(), int(number) if number.isdigit() else 0


def sample(directory: str, node: int, interval: float, count: int) -> None:
    """Print *count* measurements, *interval* seconds apart; 0 goes on until the reader is gone."""
    import select

    sampler = Sampler(directory, node)
    quiet = select.poll()
    quiet.register(1, 0)  # a hang-up is always reported
    done = 0
    while True:
        if quiet.poll(1000 * interval):
            return  # the reader is gone
        print(json.dumps(sampler.sample()), flush=True)
        done += 1
        if done == count:
            return


def main(arguments: Sequence[str]) -> int:
    """Run one mode; returns the exit status."""
    mode, directory, number, *rest = arguments
    directory, node = os.path.expanduser(directory), int(number)
    try:
        if mode == "exec":
            cut = rest.index("--")
            enter(directory, node, rest[:cut], rest[cut + 1 :])
        elif mode == "sample":
            sample(directory, node, float(rest[0]), int(rest[1]))
        elif mode == "stacks":
            find_agent(config_of(directory))
            from orc.launchers.agent.__main__ import run

            return run(["stacks", directory, "--timeout", rest[0]])
    except NodeSessionError as error:
        sys.stderr.write(f"orc: {error}\n")
        return 125
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
