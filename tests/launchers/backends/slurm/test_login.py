"""A cluster behind a login node: what goes over SSH, how often, and what is said when nobody answers."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from login_node import LoginNode

from orc.launchers.backends.base import Phase
from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.errors import BackendUnreachable, SpecError
from orc.launchers.hosts.sessions import on_node
from orc.launchers.paths import state_dir
from orc.launchers.remote.ssh.transport import SshTransport
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.spec.clusters import Cluster

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def far(runs_on: Callable[[Cluster], Any], login_cluster: Cluster) -> Any:
    return runs_on(login_cluster)


@pytest.fixture
def homely(runs_on: Callable[[Cluster], Any], login_cluster: Cluster) -> Any:
    """With its root in the home directory on the login node; the nodes, whose own is another one, are told."""
    options = {**login_cluster.options, "export": ["HOME", "PATH"]}
    return runs_on(login_cluster.model_copy(update={"root": "~/of mine/orc", "options": options}))


@pytest.fixture
def unreachable(login_node: LoginNode) -> Iterator[None]:
    login_node.stop()
    yield
    login_node.start()


def test_a_root_below_home_is_that_of_the_login_node(homely: Any, login_node: LoginNode) -> None:
    script = "import os; print(os.environ['ORC_CHECKPOINT_DIR'], os.getcwd(), os.environ['TOKEN'], sep='|')"
    run = homely.start(script, resources={"nodes": 2}, secrets={"TOKEN": "s3cret"})
    root = login_node.home / "of mine" / "orc"
    job = root / "jobs" / run.plan.attempt.job
    assert run.ended().phase is Phase.SUCCEEDED, (job / "a1" / "logs" / "launcher.log").read_text()
    assert [run.log(rank).strip() for rank in range(2)] == [f"{job}/checkpoints|{job}/work|s3cret"] * 2
    assert "the agents ended with status 0" in (job / "a1" / "logs" / "launcher.log").read_text()
    assert run.backend.find(run.plan.marker) is not None
    assert json.loads((job / "a1" / "agent.json").read_text())["root"] == str(root)
    assert not Path("of mine").exists()
    assert not Path("~").exists()


def test_an_array_goes_through_the_login_node(homely: Any, login_node: LoginNode) -> None:
    made = [homely.prepare("import os; print(os.environ['ORC_MARKER'])") for _ in range(2)]
    handles = made[0].backend.submit_array([run.plan for run in made], {}, at_once=1)
    for run, handle in zip(made, handles, strict=True):
        run.handle = handle
        assert run.ended().phase is Phase.SUCCEEDED
        assert run.log(0).strip() == run.plan.marker
    links = login_node.home / "of mine" / "orc" / "arrays" / handles[0].group
    assert sorted(path.name for path in links.iterdir()) == ["0", "1", "array.sbatch"]
    assert f"job {handles[1].native_id}, restart 0" in (links / "1" / "logs" / "launcher.log").read_text()


def test_secrets_wait_in_a_private_file_over_there(far: Any) -> None:
    run = far.start("pass", secrets={"TOKEN": "s3cret"}, resources={"options": {"slurm": {"begin": "now+1hour"}}})
    waiting = run.directory / "secrets.json"
    assert json.loads(waiting.read_text()) == {"TOKEN": "s3cret"}
    assert stat.S_IMODE(waiting.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.directory.stat().st_mode) == 0o700
    run.cancel(0)


def test_files_of_an_array_are_written_by_as_many_commands_however_many_elements(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("run", "_script"):
        monkeypatch.setattr(SshTransport, name, counting(asked, name, getattr(SshTransport, name)))
    counts = []
    for elements in (2, 6):
        held = {"resources": {"options": {"slurm": {"begin": "now+1hour"}}}, "secrets": {"TOKEN": "s3cret"}}
        runs = [far.prepare("pass", **held) for _ in range(elements)]
        asked.clear()
        handles = runs[0].backend.submit_array([run.plan for run in runs], {"TOKEN": "s3cret"}, at_once=None)
        counts.append(len(asked))
        assert json.loads((runs[-1].directory / "secrets.json").read_text()) == {"TOKEN": "s3cret"}
        far.slurm.run("scancel", handles[0].native_id.partition("_")[0])
    assert counts[0] == counts[1]


def counting(asked: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **more: Any) -> Any:
        asked.append(name)
        return real(*args, **more)

    return counted


def test_looking_at_many_attempts_takes_one_login_and_as_few_calls_as_on_the_login_node(
    far: Any, login_node: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = {"resources": {"options": {"slurm": {"begin": "now+1hour"}}}}
    handles = [far.start("pass", **waiting).handle for _ in range(3)]
    backend = SlurmBackend(far.cluster)
    asked: list[str] = []
    transport = backend._transport
    for name in ("run", "read_many"):
        monkeypatch.setattr(transport, name, counting(asked, name, getattr(transport, name)))
    before = login_node.logins()
    for _ in range(2):
        assert {seen.phase for seen in backend.poll(handles).values()} == {Phase.PENDING}
    backend.close()
    assert login_node.logins() == before + 1
    assert asked.count("run") == 2  # squeue
    assert asked.count("read_many") <= 6
    far.slurm.run("scancel", *(handle.native_id for handle in handles))


def test_nodes_are_entered_through_the_login_node(far: Any) -> None:
    run = far.start(SLEEP, resources={"nodes": 2}, env={"GREETING": 'it\'s "me" & $HOME'})
    for rank in range(2):
        run.until_said("up", rank)
    nodes = run.backend.entries(run.handle)
    assert [entry.argv(["true"])[0] for entry in nodes] == ["ssh", "ssh"]
    argv = on_node(nodes[1], ["sh", "-c", 'echo "$GREETING|$ORC_NODE_RANK|$SLURM_NODEID"; exit 7'])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.stdout, done.returncode) == ('it\'s "me" & $HOME|1|1\n', 7), done.stderr
    run.cancel(0)
    run.ended()


def test_a_snapshot_comes_back_from_the_cluster(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = far.prepare("print('the code')", resources={"options": {"slurm": {"begin": "now+1hour"}}}).submit()
    digest = run.plan.trees["code"]
    monkeypatch.setenv("ORC_STATE_DIR", str(tmp_path / "another machine"))
    assert run.handle is not None
    SlurmBackend(far.cluster).recall(digest, run.handle)
    store = ContentStore(state_dir() / "store")
    assert store.load(digest).digest == digest
    run.cancel(0)


def test_a_login_node_that_does_not_answer_says_nothing_about_the_job(
    far: Any, unreachable: None, request: pytest.FixtureRequest
) -> None:
    backend, plan, snapshot = far.render("pass")
    assert [f.unreachable for f in backend.preflight(plan) if f.level == "error"] == [True, True]
    with pytest.raises(BackendUnreachable, match="refused the connection"):
        backend.stage(snapshot)
    with pytest.raises(BackendUnreachable, match="refused the connection"):
        backend.find(plan.marker)
    with pytest.raises(BackendUnreachable, match="refused the connection"):
        backend.submit(plan, {})


def test_rendering_asks_nobody_and_a_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(name="far", kind="slurm", options={"login": "nowhere.invalid"})
    assert str(SlurmBackend(cluster).layout.root) == "~/.local/state/orc"
    with pytest.raises(SpecError, match="~bob/orc"):
        SlurmBackend(cluster.model_copy(update={"root": "~bob/orc"}))
