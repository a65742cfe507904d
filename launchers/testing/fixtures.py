"""Fixtures of the conformance suite."""

from __future__ import annotations

import importlib
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from orc.launchers.backends.base import Backend, Observation, Snapshot
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.spec import JobSpec
from orc.launchers.testing.jobs import Job, MakeJob, RunJob, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from orc.launchers.spec.clusters import Cluster


def chosen_backend(config: pytest.Config) -> type[Backend]:
    """Return the class that ``--orc-backend`` names. Raises `pytest.UsageError`."""
    found: type[Backend] = _named(config, "--orc-backend")
    return found


def chosen_view(config: pytest.Config) -> Callable[[Backend, Plan, PurePosixPath], Sequence[Path]] | None:
    """Return the function that ``--orc-view`` names, if it is given. Raises `pytest.UsageError`."""
    return _named(config, "--orc-view") if config.getoption("--orc-view") else None


def _named(config: pytest.Config, option: str) -> Any:
    given = str(config.getoption(option))
    module, colon, name = given.partition(":")
    if not (module and colon and name):
        raise pytest.UsageError(f"{option} {given}: expected MODULE:NAME")
    return getattr(importlib.import_module(module), name)


def chosen_cluster(config: pytest.Config, kind: type[Backend], root: Path) -> Cluster:
    """Return the cluster of ``--orc-cluster``, or one of *kind* at *root*. Raises `pytest.UsageError`."""
    from orc.launchers.spec.clusters import Cluster, get_cluster

    given = config.getoption("--orc-cluster")
    if not given:
        return Cluster(name="conformance", kind=kind.kind, root=str(root))
    file, colon, name = str(given).rpartition(":")
    if not colon:
        raise pytest.UsageError(f"--orc-cluster {given}: expected FILE:NAME")
    return get_cluster(name, Path(file))


LAUNCHERS = ["python", "torchrun", "mpirun"]


@pytest.fixture
def orc_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the test's own ``state`` and ``config``."""
    monkeypatch.setenv("ORC_STATE_DIR", str(tmp_path / "orc" / "state"))
    monkeypatch.setenv("ORC_CONFIG_DIR", str(tmp_path / "orc" / "config"))
    return tmp_path / "orc"


@pytest.fixture
def backend_under_test(pytestconfig: pytest.Config, orc_home: Path, tmp_path: Path) -> Iterator[Backend]:
    """The backend of ``--orc-backend``, with the cluster of ``--orc-cluster`` or one below a directory of the test."""
    kind = chosen_backend(pytestconfig)
    backend = kind(chosen_cluster(pytestconfig, kind, tmp_path / "root"))
    yield backend
    backend.close()


@pytest.fixture
def view(pytestconfig: pytest.Config, backend_under_test: Backend) -> View:
    """Return the view of attempts from here: at their own paths, unless ``--orc-view`` says otherwise."""
    chosen = chosen_view(pytestconfig)

    def seen_here(plan: Plan, path: PurePosixPath) -> Sequence[Path]:
        return chosen(backend_under_test, plan, path) if chosen else [Path(path)]

    return seen_here


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    """Each launcher in turn."""
    if request.param == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun (Debian: openmpi-bin)")
    return str(request.param)


@pytest.fixture
def make_job(backend_under_test: Backend, view: View, tmp_path: Path, orc_home: Path) -> MakeJob:
    """``make_job(source, nodes=1, procs=1, launcher="python", ...)``: rendered and staged, not yet submitted."""
    store = ContentStore(Path(Layout.at((orc_home / "state").as_posix()).store))

    def make(
        source: str,
        /,
        *,
        nodes: int = 1,
        procs: int = 1,
        launcher: str = "python",
        args: Sequence[str] = (),
        secrets: Mapping[str, str] | None = None,
        resources: Mapping[str, Any] | None = None,
        number: int = 1,
        job_id: str | None = None,
        **spec: Any,
    ) -> Job:
        workdir = tmp_path / "workdir"
        workdir.mkdir(exist_ok=True)
        (workdir / "train.py").write_text(textwrap.dedent(source))
        job = JobSpec.model_validate(
            {
                "name": "conformance",
                "script": "train.py",
                "args": list(args),
                "launcher": launcher,
                "resources": {"nodes": nodes, "procs_per_node": procs, **(resources or {})},
                "secrets": list(secrets or {}),
                "grace": 5,
                **spec,
            }
        )
        snapshot = Snapshot(store.snapshot(workdir).bundle, store.ingest(runtime_bundle()))
        plan = backend_under_test.render(job, snapshot, AttemptId(job_id or new_job_id("conformance"), number))
        assert [f for f in backend_under_test.preflight(plan) if f.level == "error"] == []
        backend_under_test.stage(snapshot, plan)
        return Job(backend_under_test, plan, view, secrets or {})

    return make


@pytest.fixture
def run(make_job: MakeJob) -> RunJob:
    """Submit and wait."""

    def run(source: str, /, **options: Any) -> tuple[Job, Observation]:
        job = make_job(source, **options).submit()
        return job, job.wait()

    return run
