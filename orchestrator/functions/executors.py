"""submitit's executors for local and Slurm clusters of clusters.yaml. Imported by `functions` when it submits.

submitit pickles the call, writes the batch script and runs the call on the other side; how Slurm is spoken to, and what
is asked of it, is the Slurm backend's as for every other job.
"""

from __future__ import annotations

import copy
import math
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from orc.launchers.errors import AmbiguousSubmit, RenderError
from orc.orchestrator.functions import slots as slots_program

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

# What submitit takes for the time limit of a function that has none, in minutes: signals then mean preemption.
NO_LIMIT_MIN = 10 * 365 * 24 * 60
_SAVE_S = 90  # seconds before the time limit at which a function is told, where the limit leaves that much
# Options of sbatch that submitit sets by itself, and such as an attempt of a job has.
_NOT_ASKED = frozenset(("job-name", "comment", "chdir", "output", "open-mode", "requeue", "no-requeue", "nodes",
                        "ntasks-per-node", "cpus-per-task", "time", "signal"))  # fmt: skip


class OrcSlurmExecutor(SlurmExecutor):
    """`SlurmExecutor` that speaks to Slurm through *client*."""

    def __init__(self, folder: Path, client: SlurmClient, sbatch: str, *, python: str, max_num_timeout: int) -> None:
        self._client = client
        self._sbatch = sbatch
        super().__init__(folder, max_num_timeout=max_num_timeout, python=python)

    @classmethod
    def affinity(cls) -> int:
        """Whether there is a Slurm here, the client will say."""
        return 2

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        path = Path(self.folder) / f".submission-{uuid.uuid4().hex}.sh"
        path.write_text(self._make_submission_file_text(command, ""))
        name = str(self.parameters["job_name"])
        try:
            job_id = self._client.submit([self._sbatch, "--parsable", str(path)])
        except AmbiguousSubmit as error:
            found = [row.job_id.partition("_")[0] for row in self._client.queue_named(name) if row.name == name]
            if not found:
                error.hint = f"`squeue --name={name}` shows it if it was accepted."
                raise
            job_id = min(found, key=int)
        job: SlurmJob[Any] = SlurmJob(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))
        job.paths.move_temporary_file(path, "submission_file", keep_as_symlink=True)
        return job

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        """As submitit does it; but its own arrays are submitted by an executor that knows no other cluster."""
        count = len(delayed_submissions)
        array = copy.copy(self)
        if count > 1:
            array.parameters = {**self.parameters, "map_count": count}
        pickles = []
        for delayed in delayed_submissions:
            pickles.append(Path(self.folder) / f"{uuid.uuid4().hex}.pkl")
            delayed.set_timeout(self.parameters.get("time") or NO_LIMIT_MIN, self.max_num_timeout)
            delayed.dump(pickles[-1])
        first = array._submit_command(self._submitit_command_str)
        ids = [f"{first.job_id}_{index}" for index in range(count)] if count > 1 else [first.job_id]
        jobs: list[Job[Any]] = [
            SlurmJob(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks()))) for job_id in ids
        ]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs


class OrcLocalExecutor(LocalExecutor):
    """`LocalExecutor` whose functions run in sessions of their own, and only *at_once* of them at a time."""

    def __init__(self, folder: Path, *, python: str, max_num_timeout: int, at_once: int | None) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, python=python)
        self._at_once = at_once

    def _submit_command(self, command: str) -> LocalJob[Any]:
        tasks = int(self.parameters["tasks_per_node"])
        env = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(tasks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(int(self.parameters["signal_delay_s"])),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.parameters["gpus_per_node"]))),
        }
        argv = [sys.executable, "-m", "submitit.local._local", str(self.folder)]
        if self._at_once is not None:
            slots = (sys.executable, "-I", "-S", slots_program.__file__, str(self.folder), str(self._at_once))
            argv = [*slots, *argv]
        # A session of its own: Ctrl-C while somebody waits for the result must not end the function.
        process = subprocess.Popen(argv, env=env, start_new_session=True, stdin=subprocess.DEVNULL)
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=list(range(tasks)))


