"""Launches whose options name other machines: the hosts of a file, or Amazon SageMaker.

Such a launch becomes a job and a cluster, by the conversion that `orc config convert` makes of a file. Nothing here
contacts anybody.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.accelerate.config_file import AccelerateConfig, Given
from orc.launchers.accelerate.keys import OPTIONS
from orc.launchers.accelerate.merge import Values, pairs
from orc.launchers.errors import LaunchError
from orc.launchers.spec.source import Document

if TYPE_CHECKING:
    from orc.launchers.accelerate.draft import Note
    from orc.launchers.foreground.launch import LocalLaunch


SAGEMAKER, HOSTS = "sagemaker", "hosts"
CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key")
_FILTERS = ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
_BY_HAND = ("standard", "nossh")  # somebody starts one launch on each machine
_LOGS = "each process has its own log: orc logs JOB --rank N"
_HERE_ONLY = {"tee": _LOGS, "redirects": _LOGS, "log_dir": _LOGS, "role": "processes of a job have the role default"}
_SLOTS = re.compile(r"([^:@,]+)(?::([0-9]+(?:,[0-9]+)*))?")


def place_of(values: Mapping[str, Any], deepspeed: bool) -> str | None:
    """Return `SAGEMAKER` or `HOSTS` where *values* have the launch run there; `None` for this machine.

    Raises:
        LaunchError: options of DeepSpeed's launcher for several machines, and no file of hosts.
    """
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        return SAGEMAKER
    if not deepspeed or values.get("deepspeed_multinode_launcher") in _BY_HAND:
        return None
    if values.get("deepspeed_hostfile"):
        return HOSTS
    for name in (*_FILTERS, "deepspeed_multinode_launcher"):
        if not OPTIONS[name].says_nothing(values.get(name)):
            raise LaunchError(f"--{name} needs --deepspeed_hostfile, the file that names the machines")
    return None


@dataclass(frozen=True)
class JobOfLaunch:
    """Job that a launch becomes: its data, that of its cluster, the notes about the rest, and its directory."""

    job: Mapping[str, Any]
    cluster: Mapping[str, Any]
    notes: Sequence[Note]
    directory: Path

    @property
    def name(self) -> str:
        """Return the name of its cluster."""
        return str(self.job["cluster"])


def job_of(
    place: str,
    values: Values,
    request: LocalLaunch,
    *,
    nproc: int | None,
    runtime: Mapping[str, Any],
    where: str,
) -> JobOfLaunch:
    """Return the job of a launch.

    Args:
        place: what `place_of` said.
        values: of the file and of the flags.
        request: the program, the interpreter and its flags.
        nproc: processes of each machine, where that was said.
        runtime: settings of the runtime that are flags of orc's own.
        where: the configuration file, if there is one.

    Raises:
        LaunchError: what the place cannot do, and host files or filters that cannot be.
    """
    from orc.launchers.accelerate.convert import convert, job_name

    for name, instead in _HERE_ONLY.items():
        if not OPTIONS[name].says_nothing(values.get(name)):
            raise LaunchError(f"{OPTIONS[name].flag} is of launches on this machine; {instead}")
    if request.python_flags:
        raise LaunchError("flags of the interpreter are of launches on this machine; PYTHON... variables are for jobs")
    if place == SAGEMAKER and request.python != sys.executable:
        raise LaunchError("--python is of launches on this machine; py_version says which one a container has")
    if values.get("deepspeed_multinode_launcher") == "mvapich":
        raise LaunchError("--deepspeed_multinode_launcher mvapich: no MPI of this kind can be started; mpich can")
    found = {name: value for name, value in values.found.items() if value is not None}
    chosen: dict[str, Any] = {}
    if place == HOSTS:
        found["distributed_type"] = "DEEPSPEED"
        chosen = _hosts(found, nproc)
    elif nproc is not None:
        raise LaunchError("-n is the number of processes of one machine; ec2_instance_type decides it on SageMaker")
    first = request.program[0]
    title = job_name(Path(first).stem)
    made = convert(_config(found, where), script="launched.py", name=title)
    job = {key: value for key, value in made.job.items() if key != "script"}
    directory = _program(job, request, values)
    if chosen:
        job["resources"] = {**job["resources"], "options": {"ssh": chosen}}
    if runtime:
        job["runtime"] = {**job.get("runtime", {}), **runtime}
    ((_, cluster),) = made.clusters.items()
    cluster = dict(cluster)
    if place == HOSTS:  # as documented: hosts have the same paths
        cluster["python"] = request.python
    # The same place has the same name next time.
    digest = hashlib.sha256(json.dumps(cluster, sort_keys=True).encode()).hexdigest()[:8]
    job["cluster"] = f"launch-{place}-{digest}"
    return JobOfLaunch(job, cluster, made.notes, directory)


def _program(job: dict[str, Any], request: LocalLaunch, values: Values) -> Path:
    """Put the program into *job*; return the directory that travels with it."""
    here = Path.cwd()
    first, *arguments = request.program
    env = {**job.get("env", {}), **pairs(values.get("env", ()))}
    if env:
        job["env"] = _literal(env)
    if request.no_python:
        job |= {"command": _literal([first, *arguments]), "launcher": "python"}
        return here
    if arguments:
        job["args"] = _literal(arguments)
    if request.module:
        job["module"] = first
        return here
    request.argv()  # raises for a script that is not there
    script = Path(first).absolute()
    directory = here if script.is_relative_to(here) else script.parent
    job["script"] = str(script.relative_to(directory))
    return directory


def _literal(value: Any) -> Any:
    """Return *value* so that no text of it is taken for a reference of job files."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"\$(?=\{)", "$$", value)


def _config(found: Mapping[str, Any], where: str) -> AccelerateConfig:
    file = where or "orc launch"
    given = {
        name: Given(option, value, (str(option.key),), file)
        for name, value in found.items()
        if (option := OPTIONS[name]).key is not None and name not in (*_FILTERS, "env")
    }
    return AccelerateConfig(Path(file), Document({}, file, {}, {}), given)


def _hosts(found: dict[str, Any], nproc: int | None) -> dict[str, Any]:
    """Set machines and processes of *found* by the host file and its filters; return the choice of hosts."""
    file = str(Path(found["deepspeed_hostfile"]).expanduser().absolute())
    found["deepspeed_hostfile"] = file
    slots = _slots(file)
    include, exclude = (_filter(found.get(name), name, slots) for name in _FILTERS)
    if include and exclude:
        raise LaunchError("--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other")
    names = [name for name in slots if (not include or name in include) and name not in exclude]
    if not names:
        raise LaunchError("--deepspeed_exclusion_filter leaves no host", where=file)
    if (machines := found.get("num_machines") or 1) > len(names):
        raise LaunchError(
            f"--num_machines {machines}, and there are {len(names)} hosts: {', '.join(names)}", where=file
        )
    nodes = machines if machines > 1 else len(names)
    total = nproc * nodes if nproc is not None else found.get("num_processes")
    if total is None:
        counts = {slots[name] for name in names}
        if len(counts) > 1:
            raise LaunchError(
                "the hosts have different numbers of slots, and each gets as many processes", where=file,
                hint="--num_processes is the number over all hosts.",
            )  # fmt: skip
        total = nodes * counts.pop()
    if total % nodes:
        raise LaunchError(f"--num_processes {total} is not a multiple of the {nodes} machines")
    found |= {"num_machines": nodes, "num_processes": total}
    return {"hosts": names} if len(names) < len(slots) else {}


def _slots(file: str) -> dict[str, int]:
    """Return the hosts of DeepSpeed's file, in its order, and what each has room for. Raises `LaunchError`.

    What else a line says is for the cluster, which reads the file again.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(f"--deepspeed_hostfile: {file} cannot be read: {why}") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, where = words[0].rpartition("@")[2], f"{file}:{number}"
        given = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")] or ["1"]
        if not given[0].isdecimal() or int(given[0]) < 1:
            raise LaunchError(f"slots: {given[0]!r} is no number of processes", where=where)
        if name in found:
            raise LaunchError(f"{name} is listed twice", where=where)
        found[name] = int(given[0])
    if not found:
        raise LaunchError("--deepspeed_hostfile names no host", where=file)
    return found


def _filter(text: str | None, name: str, known: Mapping[str, int]) -> set[str]:
    """Return the hosts that a filter of DeepSpeed names: ``host1@host2``. Raises `LaunchError`."""
    from orc.runtime.core.parsing import nearest

    found = set()
    for part in (text or "").split("@") if text else ():
        match = _SLOTS.fullmatch(part.strip())
        if match is None:
            raise LaunchError(f"--{name} {text!r}: expected hosts with @ between them: worker-0@worker-1")
        if match[2]:
            raise LaunchError(
                f"--{name} {part!r}: slots are not chosen by number; processes take GPUs that are free on a host",
                hint="--num_processes says how many.",
            )
        if match[1] not in known:
            raise LaunchError(f"--{name}: the host file has no host {match[1]!r}{nearest(match[1], known)}")
        found.add(match[1])
    return found
