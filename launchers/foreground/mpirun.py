"""Start of the processes by ``mpirun``: the documented ``mpirun_config`` of a file, and ``--mpirun_hostfile``.

Only one machine runs the command. Each process that mpirun starts is ``python -m orc.launch SCRIPT``, which joins.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from orc.launchers.accelerate.merge import Values
from orc.launchers.errors import LaunchError
from orc.launchers.foreground.launch import LocalLaunch
from orc.launchers.foreground.world import DEFAULT_PORT, joined


def wanted(values: Values, env: Mapping[str, str]) -> bool:
    """Return True where *values* request mpirun and this is no process of one."""
    return bool(values.get("mpirun_hostfile")) and joined(env) is None


def command_line(
    request: LocalLaunch, values: Values, env: Mapping[str, str], version: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of mpirun and its environment.

    Args:
        request: program and variables of the processes.
        values: with ``num_processes``, ``num_machines`` and ``mpirun_hostfile``.
        env: the environment of this process.
        version: the answer to ``mpirun --version``.

    Raises:
        LaunchError: nobody said how many processes, or the host file cannot be read.
    """
    total, machines = values.get("num_processes"), values.get("num_machines", 1)
    if total is None:
        raise LaunchError("--mpirun_hostfile needs --num_processes, the number over all machines")
    if total % machines:
        raise LaunchError(f"--num_processes {total} is not a multiple of --num_machines {machines}")
    hostfile = hostfile_of(values)
    first = values.get("main_process_ip") or _first_host(hostfile)
    own = dict(request.env)
    own.setdefault("MASTER_ADDR", "127.0.0.1" if machines == 1 and first == "localhost" else first)
    if machines > 1 or values.get("main_process_port"):
        own.setdefault("MASTER_PORT", str(values.get("main_process_port") or DEFAULT_PORT))
    own.setdefault("CCL_WORKER_COUNT", str(values.get("mpirun_ccl", 1)))
    own.setdefault("CCL_ATL_TRANSPORT", env.get("CCL_ATL_TRANSPORT", "ofi"))
    words = _placement(version, hostfile, total, machines)
    if "Open MPI" in version:
        words += [word for name in own for word in ("-x", name)]  # it passes its own environment on by name
    kind = ["--module"] if request.module else ["--no_python"] if request.no_python else []
    file = ["--config_file", values.get("config_file")] if "config_file" in values.given else []
    launch = [request.python, *request.python_flags, "-m", "orc.launch", *file, *kind, "--", *request.program]
    return ["mpirun", *words, *launch], {**env, **own}


def hostfile_of(values: Values) -> Path:
    """Return the path of the host file that *values* name."""
    return Path(values.get("mpirun_hostfile")).expanduser()


def check_hosts(words: list[str], machines: int, env: Mapping[str, str], limit_s: float = 60.0) -> None:
    """Raise `LaunchError` unless the command line *words* of mpirun starts a process on each of the *machines*.

    Where SSH asks for a password mpirun waits for ever, and so would the run.
    """
    import subprocess

    hint = f"Every host must be reached by SSH without a password from every other; try: {shlex.join(words)}"
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=limit_s, env=dict(env), check=False
        )
    except subprocess.TimeoutExpired as late:
        seen = sorted(set((late.stdout or b"").decode(errors="replace").split()))
        known = f"; answers came from {', '.join(seen)}" if seen else ""
        raise LaunchError(f"mpirun has not reached {machines} machines in {limit_s:g} s{known}", hint=hint) from None
    seen = sorted(set(done.stdout.split()))
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2][-300:]
        raise LaunchError(f"mpirun cannot start a process on every machine: {said}", hint=hint)
    if len(seen) < machines:
        found = ", ".join(seen) or "none"
        raise LaunchError(f"mpirun was to reach {machines} machines, and answers came from {found}", hint=hint)


def _placement(version: str, hostfile: Path, total: int, machines: int) -> list[str]:
    """Return the words that place *total* processes, as many on each of the *machines*."""
    if "Open MPI" in version:
        words = ["--hostfile", str(hostfile), "-n", str(total)]
        words += ["--map-by", f"ppr:{total // machines}:node"] if machines > 1 else []
        return [*words, "--allow-run-as-root"] if os.getuid() == 0 else words
    return ["-f", str(hostfile), "-n", str(total), "-ppn", str(total // machines)]


def start(request: LocalLaunch, values: Values, env: Mapping[str, str]) -> NoReturn:
    """Become mpirun. Raises `LaunchError` where there is none, and those of `command_line`."""
    program = shutil.which("mpirun", path=env.get("PATH"))
    if program is None:
        raise LaunchError(
            "--mpirun_hostfile: there is no mpirun on this machine",
            hint="Source the setvars.sh of Intel MPI, or install Open MPI.",
        )
    import subprocess

    said = subprocess.run([program, "--version"], capture_output=True, text=True, env=dict(env), check=False).stdout
    words, variables = command_line(request, values, env, said)
    if (machines := values.get("num_machines", 1)) > 1:
        check_hosts([program, *_placement(said, hostfile_of(values), machines, machines), "hostname"], machines, env)
    os.execve(program, words, variables)  # noqa: S606 — no shell


def _first_host(hostfile: Path) -> str:
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--mpirun_hostfile cannot be read: {error}", where=str(hostfile)) from None
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            return words[0].partition(":")[0]
    raise LaunchError("--mpirun_hostfile names no host", where=str(hostfile))
