"""Agent configuration: ``agent.json``, made from a job. Pure; the same for every backend."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.config import AgentConfig
from orc.launchers.commands import build_command
from orc.launchers.errors import RenderError
from orc.launchers.plan import PlanFile
from orc.launchers.spec.clusters import environment_of
from orc.launchers.spec.environment import chosen_network
from orc.launchers.spec.relations import CHECKPOINTS, variable
from orc.launchers.spec.source import place_of
from orc.runtime.core.config import ConfigError, to_env

if TYPE_CHECKING:
    from orc.launchers.commands.base import NodeCommand
    from orc.launchers.ids import AttemptId
    from orc.launchers.paths import Layout
    from orc.launchers.snapshot.manifest import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

FORMAT = 1
PREEMPT_EXIT = 75  # EX_TEMPFAIL: what the runtime exits with after it has saved
HEARTBEAT_S = 2.0
PEER_TIMEOUT_S = 30.0


def checkpoint_dir(job: JobSpec, attempt: AttemptId, layout: Layout) -> str:
    """Return the job's checkpoint directory: an absolute path or a URL as given, below the job's directory when
    relative.

    ``checkpoints`` there by default.
    """
    given = job.checkpoint.dir
    if given is None:
        return str(layout.checkpoints(attempt.job))
    if "://" in given:  # an object store
        return given
    if given.startswith("~"):
        raise RenderError(
            f"checkpoint.dir = {given}: the nodes need not share this home directory",
            where=job.name,
            hint="Give an absolute path, or one relative to the job's directory on the cluster.",
        )
    return posixpath.normpath(posixpath.join(str(layout.job(attempt.job)), given))


def environment(job: JobSpec, attempt: AttemptId, cluster: Cluster, layout: Layout) -> dict[str, str]:
    """Return the part of the ranks' environment that comes from the job file and the cluster; the job's own ``env``
    wins.

    Raises `RenderError` for a runtime setting that cannot be used.
    """
    settings: dict[str, Any] = {
        **job.runtime,
        "checkpoint_dir": checkpoint_dir(job, attempt, layout),
        "checkpoint_every": job.checkpoint.every,
        "checkpoint_keep": job.checkpoint.keep,
        "resume": job.checkpoint.resume,
    }
    try:
        runtime = to_env(settings)
    except ConfigError as error:
        raise RenderError(f"runtime: {error}", where=job.name) from None
    gpus = {"ORC_GPUS": str(job.resources.gpus_per_node)} if job.resources.gpus_per_node else {}
    threads = {"OMP_NUM_THREADS": str(job.resources.cpus_per_proc)} if job.resources.cpus_per_proc else {}
    return {**threads, **gpus, **cluster.env, **runtime, **job.env}


def artefact_variables(job: JobSpec, snapshot: Snapshot, attempt: AttemptId, layout: Layout) -> dict[str, str]:
    """Return the variables with the places of the job's inputs and outputs on its nodes."""
    found = {}
    for name, bundle in snapshot.inputs.items():
        top = bundle.entries[0].path.partition("/")[0]  # of a file and of a directory alike: its own name
        found[variable("INPUT", name)] = str(layout.tree(bundle.digest) / top)
    for name in job.outputs:
        found[variable("OUTPUT", name)] = output_path(job, name, attempt, layout)
    return found


def output_path(job: JobSpec, name: str, attempt: AttemptId, layout: Layout) -> str:
    """Return the place of an output on the job's nodes. Raises `RenderError` for an object store."""
    given = job.outputs[name]
    if given != CHECKPOINTS:
        return posixpath.join(str(layout.work(attempt.job)), given)
    place = checkpoint_dir(job, attempt, layout)
    if "://" in place:
        raise RenderError(
            f"outputs.{name}: the checkpoints are in an object store, {place}",
            where=job.name,
            hint="Other jobs can read them there: give them its URL.",
        )
    return place


