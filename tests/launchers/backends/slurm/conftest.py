"""Running small jobs on the Slurm testbed through the backend alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from golden_plans import SNAPSHOT
from slurm_testbed import SlurmTestbed

from orc.launchers.backends.base import Observation, Phase, Snapshot
from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.paths import state_dir
from orc.launchers.plan import Plan
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.testing.jobs import Job


class Run(Job):
    """One attempt, prepared or submitted; what ran in the PID namespace of a node is not looked for here."""

    backend: SlurmBackend

    @property
    def directory(self) -> Path:  # type: ignore[override]
        return Path(str(self.backend.layout.attempt(self.plan.attempt)))

    def awaited(self, *phases: Phase, timeout_s: float = 60, restarts: int = 0) -> Observation:
        """Wait for one of *phases*, which no end comes before."""
        seen = self.until(lambda o: o.phase.ended or (o.phase in phases and o.restarts >= restarts), timeout_s)
        assert seen.phase in phases, f"waited for {phases}, restarts {restarts}, saw {seen}\n{self.everything()}"
        return seen

    def ended(self, timeout_s: float = 90) -> Observation:
        return self.until(lambda seen: seen.phase.ended, timeout_s)

    def until_said(self, text: str, rank: int = 0, timeout_s: float = 60) -> None:
        self.until(lambda seen: text in self.log(rank) or seen.phase.ended, timeout_s)
        assert text in self.log(rank), f"rank {rank} did not say {text!r}\n{self.everything()}"

    def everything(self) -> str:
        return "\n".join(f"--- {name}\n{text}" for name, text in self.all_logs().items())


class Runs:
    """Prepares attempts of one script."""

    def __init__(self, slurm: SlurmTestbed, cluster: Cluster, tmp_path: Path) -> None:
        self.slurm = slurm
        self.cluster = cluster
        self._workdir = tmp_path / "code"
        self._workdir.mkdir()
        self._store = ContentStore(state_dir() / "store")

    def render(
        self, script: str, *, cluster: Mapping[str, Any] | None = None, **spec: Any
    ) -> tuple[SlurmBackend, Plan, Snapshot]:
        (self._workdir / "train.py").write_text(script)
        snapshot = Snapshot(self._store.snapshot(self._workdir).bundle, self._store.ingest(runtime_bundle()))
        options = {**self.cluster.options, **(cluster or {})}
        backend = SlurmBackend(self.cluster.model_copy(update={"options": options}))
        values: dict[str, Any] = {
            "name": "t",
            "script": "train.py",
            "launcher": "python",
            "grace": 5,
            "retry": {"on": []},
        }
        job = JobSpec.model_validate({**values, **spec})
        return backend, backend.render(job, snapshot, AttemptId(new_job_id("t"), 1)), snapshot

    def prepare(self, script: str, *, secrets: Mapping[str, str] | None = None, **more: Any) -> Run:
        backend, plan, snapshot = self.render(script, secrets=list(secrets or {}), **more)
        backend.stage(snapshot)
        return Run(backend, plan, lambda plan, path: [], secrets or {})

    def start(self, script: str, **spec: Any) -> Run:
        run = self.prepare(script, **spec)
        run.submit()
        return run


@pytest.fixture
def runs_on(slurm: SlurmTestbed, tmp_path: Path) -> Callable[[Cluster], Runs]:
    return lambda cluster: Runs(slurm, cluster, tmp_path)


@pytest.fixture
def runs(runs_on: Callable[[Cluster], Runs], slurm_cluster: Cluster) -> Runs:
    return runs_on(slurm_cluster)


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    """The plan of a job with these keys, on a cluster that is nowhere."""

    def render(**spec: Any) -> Plan:
        job = JobSpec.model_validate({"name": "digits", "script": "train.py", **spec})
        backend = SlurmBackend(Cluster(name="hpc", kind="slurm", root="/shared/orc"))
        return backend.render(job, SNAPSHOT, AttemptId("digits-k3f9a2", 1))

    return render
