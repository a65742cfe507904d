"""The Slurm backend: a thin shell around pure rendering (`script`) and pure judgement (`verdict`)."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from orc.launchers.backends.base import (
    Backend,
    DiscoveredCluster,
    Handle,
    NodeEntry,
    Observation,
    Phase,
    Placement,
    QueueReport,
    Snapshot,
    cancel_request,
)
from orc.launchers.backends.slurm.login import DEFAULT_PYTHON, entry_python, open_transport, root_of
from orc.launchers.backends.slurm.options import (
    MEMORY,
    ClusterOptions,
    SlurmOptions,
    SlurmSettings,
    read_options,
    read_settings,
)
from orc.launchers.backends.slurm.submission import SlurmJobs, job_of_owner, of_handles
from orc.launchers.errors import SpecError
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId
from orc.launchers.oldest_python import brings_python
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand, PlanFile

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.backends.slurm.queue_rows import JobRow
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets


class SlurmBackend(Backend):
    """Backend of one Slurm cluster. Without *transport* it is entered here, or over SSH to its login node."""

    kind = "slurm"
    options_model, job_options_model = ClusterOptions, SlurmOptions
    passes_artefacts = True
    discovery_options: ClassVar[Mapping[str, tuple[str, str]]] = {
        "login": ("[USER@]HOST", "Login node, reached over SSH. [default: this machine]"),
        "ssh_config": ("PATH", "SSH configuration instead of ~/.ssh/config."),
        "conf": ("PATH", "Path of slurm.conf over there, if it is not the system's."),
        "bin": ("PATH", "Directory of sbatch and the like over there, if it is not on the PATH."),
    }
    programs = ("sbatch", "squeue", "sacct", "scancel", "sinfo")
    visibility_s = 20.0
    loss_window_s = 0.0  # `poll` itself waits for the cluster's ``lost_after``, from the last sign of an agent on
    avoids = True
    logs_in = True

    def __init__(self, cluster: Cluster, transport: Transport | None = None, *, state_dir: Path | None = None) -> None:
        super().__init__(cluster, state_dir=state_dir)
        self._settings = _of_login(read_settings(cluster.options, where=self._options_where), cluster)
        self.is_remote = self._settings.login is not None
        self._transport = transport or open_transport(cluster, self._settings)
        # Behind SSH the home directory is known over there alone; rendering contacts no machine.
        root = root_of(cluster, self._settings, state_dir)
        self.layout = Layout.at(root if self._settings.login else self._transport.expand(root))

    @classmethod
    def discover(cls, options: Mapping[str, str], name: str | None) -> DiscoveredCluster:
        """Describe a cluster with sinfo, scontrol and sacctmgr."""
        from orc.launchers.backends.slurm.discovery import describe

        return describe(options, name)

    @property
    def root(self) -> str:
        """The directory that the login node and all nodes share."""
        return str(self.layout.root)

    def addresses(self, hosts: Collection[str] = ()) -> dict[str, str]:
        """Return who logs in, where the root is in a home directory; any login node of the cluster will do."""
        login = self._settings.login
        if login is None or login.user is None or not self.root.startswith("~"):
            return {}
        return {f"user of {login.name}": login.user}

    def close(self) -> None:
        """Close the connection; it is made anew when it is needed again."""
        self._transport.close()

    @property
    def _options_where(self) -> str:
        return f"cluster {self.cluster.name}: options"

    @cached_property
    def _client(self) -> SlurmClient:
        from orc.launchers.backends.slurm.client import SlurmClient

        return SlurmClient(self._transport, self._settings, where=f"cluster {self.cluster.name}")

    def _options(self, job: JobSpec) -> SlurmOptions:
        return read_options(
            self.cluster.options,
            job.resources.options.get(self.kind, {}),
            cluster_where=self._options_where,
            job_where=f"{job.name}: resources.options.slurm",
            replaced=MEMORY if job.resources.memory else (),  # in whichever form the cluster has it
        )

    @cached_property
    def _jobs(self) -> SlurmJobs:

        return SlurmJobs(self._client, self._transport, self.layout, self._settings, self.cluster.name)

    # -- before the start

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """Return two files, ``agent.json`` and ``job.sbatch``, and one command: ``sbatch``."""
        from orc.launchers.attempts.agent_config import agent_config, agent_file
        from orc.launchers.backends.slurm.script import SCRIPT_NAME, check_nesting, home_options, render_script, shape
        from orc.launchers.spec.clusters import environment_of

        options = self._options(job)
        check_nesting(job, options, environment_of(job, self.cluster), str(self.layout.root))
        made = shape(job, options)
        config = agent_config(job, snapshot, attempt, self.cluster, self.layout, deadline_s=made.deadline_s)
        counted: dict[str, Any] = {"nnodes_from": "SLURM_JOB_NUM_NODES"} if made.ranges else {}
        own: dict[str, Any] = {"notice_s": made.lead_s}
        if made.components:
            own["components"] = [nodes for nodes, _ in made.components]
        # An agent that fails makes srun end the step of that number, which is a newer run's after a requeue.
        counted["stay_stopped"] = True
        config = config.replace(peer_timeout_s=self._settings.peer_timeout, backend=own, **counted)
        agents = agent_file(config)
        python = self.cluster.python or DEFAULT_PYTHON
        # -I -S: nothing of the user's Python environment can get into the agent.
        agent = (python, "-I", "-S", config.runtime_tree, "node", agents.path)
        script = PlanFile(
            f"{config.attempt_dir}/{SCRIPT_NAME}",
            render_script(
                job,
                options,
                self._settings,
                attempt,
                self.layout,
                agent=agent,
                avoid=placement.avoid if placement else (),
            ),
            0o600,
        )
        # Batch scripts take no ``~``; `submit` expands it on the command line.
        places = (f"--{name}={path}" for name, path in home_options(attempt, self.layout))
        argv = (self._settings.program("sbatch"), "--parsable", *places, script.path)
        submission = PlanCommand(argv, purpose="submit")
        return self.plan_of(job, snapshot, attempt, config.env, (agents, script), (submission,))

    def preflight(self, plan: Plan) -> list[Finding]:
        """Check that Slurm answers, the partition exists, the root can be written, and ranks can start."""
        from orc.launchers.backends.slurm.preflight import check

        found = check(self._client, self._transport, plan, str(self.layout.root), self.cluster.name)
        if any(finding.level == "error" for finding in found):
            return found
        environment = json.loads(plan.files[0].content).get("environment") or {}
        if environment.get("kind") == "container":  # `python` is a path in the image
            return found
        return [*(one for one in self._python(brings_python(environment)) if one.level == "error"), *found]

    def check(self) -> list[Finding]:
        """Check that the cluster's Python has torch; `preflight` has checked that it starts."""
        return [finding for finding in self._python() if finding.level != "error"]

    def _python(self, environment: bool = False) -> list[Finding]:
        from orc.launchers.backends.slurm.preflight import check_python

        options = read_options(self.cluster.options, {}, cluster_where=self._options_where)
        python = self.cluster.python or DEFAULT_PYTHON
        return check_python(self._transport, python, options.modules, self.cluster.name, environment=environment)

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the one store, reached where the cluster is entered."""
        from orc.launchers.transfer.targets import Targets

        login, root = self._settings.login, self._transport.expand(self.root)
        if login is None:
            return Targets({self.cluster.name: (self._transport, root)}, {})
        python = self._transport.expand(entry_python(self.cluster, self._settings))
        return Targets({login.name: (self._transport, root)}, {login.name: python})

    def recall(self, digest: str, handle: Handle) -> None:
        """Bring the tree back from the store of the cluster."""
        from orc.launchers.transfer.fetch import recall

        recall(digest, self._transport, self.root, self.store)

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Write the files, run ``sbatch`` once; an attempt that is there already is left as it is."""
        return self._jobs.submit(plan, secrets)

    def submit_array(
        self, plans: Sequence[Plan], secrets: Mapping[str, str], *, at_once: int | None = None
    ) -> list[Handle]:
        """Submit all that are not there yet by one ``sbatch --array``; see `SupportsArrays`."""
        return self._jobs.submit_array(plans, secrets, at_once)

    @cached_property
    def _most_elements(self) -> int | None:
        size = self._client.config().get("MaxArraySize", "")  # the first index that is too large
        return int(size) if size.isdigit() else None

    def most_elements(self) -> int | None:
        """Return Slurm's MaxArraySize, which is asked for once."""
        return self._most_elements

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return the job of the marker from the queue, accounting or the attempt directory."""
        return self._jobs.find_job(marker)

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Observe attempts with one squeue, at most one sacct for forgotten jobs, and the agents' records."""
        from orc.launchers.attempts.confidential import remove_confidential
        from orc.launchers.attempts.reader import read_attempts
        from orc.launchers.backends.slurm.script import EARLY_S
        from orc.launchers.backends.slurm.verdict import LOST_AFTER_S, judge

        if not handles:
            return {}
        client = self._client
        rows = of_handles(client.queue(handle.native_id for handle in handles), handles)
        forgotten = [handle for handle in handles if handle not in rows]
        asked_everyone = True
        if forgotten:
            accounted = client.accounted(handle.native_id for handle in forgotten)
            asked_everyone = accounted is not None or not self._settings.accounting
            # Accounting may go on calling a job RUNNING that the controller has lost: only an end counts.
            ended = [row for row in accounted or () if row.ended]
            rows.update(of_handles(ended, forgotten))
        # After Slurm was asked: what had ended by then has left its records.
        directories = {handle: self._jobs.directory(handle.marker) for handle in handles}
        planned = {directory: handle.nodes for handle, directory in directories.items()}
        records = read_attempts(self._transport, list(planned), planned)
        rows.update(self._of_lease_holders(directories, records, rows))
        now = time.time()
        seen = {}
        for handle, directory in directories.items():
            own = records[directory]
            seen[handle] = judge(
                rows.get(handle),
                own,
                submitted_at=handle.submitted_at,
                now=now,
                lead_s=float((own.config or {}).get("backend", {}).get("notice_s", 0)) + EARLY_S,
                asked_everyone=asked_everyone,
                lost_after_s=LOST_AFTER_S if self.cluster.lost_after is None else float(self.cluster.lost_after),
            )
            if seen[handle].phase is Phase.FAILED and seen[handle].exit is None:
                seen[handle] = replace(seen[handle], reason=self._explained(seen[handle].reason, directory))
        over = [where for handle, where in directories.items() if seen[handle].phase.ended]
        remove_confidential(self._transport, [where for where in over if records[where].has_secrets])
        return seen

    def _explained(self, reason: str, directory: str) -> str:
        """Return the observation with the last lines of the launcher's log, where no agent has given a reason."""
        from orc.launchers.attempts.reader import LAUNCHER_LOG

        log = f"{directory}/logs/{LAUNCHER_LOG}"
        tail = self._transport.run(("tail", "-n", "20", "--", log), timeout_s=30).stdout.strip()
        return f"{reason}:\n{tail}" if tail else reason

    def _of_lease_holders(
        self, directories: Mapping[Handle, str], records: Mapping[str, AttemptRecords], rows: Mapping[Handle, JobRow]
    ) -> dict[Handle, JobRow]:
        """Return the rows of jobs that run attempts whose own job came second and gave way."""
        others = {}
        for handle, directory in directories.items():
            row = rows.get(handle)
            holder = job_of_owner(records[directory].leases.get(0, {}).get("owner", ""))
            if (row is None or row.ended) and holder not in ("", handle.native_id):
                others[handle] = replace(handle, native_id=holder)
        if not others:
            return {}
        found = of_handles(self._client.queue(other.native_id for other in others.values()), list(others.values()))
        return {handle: found[other] for handle, other in others.items() if other in found}

    def queue(self, handles: Sequence[Handle]) -> QueueReport:
        """Return the report of one sinfo, and of one squeue where there are attempts."""
        from orc.launchers.backends.slurm.verdict import queued_job

        partitions = self._client.partitions()
        rows = self._client.queue(handle.native_id for handle in handles) if handles else []
        going = [(handle, row) for handle, row in of_handles(rows, handles).items() if not row.ended]
        return QueueReport(tuple(partitions), tuple(queued_job(handle.marker, row) for handle, row in going))

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return the machine where the cluster is entered, and the attempt's directory."""
        return self._transport, self._jobs.directory(handle.marker)

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """Return an entry to each node: one more step of the job, beside the agents.

        The controller is asked for the job first: a step would wait for one that is silent without a word, and end
        with a status that looks like the program's.
        """
        from orc.launchers.agent.records import MOST_NODES, parse_record

        self._client.queue((handle.native_id,))
        directory = self._jobs.directory(handle.marker)
        path = f"{directory}/agent.json"
        config = parse_record(self._transport.read_many([path]).get(path, b"")) or {}
        python = self._transport.expand(self.cluster.python or DEFAULT_PYTHON)
        parts = config.get("backend", {}).get("components") or [config.get("nnodes", 1)]
        if sum(parts) > (handle.nodes or MOST_NODES):  # somebody has written over it
            parts = [handle.nodes or 1]
        return entries(self._settings, handle.native_id, directory, parts, python)

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Write the cancel request and signal the agents; pending jobs are removed from the queue.

        ``scancel`` alone would give the ranks the cluster's KillWait, whatever the user's grace is. So running jobs
        are not ended by Slurm: the agents do that, and the batch script calls Slurm if they have not done it in time.
        """
        if not handles:
            return
        client = self._client
        rows = of_handles(client.queue(handle.native_id for handle in handles), handles)
        living = {handle: row for handle, row in rows.items() if not row.ended}
        request = json.dumps(cancel_request(grace)).encode()
        for handle in living:
            self._transport.write(f"{self._jobs.directory(handle.marker)}/cancel.json", request, mode=0o600)
        running = [row.job_id for row in living.values() if row.state == "RUNNING"]
        others = [row.job_id for row in living.values() if row.state != "RUNNING"]
        if others:
            client.set_apart(row.job_id for row in living.values() if row.waiting and "_" in row.job_id)
            client.cancel(others)
        if running:
            client.cancel(running, "--signal=URG")  # the steps: wakes the agents, does nothing to the ranks
            client.cancel(running, "--batch", "--signal=URG")  # the batch script


def _of_login(settings: SlurmSettings, cluster: Cluster) -> SlurmSettings:
    """Return *settings* for the account that *cluster* is used with. Raises `SpecError` where there is no login."""
    if cluster.login is None:
        return settings
    if settings.login is None:
        what = "users have accounts of their own only behind a login node: sbatch here would run as this account"
        hint = "set options.login, or `run_as: service`"
        raise SpecError(what, where=f"cluster {cluster.name}: run_as", hint=hint)
    return settings.model_copy(update={"login": settings.login.model_copy(update={"user": cluster.login})})


def entries(
    settings: SlurmSettings, job_id: str, directory: str, components: Sequence[int], python: str
) -> list[NodeEntry]:
    """Return the ways to the nodes of the Slurm job *job_id*, in node order. *components* are node counts."""
    places: list[tuple[str, ...]] = []
    for component, nodes in enumerate(components):
        group = (f"--het-group={component}",) if len(components) > 1 else ()
        places += [(*group, f"--relative={node}") for node in range(nodes)]
    return [_entry(settings, job_id, directory, node, place, python) for node, place in enumerate(places)]


def _entry(
    settings: SlurmSettings, job_id: str, directory: str, node: int, place: tuple[str, ...], python: str
) -> NodeEntry:
    conf = ("env", f"SLURM_CONF={settings.conf}") if settings.conf else ()
    srun: tuple[str, ...] = (*conf, settings.program("srun"), f"--jobid={job_id}", "--overlap", "--quiet")
    if "_" in job_id:  # srun knows an element of an array by its own number only
        asked = shlex.join((settings.program("squeue"), "--noheader", "--array", f"--jobs={job_id}", "--format=%A"))
        step = f'exec {shlex.quote(settings.program("srun"))} --jobid="$({asked})" --overlap --quiet "$@"'
        srun = (*conf, "/bin/sh", "-c", step, "sh")
    where = ("--nodes=1", "--ntasks=1", *place)
    plain_step, shell = (*srun, *where, "--unbuffered"), (*srun, *where, "--pty")
    if settings.login is None:
        return NodeEntry(node, f"node {node}", directory, python, plain_step, shell)
    from orc.launchers.remote.ssh.routes import ssh_argv

    spec, access = settings.login.spec(), settings.access
    # The login node's shell reads what follows its name, word by word.
    plain = (*ssh_argv(spec, access, terminal=False), *map(shlex.quote, plain_step))
    terminal = (*ssh_argv(spec, access, terminal=True), *map(shlex.quote, shell))
    return NodeEntry(node, f"node {node}", directory, python, plain, terminal, through_shell=True)