def local_executor(
    job: JobSpec, cluster: Cluster, folder: Path, at_once: int | None, timeouts: int
) -> OrcLocalExecutor:
    """For this machine. Raises `RenderError` for what it cannot carry."""
    resources = job.resources
    if resources.max_nodes > 1:
        raise RenderError(f"resources.nodes = {resources.nodes}, and this machine is one node", where=job.name)
    python = _python(cluster.python or sys.executable, cluster.env, cluster.setup)
    executor = OrcLocalExecutor(folder, python=python, max_num_timeout=timeouts, at_once=at_once)
    limit = resources.time_s
    executor.update_parameters(
        tasks_per_node=resources.nproc,
        gpus_per_node=resources.gpus_per_node,
        timeout_min=limit / 60 if limit else NO_LIMIT_MIN,
        signal_delay_s=min(_SAVE_S, limit // 2) if limit else _SAVE_S,
    )
    return executor


def slurm_executor(
    job: JobSpec, cluster: Cluster, client: SlurmClient, folder: Path, name: str, at_once: int | None, timeouts: int
) -> OrcSlurmExecutor:
    """For a Slurm cluster that is entered here. Raises `LaunchError` for what it cannot carry."""
    from orc.launchers.backends.slurm.options import read_options, read_settings
    from orc.launchers.backends.slurm.script import option_pairs
    from orc.launchers.ids import AttemptId, placeholder_job_id
    from orc.launchers.layout import Layout

    settings = read_settings(cluster.options, where=cluster.name)
    options = read_options(
        cluster.options, job.resources.options.get("slurm", {}), cluster_where=cluster.name, job_where=job.name
    )
    resources = job.resources
    if resources.min_nodes < resources.max_nodes:
        raise RenderError(f"resources.nodes = {resources.nodes}: a function needs a fixed number", where=job.name)
    if options.gpus_as == "gpus-per-task" and resources.nproc > 1:
        raise RenderError(
            "gpus_as: gpus-per-task means GPUs of every process of a function", where=job.name,
            hint="Use gpus_as: gres or gpus-per-node.",
        )  # fmt: skip
    if options.heterogeneous:
        raise RenderError("a function runs on one sort of nodes (heterogeneous)", where=job.name)
    if options.container_image is not None:
        raise RenderError("a function does not run in a container (container_image)", where=job.name)
    attempt = AttemptId(placeholder_job_id(job.name), 1)
    pairs = option_pairs(job, options, attempt, Layout.at(str(folder)))
    asked = {key: True if value is None else str(value) for key, value in pairs if key not in _NOT_ASKED}
    limit = resources.time_s
    lead = options.signal_lead if options.signal_lead is not None else min(_SAVE_S, limit // 2) if limit else _SAVE_S
    python = _python(cluster.python or "python3", cluster.env, cluster.setup)
    executor = OrcSlurmExecutor(
        folder, client, settings.program("sbatch"), python=python, max_num_timeout=timeouts
    )  # fmt: skip
    paths = [f"export PATH={shlex.quote(settings.bin)}:$PATH"] if settings.bin else []
    modules = [". /etc/profile", f"module load {shlex.join(options.modules)} || exit 77"] if options.modules else []
    executor.update_parameters(
        job_name=name,
        time=math.ceil(limit / 60) if limit else None,
        nodes=resources.max_nodes,
        ntasks_per_node=resources.nproc,
        cpus_per_task=resources.cpus_per_proc or 1,
        signal_delay_s=math.ceil(lead),
        wckey=asked.pop("wckey", None),
        array_parallelism=at_once or sys.maxsize,
        additional_parameters={**asked, "requeue": True, "comment": name},
        setup=[*paths, *modules] or None,
        # The script's own environment is what `export` made it; srun passes all of that on.
        srun_args=["--export=ALL", "--mpi=none", "--input=none", *options.srun_args],
    )
    return executor


def _python(python: str, env: Mapping[str, str], setup: Sequence[str]) -> str:
    """The command line that runs the function's interpreter, as a text for the shell."""
    own = [f"{name}={value}" for name, value in {**env, "PYTHONPATH": _import_path(env)}.items() if value]
    argv = ["env", *own, os.path.expanduser(python)]  # noqa: PTH111 - a text
    if setup:
        argv = ["/bin/sh", "-ec", "\n".join([*setup, 'exec "$@"']), "sh", *argv]
    return shlex.join(argv)


def _import_path(env: Mapping[str, str]) -> str:
    """Where the function's modules are found over there as here: what is not installed with the interpreter."""
    installed = tuple(str(Path(prefix)) + os.sep for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    here = [str(Path(entry or ".").absolute()) for entry in sys.path]
    own = [entry for entry in here if Path(entry).is_dir() and not f"{entry}{os.sep}".startswith(installed)]
    given = [entry for entry in env.get("PYTHONPATH", "").split(":") if entry]
    return ":".join(dict.fromkeys([*given, *own]))


def paths_of(folder: Path, job_id: str, process: int) -> JobPaths:
    """Where submitit keeps what belongs to one process of one call."""
    return JobPaths(folder, job_id=job_id, task_id=process)
