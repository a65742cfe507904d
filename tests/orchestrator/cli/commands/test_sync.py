"""`orc sync` and `orc gc` on a cluster that is a directory of this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prepared_jobs import create_prepared

from orc.launchers.snapshot.content_store import ContentStore
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.records import NewJob

from ..conftest import HELLO, Run


@pytest.fixture
def elsewhere(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContentStore:
    """The store of a cluster with a root of its own; the current directory holds a job for it."""
    root = tmp_path / "elsewhere"
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(f"there: {{kind: local, root: {root}}}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    (place / "job.yaml").write_text(HELLO + "cluster: there\n")
    (place / "train.py").write_text("print('train')\n")
    (place / "old.py").write_text("print('old')\n")
    return ContentStore(root / "store")


def snapshots(found: Any) -> dict[str, Any]:
    return {snapshot["name"]: snapshot for snapshot in found["snapshots"]}


def test_sync_brings_code_and_runtime(orc: Run, elsewhere: ContentStore) -> None:
    done = orc("sync", "job.yaml", "--json")
    assert done.code == 0
    (host,) = done.json["hosts"]
    assert host["source"] == "laptop"
    for snapshot in done.json["snapshots"]:
        assert elsewhere.verify(snapshot["digest"]) == []
    again = orc("sync", "job.yaml")
    assert again.out.splitlines()[1].split()[:4] == ["there", "up", "to", "date"]


def test_sync_of_a_cluster_alone_brings_the_runtime(orc: Run, elsewhere: ContentStore) -> None:
    found = orc("sync", "--cluster", "there", "--json").json
    assert list(snapshots(found)) == ["runtime"]
    assert elsewhere.has(snapshots(found)["runtime"]["digest"])


def test_explain_says_what_is_new_changed_and_gone_and_sends_nothing(
    orc: Run, place: Path, elsewhere: ContentStore
) -> None:
    first = snapshots(orc("sync", "job.yaml", "--json").json)
    remember(place / "job.yaml", {name: snapshot["digest"] for name, snapshot in first.items()})
    (place / "train.py").write_text("print('changed')\n")
    (place / "new.py").write_text("print('new')\n")
    (place / "old.py").unlink()
    found = orc("sync", "job.yaml", "--explain", "--json").json
    code = snapshots(found)["code"]
    assert (code["against"], code["new"], code["changed"], code["removed"]) == (
        "digits-k3f9a2",
        ["new.py"],
        ["train.py"],
        ["old.py"],
    )
    (host,) = found["hosts"]
    assert host["missing"] == {"code": ["new.py", "train.py"], "runtime": []}
    assert not elsewhere.has(code["digest"])
    text = orc("sync", "job.yaml", "--explain").out
    assert "against digits-k3f9a2: 1 new, 1 changed, 1 removed, 1 unchanged" in text
    assert "it does not have code" in text


def test_explain_without_an_earlier_job(orc: Run, elsewhere: ContentStore) -> None:
    text = orc("sync", "job.yaml", "--explain").out
    assert "there is no earlier job of this file to compare with" in text
    assert "it does not have code and runtime" in text
    assert not elsewhere.root.exists()


def test_a_host_that_cannot_be_served_is_an_error(orc: Run, elsewhere: ContentStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("a file")
    done = orc("sync", "job.yaml")
    assert done.code == 1
    assert "failed" in done.out
    assert str(tmp_path / "elsewhere") in done.err
    (host,) = orc("sync", "job.yaml", "--json").json["hosts"]
    assert str(tmp_path / "elsewhere") in host["error"]


@pytest.mark.parametrize("arguments", [(), ("--cluster", "there", "--set", "name=x")])
def test_what_makes_no_sense_is_refused(orc: Run, elsewhere: ContentStore, arguments: tuple[str, ...]) -> None:
    assert orc("sync", *arguments).code == 2


# --- gc ---------------------------------------------------------------------------------------------------------------


def remember(source: Path, digests: dict[str, str]) -> None:
    """A job in the ledger that has these snapshots and has not begun."""
    new = NewJob(
        id="digits-k3f9a2",
        name="digits",
        cluster="there",
        backend="local",
        source=str(source),
        spec={},
        digests=digests,
        tags={},
    )
    with Client() as client, client.workspace.ledger.transaction() as tx:
        create_prepared(tx, new, "orc-digits-k3f9a2-a1", "plan", "nobody", tx.now + 60)


def age(store: ContentStore, digest: str) -> None:
    at = time.time() - 30 * 86400
    os.utime(store.manifest_path(digest), (at, at))


def test_gc_removes_what_no_job_needs(orc: Run, place: Path, elsewhere: ContentStore) -> None:
    first = snapshots(orc("sync", "job.yaml", "--json").json)["code"]["digest"]
    (place / "train.py").write_text("print('second')\n")
    second = snapshots(orc("sync", "job.yaml", "--json").json)["code"]["digest"]
    remember(place / "job.yaml", {"code": second})
    for digest in (first, second):
        age(elsewhere, digest)
    said = orc("gc", "--cluster", "there", "--dry-run", "--json").json
    assert said["dry_run"]
    assert elsewhere.has(first)
    (host,) = orc("gc", "--cluster", "there", "--json").json["hosts"]
    assert said["hosts"] == [host]
    assert (host["host"], host["snapshots"], host["contents"]) == ("there", [first], 1)
    assert host["bytes"] == len("print('train')\n")
    assert not elsewhere.has(first)
    assert elsewhere.verify(second) == []


def test_gc_without_a_cluster_cleans_the_state_directory(orc: Run, elsewhere: ContentStore, orc_home: Path) -> None:
    digest = snapshots(orc("sync", "job.yaml", "--json").json)["code"]["digest"]
    here = ContentStore(orc_home / "state/store")
    age(here, digest)
    done = orc("gc")
    assert done.code == 0
    assert done.out.splitlines()[1].split()[:2] == ["here", "1"]
    assert not here.has(digest)
    assert elsewhere.has(digest)


def test_gc_keeps_what_is_young_and_what_was_asked_to_be_kept(orc: Run, elsewhere: ContentStore) -> None:
    digest = snapshots(orc("sync", "job.yaml", "--json").json)["code"]["digest"]
    orc("gc", "--cluster", "there", "--older-than", "0")
    assert elsewhere.has(digest)
    age(elsewhere, digest)
    orc("gc", "--cluster", "there", "--older-than", "60d")
    assert elsewhere.has(digest)
    orc("gc", "--cluster", "there", "--older-than", "20d")
    assert not elsewhere.has(digest)


def test_gc_refuses_an_age_that_is_none(orc: Run, elsewhere: ContentStore) -> None:
    done = orc("gc", "--older-than", "soon")
    assert done.code == 2
    assert "is not a duration" in done.err


# --- SSH hosts --------------------------------------------------------------------------------------------------------


@pytest.mark.hosts
def test_sync_and_gc_on_ssh_hosts(
    orc: Run, place: Path, hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = tmp_path / "clusters.yaml"
    options = json.dumps({"hosts": list(hosts.names), "ssh_config": str(hosts.ssh_config), "connect_timeout": 8})
    clusters.write_text(f"lab: {{kind: ssh, root: ~/orc, python: {sys.executable}, options: {options}}}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    (place / "job.yaml").write_text(HELLO + "cluster: lab\n")
    explained = orc("sync", "job.yaml", "--explain", "--json").json
    assert all(set(host["missing"]) == {"code", "runtime"} and host["new"] for host in explained["hosts"])
    assert not hosts.root("node1").exists()
    hosts.fault("cut", "node2")
    done = orc("sync", "job.yaml")
    assert done.code == 1
    assert "node2" in done.err
    hosts.fault("heal", "node2")
    found = orc("sync", "job.yaml", "--json")
    assert found.code == 0
    assert [host["host"] for host in found.json["hosts"] if host["new"]] == ["node2"]
    digest = snapshots(found.json)["code"]["digest"]
    for name in hosts.names:
        age(ContentStore(hosts.root(name) / "store"), digest)
    cleaned = orc("gc", "--cluster", "lab", "--json").json["hosts"]
    assert [host["snapshots"] for host in cleaned] == [[digest]] * len(hosts.names)
