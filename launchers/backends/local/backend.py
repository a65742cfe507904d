"""Backend for this machine. N simulated nodes are N agents; nothing needs to keep running but they."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orc.launchers.backends.base import (
    Backend,
    Handle,
    NodeEntry,
    Observation,
    Phase,
    Placement,
    Snapshot,
    cancel_request,
    refuse_range,
    require_secrets,
)
from orc.launchers.errors import AmbiguousSubmit, BackendError, NoRoom, RenderError
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId
from orc.launchers.oldest_python import brings_python, python_problem
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand
from orc.launchers.strict_modes import VARIABLE

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.remote.transport import LocalTransport, Transport
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets

START_TIMEOUT_S = 60.0  # far more than a Python start takes, on a machine that swaps
FRESH_S = 60.0  # a heartbeat of this age still shows that a job runs on another machine
_HELD, _BUSY = 76, 78


class LocalBackend(Backend):
    """Runs attempts as detached agents on this machine, below the cluster's root directory."""

    kind = "local"
    is_remote = False
    passes_artefacts = True
    self_driving = True

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        """*state_dir* is where the controller keeps its ledger, for the pass that an ended attempt starts."""
        from orc.launchers import paths

        super().__init__(cluster, state_dir=state_dir or paths.state_dir(create=False))
        self.layout = Layout.at(self.root)
        self._config_env = {"ORC_STATE_DIR": str(self.state_dir), "ORC_CONFIG_DIR": str(paths.config_dir())}
        if os.environ.get("ORC_CLUSTERS"):  # a clusters file that is named must exist; the default one need not
            self._config_env["ORC_CLUSTERS"] = str(paths.clusters_file())
        if trusted := os.environ.get(VARIABLE):
            self._config_env[VARIABLE] = trusted
        if cluster.options:
            what = f"clusters of kind local have no options, but {', '.join(cluster.options)} is given"
            raise RenderError(what, where=f"cluster {cluster.name}")

    @property
    def root(self) -> str:
        """The directory in clusters.yaml, or the state directory."""
        return (Path(self.cluster.root).expanduser() if self.cluster.root else self.state_dir).as_posix()

    @cached_property
    def _transport(self) -> LocalTransport:
        from orc.launchers.remote.transport import LocalTransport

        return LocalTransport()

    # -- before the start

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """Return one file, ``agent.json``, and one command that starts all agents and returns."""
        from orc.launchers.attempts.agent_config import agent_config, agent_file

        refuse_range(job, "the local cluster runs a fixed number of simulated nodes")
        if options := job.resources.options.get(self.kind):
            what = f"resources.options.local: unknown key {next(iter(options))!r}; the local cluster has no options"
            raise RenderError(what, where=job.name)
        config = agent_config(
            job,
            snapshot,
            attempt,
            self.cluster,
            self.layout,
            deadline_s=job.resources.time_s,
            on_exit={
                "argv": [sys.executable, "-m", "orc.orchestrator.cli.main", "tick", "--job", attempt.job],
                "env": self._config_env,
            },
        )
        # For preflight alone: the nodes are simulated, so this machine has to hold what all of them ask for.
        asked = {"gpus": job.resources.gpus_per_node, "memory_bytes": job.resources.memory_bytes}
        if any(asked.values()):
            config = config.replace(backend={key: value * config.nnodes for key, value in asked.items() if value})
        if gpus := job.resources.gpus_per_node:
            config = config.replace(slots={"take": gpus, "gpus": True})  # a slot for each GPU of this machine
        file = agent_file(config)
        # The tree's __main__.py runs the agent. -I -S: nothing of the user's Python environment gets into it, and it
        # starts in half the time.
        gang = ("gang", file.path, "--owner", f"local:{attempt.marker}")
        argv = (sys.executable, "-I", "-S", config.runtime_tree, *gang)
        start = PlanCommand(argv, purpose="start the agents of all nodes on this machine")
        return self.plan_of(job, snapshot, attempt, config.env, (file,), (start,))

    def preflight(self, plan: Plan) -> list[Finding]:
        """Check that the root can be written, the Python is there, and cores and GPUs are enough."""
        import shutil

        findings, root = [], Path(self.root)
        existing = next(path for path in (root, *root.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            hint = "Set ORC_STATE_DIR, or `root:` of the cluster, to a directory that you can write."
            what = f"{existing} cannot be written" if existing.is_dir() else f"{existing} is not a directory"
            findings.append(Finding("error", what, self.cluster.name, hint))
        elif (free := shutil.disk_usage(existing).free) < 64 << 20:
            # Below 1 MiB not even the records of a job find room.
            level: Literal["warning", "error"] = "warning" if free >= 1 << 20 else "error"
            findings.append(Finding(level, f"only {free >> 20} MiB are free in {existing}", self.cluster.name))
        config = json.loads(plan.files[0].content)
        python = config["python"]
        if python and shutil.which(python) is None:
            findings.append(Finding("error", f"{python}: no such program", self.cluster.name, "Correct `python:`."))
        elif python and (problem := _python_problem(python, environment=brings_python(config.get("environment")))):
            hint = "Correct `python:`, or give the job an `environment:`."
            findings.append(Finding("error", problem, self.cluster.name, hint))
        elif not config.get("environment") and (problem := _fp8_problem(python or sys.executable, plan.env)):
            findings.append(Finding("error", problem, self.cluster.name, "Install it there, or choose bf16."))
        elif config.get("slots") and not config.get("environment"):
            findings += self._cpu_torch(python or sys.executable, int(config["slots"]["take"]))
        processes = config["nnodes"] * config["nproc"]
        cores = len(os.sched_getaffinity(0))
        if processes > cores:
            findings.append(Finding("info", f"{processes} processes share {cores} cores", self.cluster.name))
        return [*findings, *self._too_much(config.get("backend", {}), plan.env)]

    def _cpu_torch(self, python: str, gpus: int) -> Iterator[Finding]:
        """Yield a warning where the ranks' torch cannot use the GPUs that the job asks for."""
        from orc.launchers.hosts.checks import cpu_torch

        code = (
            "import importlib.util as u, os, runpy; s = u.find_spec('torch'); "
            "v = runpy.run_path(os.path.join(s.submodule_search_locations[0], 'version.py')) if s else {}; "
            "print(v.get('__version__', ''), v.get('cuda') or v.get('hip') or '')"
        )
        with suppress(OSError):  # the ranks say what is wrong with it
            if len(words := _ask(python, "-c", code)) == 1:
                yield cpu_torch(words[0], gpus, self.cluster.name)

    def _too_much(self, asked: Mapping[str, int], env: Mapping[str, str]) -> Iterator[Finding]:
        """Yield what the job requests and this machine does not have."""
        from orc.launchers.agent.errors import LaunchFailure
        from orc.launchers.agent.gpus import gpu_names

        if gpus := asked.get("gpus"):
            try:
                there = len(gpu_names({**os.environ, **env}))
            except LaunchFailure as error:
                hint = "See `nvidia-smi` and `dmesg | grep -i nvrm` here."
                yield Finding("error", str(error), self.cluster.name, hint)
            else:
                what = f"the job asks for {gpus} GPU{'s' * (gpus != 1)}, this machine has {there}"
                hint = "Lower resources.gpus_per_node, or choose another cluster."
                if gpus > there:
                    yield Finding("error", what, self.cluster.name, hint)
        wanted, memory = asked.get("memory_bytes", 0), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if wanted > memory:
            what = f"the job asks for {wanted / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f} GiB"
            yield Finding("error", what, self.cluster.name, "Lower resources.memory, or choose another cluster.")
        elif wanted:
            what = "resources.memory is compared with what this machine has, and limits nothing: the job may take more"
            how = "`systemd-run --user --scope -p MemoryMax=4G orc submit`"
            yield Finding("warning", what, self.cluster.name, f"Limit it yourself where that matters, as with {how}.")

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the one store, below the root."""
        from orc.launchers.transfer.targets import Targets

        return Targets({self.cluster.name: (self._transport, self.root)}, {})

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Write the files, start the gang, and return when it holds the attempt.

        Raises `NoRoom` while other jobs have the GPUs that it needs.
        """
        import subprocess

        from orc.launchers.agent.variables import without_own

        if found := self.find(plan.marker):
            return found
        values = require_secrets(plan, secrets)
        transport = self._transport
        directory = str(self.layout.attempt(plan.attempt))
        for file in plan.files:
            transport.write(file.path, file.content.encode(), mode=file.mode)
        secrets_path = f"{directory}/secrets.json"
        if values:
            transport.write(secrets_path, json.dumps(values).encode(), mode=0o600)
        env = without_own(os.environ, of_service=self.cluster.run_as == "service")
        env["ORC_GANG"] = plan.marker  # whoever submits this from within a job must not end it with itself
        try:
            done = subprocess.run(
                plan.commands[0].argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise AmbiguousSubmit(f"the agent did not answer within {START_TIMEOUT_S:g} s", where=plan.marker) from None
        except OSError as error:
            transport.remove(secrets_path)
            raise BackendError(f"cannot start the agent: {error.strerror}", where=plan.commands[0].argv[0]) from None
        if done.returncode == 0:
            return self._handle(plan.marker, time.time())
        if done.returncode in (_HELD, _BUSY) and (found := self.find(plan.marker)):
            return found
        transport.remove(secrets_path)
        said = done.stderr.decode(errors="replace").strip().removeprefix("orc agent: ")
        if done.returncode == _BUSY:
            raise NoRoom(said, where=self.cluster.name)
        raise BackendError(f"the agent could not start: {said or f'exit status {done.returncode}'}", where=directory)

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Look for the gang's lease, and for a process with the marker in its arguments that is about to write one."""
        from orc.launchers.agent.records import checked, read_json

        directory = str(self.layout.attempt(AttemptId.from_marker(marker)))
        lease = checked(read_json(f"{directory}/gang.json") or {}) or None
        if lease is not None and lease.get("marker") == marker:
            return self._handle(marker, float(lease.get("at") or 0.0))
        return self._handle(marker, time.time()) if _is_starting(marker, directory) else None

    def _handle(self, marker: str, at: float) -> Handle:
        return Handle(self.cluster.name, self.kind, marker, str(self.layout.attempt(AttemptId.from_marker(marker))), at)

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Read the records of the agents. An attempt that is reported as lost has no process left on this machine."""
        from orc.launchers.attempts.confidential import remove_confidential
        from orc.launchers.attempts.reader import read_attempts

        transport = self._transport
        planned = {handle.native_id: handle.nodes for handle in handles}
        records = read_attempts(transport, list(planned), planned)
        gone = [h for h in handles if not records[h.native_id].complete and _agents(records[h.native_id]) == "gone"]
        # What `find` adopts may not have got as far as its lease.
        starting = {h for h in gone if not records[h.native_id].leases and _is_starting(h.marker, h.native_id)}
        if again := [h.native_id for h in gone if h not in starting]:
            # They may have written their last record after it was looked for.
            records.update(read_attempts(transport, again, planned))
        seen = {h: _STARTING if h in starting else self._observe(records[h.native_id]) for h in handles}
        ended = [h.native_id for h in handles if seen[h].phase.ended and records[h.native_id].has_secrets]
        remove_confidential(transport, ended)
        return seen

    def _observe(self, records: AttemptRecords) -> Observation:
        from orc.launchers.backends.verdict import facts_of, observe

        agents = "ended" if records.complete else _agents(records)
        if agents == "elsewhere":
            return _seen_from_afar(records, facts_of(records))
        if agents == "gone":
            from orc.launchers.agent.processes import kill_attempt

            kill_attempt(records.directory)
        return observe(records, alive=agents == "alive", lost="" if agents == "alive" else _lost_reason(records))

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return this machine, and the attempt's directory."""
        return self._transport, handle.native_id

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """Return entries without a prefix: every node is this machine."""
        from orc.launchers.agent.records import checked, read_json

        config = checked(read_json(f"{handle.native_id}/agent.json") or {})
        return [
            NodeEntry(node, os.uname().nodename, handle.native_id, sys.executable)
            for node in range(int(config.get("nnodes", 1)))
        ]

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Write a request for the agents; where they are gone, end what they have left behind."""
        from orc.launchers.agent.processes import kill_attempt
        from orc.launchers.attempts.reader import read_attempts

        transport = self._transport
        for directory, records in read_attempts(transport, [handle.native_id for handle in handles]).items():
            if records.complete:
                continue
            removed = not Path(directory).is_dir()
            if not removed:
                try:
                    transport.write(f"{directory}/cancel.json", json.dumps(cancel_request(grace)).encode(), mode=0o600)
                except BackendError:  # a full disk: the agents take this signal for the same wish
                    if not _signal_agents(records, signal.SIGINT):
                        raise
            if removed or _agents(records) == "gone":
                kill_attempt(directory)


_STARTING = Observation(Phase.PENDING, reason="starting")


def _is_starting(marker: str, directory: str) -> bool:
    """Return True while there is a process that was started as this attempt's gang, with or without a lease yet."""
    if not Path(directory).is_dir():
        return False  # it is there before the gang: somebody has removed it since
    wanted = {os.fsencode(f"local:{marker}"), os.fsencode(f"{directory}/agent.json")}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                arguments = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is none of ours
            if wanted.issubset(arguments):
                return True
    return False


def _agents(records: AttemptRecords) -> str:
    """Return ``alive``, ``gone``, or ``elsewhere``: started on another machine that shares the root."""
    from orc.launchers.agent.procfs import holder_runs

    leases = [*records.leases.values(), *([records.gang] if records.gang else [])]
    if any(map(holder_runs, leases)):
        return "alive"
    return "elsewhere" if any(lease.get("host") != os.uname().nodename for lease in leases) else "gone"


def _signal_agents(records: AttemptRecords, number: signal.Signals) -> bool:
    """Send a signal to the agents that run on this machine; False when there are none."""
    from orc.launchers.agent.processes import signal_process
    from orc.launchers.agent.procfs import holder_runs

    alive = [int(lease["pid"]) for lease in records.leases.values() if holder_runs(lease)]
    for pid in alive:
        signal_process(pid, number)
    return bool(alive)


def _seen_from_afar(records: AttemptRecords, common: Mapping[str, Any]) -> Observation:
    host = next(iter(records.hosts), None) or str((records.gang or {}).get("host"))
    if records.last_sign is not None and time.time() - records.last_sign < FRESH_S:
        return Observation(Phase.RUNNING, reason=f"on {host}", **common)
    return Observation(Phase.UNKNOWN, reason=f"started on {host}, look there", **common)


def _lost_reason(records: AttemptRecords) -> str:
    from orc.launchers.agent.procfs import boot_id

    if not Path(records.directory).is_dir():
        return f"{records.directory} was removed"
    if any(lease.get("boot_id") != boot_id() for lease in records.leases.values()):
        return "the machine was restarted"
    if not records.leases:
        return "the agents were killed before they started anything"
    silent = [str(node) for node in range(records.nnodes) if node not in records.exits]
    return f"the agent of node {', '.join(silent)} was killed"


def _ask(python: str, *words: str) -> list[str]:
    """Return the words that a Python prints. Raises `OSError` with the reason where it cannot be run, or fails."""
    import subprocess

    try:
        done = subprocess.run((python, *words), capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout.split()


def _fp8_problem(python: str, env: Mapping[str, str]) -> str | None:
    """Return the reason why ranks under *python* cannot train in the fp8 that *env* requests; `None` when they can."""
    if env.get("ORC_MIXED_PRECISION", env.get("ACCELERATE_MIXED_PRECISION")) != "fp8":
        return None
    from orc.runtime.core import fp8_settings

    modules = dict(fp8_settings.BACKENDS)
    code = f"from importlib.util import find_spec as f; print(*[k for k, m in {modules!r}.items() if f(m)])"
    try:
        fp8_settings.choose(env.get("ACCELERATE_FP8_BACKEND"), _ask(python, "-c", code))
    except OSError as error:
        return f"{python} cannot say which back ends of fp8 it has: {error}"
    except ValueError as error:
        return f"{python}: {error}"
    return None


def _python_problem(python: str, *, environment: bool) -> str | None:
    """Return the reason why ranks cannot start under *python*, which is there; `None` when they can."""
    if python == sys.executable:
        return None
    try:
        version = tuple(map(int, _ask(python, "-I", "-S", "-c", "import sys; print(*sys.version_info[:3])")))
    except (OSError, ValueError) as error:
        return f"{python} cannot be started: {error}"
    if not version:
        return f"{python} cannot be started: it printed no version"
    problem = python_problem(version, environment=environment)
    return f"{python} is {problem}" if problem else None
