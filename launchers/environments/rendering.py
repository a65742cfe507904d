"""Rendering of a job's environment into ``agent.json``. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orc.launchers.errors import RenderError
from orc.launchers.spec.environment import chosen
from orc.launchers.spec.source import place_of

if TYPE_CHECKING:
    from orc.launchers.commands.base import NodeCommand
    from orc.launchers.paths import Layout
    from orc.launchers.snapshot.manifest import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.environment import Environment


def environment_of(job: JobSpec, cluster: Cluster) -> Environment:
    """The job's environment, else the cluster's."""
    return chosen(job.environment, cluster.environment)


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