def agent_config(
    job: JobSpec,
    snapshot: Snapshot,
    attempt: AttemptId,
    cluster: Cluster,
    layout: Layout,
    *,
    nnodes: int | None = None,
    deadline_s: float | None = None,
    on_exit: Mapping[str, Any] | None = None,
    setup: Sequence[str] | None = None,
) -> AgentConfig:
    """Return the content of ``agent.json`` (docs/explanation/attempt-directory.md).

    *nnodes* is the number of nodes, the largest that the job asks for unless given.
    *deadline_s* is when the agents end the attempt themselves, in seconds after their start; *setup* replaces the
    cluster's and the job's lines. Raises `RenderError` for a job that its command cannot carry.
    """
    command = build_command(job)
    if command.only_on and cluster.kind not in command.only_on:
        raise RenderError(
            f"command {job.launcher.kind} with these options runs on clusters of kind {' or '.join(command.only_on)}, "
            f"and {cluster.name} is of kind {cluster.kind}",
            where=job.name,
        )
    network = chosen_network(job.network, cluster.network)
    made = render_environment(job, cluster, snapshot, layout, command)
    return AgentConfig(
        {
            "format": FORMAT,
            "job": attempt.job,
            "name": job.name,
            "attempt": attempt.number,
            "marker": attempt.marker,
            "root": str(layout.root),
            "job_dir": str(layout.job(attempt.job)),
            "attempt_dir": str(layout.attempt(attempt)),
            "code_tree": str(layout.tree(snapshot.code.digest)),
            "runtime_tree": str(layout.tree(snapshot.runtime.digest)),
            "nnodes": nnodes or job.resources.max_nodes,
            "nproc": job.resources.nproc,
            "python": cluster.python,
            **({"environment": made} if made else {}),
            **({"network": network} if network else {}),
            "command": command.to_dict(),
            "env": environment(job, attempt, cluster, layout) | artefact_variables(job, snapshot, attempt, layout),
            "secrets": list(job.secrets),
            **({"core_dumps": True} if job.core_dumps else {}),
            "setup": list(setup if setup is not None else (*cluster.setup, *job.setup)),
            "grace_s": job.grace,
            "deadline_s": deadline_s,
            "heartbeat_s": HEARTBEAT_S,
            "peer_timeout_s": PEER_TIMEOUT_S,
            "preempt_exit": PREEMPT_EXIT,
            "on_exit": dict(on_exit) if on_exit else None,
        }
    )


def agent_file(config: AgentConfig) -> PlanFile:
    """Return ``agent.json`` as a file of a plan. Raises `RenderError` for text that is not Unicode."""
    content = json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"
    try:
        content.encode()
    except UnicodeEncodeError as error:
        bad = error.object[max(0, error.start - 20) : error.end]
        raise RenderError(
            f"the job holds text that is not valid UTF-8, near {bad!r}",
            where=config.name,
            hint="A variable taken over with ${env:NAME} may hold such bytes.",
        ) from None
    return PlanFile(posixpath.join(config.attempt_dir, "agent.json"), content, 0o600)


def render_environment(
    job: JobSpec, cluster: Cluster, snapshot: Snapshot, layout: Layout, command: NodeCommand
) -> dict[str, Any] | None:
    """The ``environment`` of ``agent.json``, which the environment step reads; `None` for the Python of the node.

    Raises `RenderError` for a file that does not travel with the job, and for launchers that cannot be contained.
    """
    wanted = environment_of(job, cluster)
    if wanted.venv is not None:
        _must_travel(job, snapshot, wanted.venv.requirements, "venv.requirements")
        return {"kind": "venv", **wanted.venv.model_dump(mode="json")}
    if wanted.conda is not None:
        if wanted.conda.file is not None:
            _must_travel(job, snapshot, wanted.conda.file, "conda.file")
            return {"kind": "conda", "file": wanted.conda.file}
        return {"kind": "conda", "archive": wanted.conda.archive, **_tree(snapshot, layout)}
    if wanted.copied is not None:
        return {"kind": "copy", **_tree(snapshot, layout)}
    if wanted.container is not None:
        # A launcher outside would look for its own file, and for ssh, inside.
        if not command.containable:
            raise RenderError(
                f"launcher {job.launcher.kind} cannot start its ranks in containers: it starts itself on every node",
                where=job.name,
                hint="Use `launcher: torchrun`; deepspeed.initialize works below it.",
            )
        gpus = {"gpus": job.resources.gpus_per_node} if job.resources.gpus_per_node else {}
        return {"kind": "container", **wanted.container.model_dump(mode="json"), **gpus}
    return None


def _tree(snapshot: Snapshot, layout: Layout) -> dict[str, str]:
    return {"tree": str(layout.tree(snapshot.environment.digest))} if snapshot.environment is not None else {}


def _must_travel(job: JobSpec, snapshot: Snapshot, path: str, key: str) -> None:
    """Check that a relative file is part of the snapshot. Raises `RenderError`."""
    if path.startswith("/") or path in snapshot.code:
        return
    raise RenderError(
        f"environment.{key} = {path}: there is no such file in the snapshot of the workdir",
        where=place_of(path, job.name),
        hint="Correct the path. If the file exists: .gitignore, .orcignore or workdir.exclude leaves it out.",
    )
