"""The shim around one rank of a launcher: its variables, its own log, its true exit status.

Launchers number their ranks in
variables of their own; a training script reads the ones that torch reads, whoever has started it.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from orc.launchers.agent.errors import EXIT_CANCELLED, LaunchFailure, log_stderr
from orc.launchers.agent.gpus import own_part
from orc.launchers.agent.processes import (
    ENDING,
    PR_SET_PDEATHSIG,
    decode_wait_status,
    make_private,
    next_signal,
    prctl,
    shell_exit_status,
    signal_process,
    spawn,
    take_signals,
    users_umask,
)
from orc.launchers.agent.procfs import boot_id, process_start, process_stat
from orc.launchers.agent.records import read_json, remove, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn


# Where each variable comes from: the first that is set. Open MPI; PMIx (PRRTE); MPICH, Intel MPI (hydra); Slurm.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "RANK": ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": (
        *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PMIX_LOCAL_RANK"),
        "SLURM_LOCALID",
    ),
    "WORLD_SIZE": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_WORLD_SIZE": (
        *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        "ORC_NPROC",
    ),
}


def translated_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, LOCAL_RANK and so on from what a launcher has set; what it has set itself stays."""
    found = {}
    for name, sources in SOURCES.items():
        value = next((env[source] for source in sources if env.get(source)), None)
        if value is not None and env.get(name) != value:
            found[name] = value
    return found


def node_of(attempt_dir: str) -> tuple[int, dict[str, str]] | None:
    """Return the node that this process belongs to, and the variables of that node alone: by the agent it descends
    from.

    Not from the environment: launchers pass that of the first node on to all.
    """
    agents = {}
    boot = boot_id()
    for name in os.listdir(attempt_dir):
        if name.startswith("node-"):
            noted = read_json(os.path.join(attempt_dir, name, "pids.json")) or {}
            if noted.get("boot_id") == boot:
                agents[int(noted["agent"]["pid"])] = (int(name[len("node-") :]), dict(noted.get("env") or {}))
    pid = os.getppid()
    while pid > 1:
        if pid in agents:
            return agents[pid]
        stat = process_stat(pid)
        if stat is None:
            return None
        pid = int(stat[1])
    return None


def complete_environment(env: dict[str, str], attempt_dir: str) -> None:
    """Complete *env*, which a launcher has made, with what belongs to this rank."""
    own = node_of(attempt_dir)
    if own is not None:
        env.update({"ORC_NODE_RANK": str(own[0]), **own[1]})
    by_launcher = "RANK" in env and "MASTER_ADDR" in env  # torchrun, deepspeed
    env.update(translated_variables(env))
    met = read_json(os.path.join(attempt_dir, f"rendezvous-r{env.get('ORC_RESTART', '0')}.json"))
    if met is not None and not by_launcher:
        env.update(MASTER_ADDR=str(met["addr"]), MASTER_PORT=str(met["port"]))
    env.setdefault("NODE_RANK", env.get("ORC_NODE_RANK", "0"))
    env.setdefault("GROUP_RANK", env["NODE_RANK"])
    env.update(own_part(env, int(env.get("LOCAL_RANK") or 0), int(env.get("LOCAL_WORLD_SIZE") or 1)))


def run(program: Sequence[str]) -> NoReturn:
    """Run one rank of a launcher: its own log, its true exit status on record, and the same status passed on."""
    env = dict(os.environ)
    attempt_dir = env.get("ORC_ATTEMPT_DIR")
    rank = next((env[name] for name in SOURCES["RANK"] if env.get(name)), None)
    if rank is None or attempt_dir is None or not program:
        raise LaunchFailure("the rank shim runs below a launcher of an orc agent: RANK and ORC_ATTEMPT_DIR must be set")
    complete_environment(env, attempt_dir)
    restart = env.get("ORC_RESTART", "0")
    base = os.path.join(attempt_dir, f"node-{env.get('ORC_NODE_RANK', '0')}", f"rank-{rank}-r{restart}")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    take_signals()
    if os.path.exists(os.path.join(attempt_dir, f"stop-r{restart}.json")) or os.path.exists(
        os.path.join(attempt_dir, "cancel.json")
    ):
        os._exit(EXIT_CANCELLED)  # a launcher that restarts its ranks while the attempt is being stopped
    log = os.path.join(env.get("ORC_LOGS_DIR") or os.path.join(attempt_dir, "logs"), f"rank-{rank}.log")
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    me: dict[str, Any] = {
        "rank": int(rank),
        "local_rank": int(env.get("LOCAL_RANK") or 0),
        "round": int(env.get("TORCHELASTIC_RESTART_COUNT") or 0),
        "pid": os.getpid(),
        "start": process_start(os.getpid()) or "",
        "log_start": os.fstat(fd).st_size,
        "began": time.time(),
    }
    make_private()
    told = False
    code: int | None
    name: str | None
    try:
        pid = spawn(program, env, output=fd, umask=users_umask())
    except LaunchFailure as error:
        os.write(fd, f"orc agent: {error}\n".encode())
        code, name = 127, None
    else:
        os.close(fd)
        me["program"] = {"pid": pid, "start": process_start(pid) or ""}
        remove(f"{base}.json")  # of an earlier round
        write_json(f"{base}.pid", me, durable=False)
        while True:
            received = next_signal(3600.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                told = told or received.si_signo in ENDING
                signal_process(pid, received.si_signo)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code, name = decode_wait_status(status)
                break
    record = {**me, "exit_code": code, "signal": name, "told": told, "at": time.time()}
    try:
        write_json(f"{base}.json", record)
    except OSError as error:
        log_stderr(f"cannot write {base}.json: {error}: {record}")
    end_like(code, name)


def end_like(code: int | None, name: str | None) -> NoReturn:
    """End this process the way another one has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if name is not None:
        number = shell_exit_status(code, name) - 128
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump, of the program itself, is enough
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(shell_exit_status(code, name))
