"""Backends and commands of other packages: those that docs/how-to/add-a-backend.md and add-a-command.md build."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orc.launchers.errors import SpecError
from orc.launchers.plugins import BACKENDS
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.spec.clusters import load_clusters

from ..conftest import HELLO, Run


@pytest.fixture
def toy_root(place: Path, tmp_path: Path, install_page: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a cluster of kind toy; the current directory holds a job for it."""
    install_page("add-a-backend")
    root = tmp_path / "toy-root"
    (tmp_path / "clusters.yaml").write_text(json.dumps({"bench": {"kind": "toy", "root": str(root)}}))
    monkeypatch.setenv("ORC_CLUSTERS", str(tmp_path / "clusters.yaml"))
    (place / "job.yaml").write_text(HELLO + "cluster: bench\nresources: {nodes: 2, options: {toy: {nice: 1}}}\n")
    return root


def test_its_kind_is_known_beside_those_of_orc(toy_root: Path) -> None:
    assert BACKENDS.kinds() == ["kubernetes", "local", "sagemaker", "slurm", "ssh", "toy", "tpu"]
    assert load_clusters()["bench"].kind == "toy"


def test_a_job_is_submitted_followed_and_found_in_the_root_of_the_cluster(orc: Run, toy_root: Path) -> None:
    done = orc("submit", "job.yaml", "--follow", "--all-ranks", "--no-reconciler")
    assert done.code == 0, done.err
    assert "hello from 0" in done.out
    assert "hello from 1" in done.out
    (job,) = (toy_root / "jobs").iterdir()
    assert f"{toy_root}/jobs/{job.name}/checkpoints" in orc("status", job.name).out


def test_sync_and_gc_look_at_its_store_and_not_at_that_of_this_machine(
    orc: Run, toy_root: Path, orc_home: Path
) -> None:
    (code,) = [s["digest"] for s in orc("sync", "job.yaml", "--json").json["snapshots"] if s["name"] == "code"]
    here, there = ContentStore(orc_home / "state" / "store"), ContentStore(toy_root / "store")
    assert there.has(code)
    assert orc("gc", "--cluster", "bench", "--older-than", "1h", "--json").json["hosts"][0]["host"] == "bench"
    assert here.has(code)


def test_it_is_checked_listed_and_refused_like_any_other(orc: Run, toy_root: Path) -> None:
    assert "nothing to complain about" in orc("clusters", "check", "bench").out
    assert ["bench", "toy", str(toy_root)] in [line.split() for line in orc("clusters").out.splitlines()]


def test_its_options_are_checked_with_their_places(orc: Run, toy_root: Path, tmp_path: Path) -> None:
    (tmp_path / "clusters.yaml").write_text(f"bench:\n  kind: toy\n  root: {toy_root}\n  options: {{nicer: 1}}\n")
    assert f"{tmp_path}/clusters.yaml:4:13" in orc("clusters", "check", "bench").err
    assert "nice" in orc("clusters", "check", "bench").err


def test_a_package_that_cannot_be_imported_is_named(
    orc: Run, toy_root: Path, install_page: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "add-a-backend" / "orc_toy" / "backend.py").write_text("import no_such_module")
    for name in [name for name in sys.modules if name.startswith("orc_toy")]:
        monkeypatch.delitem(sys.modules, name)
    refused = orc("clusters", "check", "bench")
    assert refused.code != 0
    assert "orc-toy" in refused.err
    assert "no_such_module" in refused.err


def test_a_launcher_of_another_package_gives_each_node_its_part(
    orc: Run, place: Path, install_page: Callable[[str], Path]
) -> None:
    site = install_page("add-a-command")
    for name in ("train.py", "job.yaml"):
        shutil.copy(site / name, place / name)
    assert "did you mean 'capacity'?" in orc("submit", "job.yaml", "--set", "launcher.options.capacit=3").err
    done = orc("submit", "job.yaml", "--follow", "--no-reconciler", "--set", "retry.max_attempts=1")
    # The workers end with the queue that they are connected to, and that is no failure of theirs.
    assert done.code == 0, done.err
    assert "3 9 by a worker" in done.out


def test_without_the_package_the_kind_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "clusters.yaml").write_text("bench: {kind: toy, root: /x}")
    with pytest.raises(SpecError, match="unknown kind 'toy'"):
        load_clusters(tmp_path / "clusters.yaml")
