"""The local backend beyond the conformance suite: agents that die, machines that restart, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from polling import until

from orc.launchers.agent.gpus import gpu_count
from orc.launchers.agent.procfs import marked_processes, process_start
from orc.launchers.agent.records import read_json
from orc.launchers.agent.variables import without_own
from orc.launchers.backends.base import Cause, Handle, Phase, Snapshot
from orc.launchers.backends.local.backend import LocalBackend, _python_problem
from orc.launchers.errors import BackendError, NoRoom
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster, builtin_local

IDLE = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def backend() -> LocalBackend:
    return LocalBackend(builtin_local())


@pytest.fixture
def plan(backend: LocalBackend, tmp_path: Path) -> Callable[..., Plan]:
    def make(source: str, number: int = 2, **spec: Any) -> Plan:
        (tmp_path / "workdir").mkdir(exist_ok=True)
        (tmp_path / "workdir/train.py").write_text(textwrap.dedent(source))
        store = ContentStore(backend.state_dir / "store")
        snapshot = Snapshot(store.snapshot(tmp_path / "workdir").bundle, store.ingest(runtime_bundle()))
        job = JobSpec.model_validate({"name": "x", "script": "train.py", "launcher": "python", "grace": 2, **spec})
        backend.stage(snapshot)
        return backend.render(job, snapshot, AttemptId(f"x-k3f9a{number}", 1))

    return make


def look(backend: LocalBackend, handle: Handle) -> Any:
    return backend.poll([handle])[handle]


def ready(handle: Handle, rank: int = 0) -> None:
    path = Path(handle.native_id, "logs", f"rank-{rank}.log")
    until(lambda: path.exists() and "ready" in path.read_text())


def pid_of(handle: Handle, name: str) -> int:
    record = read_json(f"{handle.native_id}/{name}")
    assert record is not None
    return int(record["pid"])


def kill_all(handle: Handle, nodes: int = 1) -> None:
    pids = [pid_of(handle, name) for name in ("gang.json", *(f"node-{node}/lease.json" for node in range(nodes)))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(process_start, pids)))


def test_an_attempt_whose_agents_were_killed_is_lost_and_has_no_process_left(backend, plan):
    handle = backend.submit(
        plan("import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True);" + IDLE), {}
    )
    ready(handle)
    assert look(backend, handle).phase is Phase.RUNNING
    kill_all(handle)
    seen = until(lambda: (o := look(backend, handle)).phase.ended and o)
    assert (seen.phase, seen.cause) == (Phase.LOST, Cause.NODE_FAILURE)
    assert seen.reason == "the agent of node 0 was killed"
    assert marked_processes(handle.native_id) == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_secrets_do_not_outlive_agents_that_were_killed(backend, plan, nodes):
    handle = backend.submit(plan(IDLE, secrets=["TOKEN"], resources={"nodes": nodes}), {"TOKEN": "geheim-4711"})
    for rank in range(nodes):
        ready(handle, rank)
    assert Path(handle.native_id, "secrets.json").exists()
    kill_all(handle, nodes)
    until(lambda: look(backend, handle).phase.ended)
    assert not Path(handle.native_id, "secrets.json").exists()


def test_a_killed_node_agent_alone_is_a_node_failure(backend, plan):
    handle = backend.submit(plan(IDLE, resources={"nodes": 2}), {})
    ready(handle, 0)
    ready(handle, 1)
    os.kill(pid_of(handle, "node-1/lease.json"), signal.SIGKILL)
    seen = until(lambda: (o := look(backend, handle)).phase.ended and o)
    assert (seen.phase, seen.cause) == (Phase.LOST, Cause.NODE_FAILURE)
    assert "the agent of node 1 was killed by SIGKILL" in seen.reason


def test_after_a_restart_of_the_machine_the_attempt_is_lost(backend, plan):
    handle = backend.submit(plan(IDLE), {})
    ready(handle)
    kill_all(handle)
    until(lambda: not marked_processes(handle.native_id))
    for name in ("gang.json", "node-0/lease.json"):
        path = Path(handle.native_id, name)
        lease = json.loads(path.read_text())
        # Another boot; the process number may be in use again, and is: by this very test.
        path.write_text(json.dumps({**lease, "boot_id": "before", "pid": os.getpid()}))
    seen = look(backend, handle)
    assert (seen.phase, seen.cause, seen.reason) == (Phase.LOST, Cause.NODE_FAILURE, "the machine was restarted")


def test_an_attempt_on_another_machine_of_a_shared_root_is_not_called_lost(backend, plan):
    handle = backend.submit(plan(IDLE), {})
    ready(handle)
    kill_all(handle)
    until(lambda: not marked_processes(handle.native_id))
    for name in ("gang.json", "node-0/lease.json"):
        path = Path(handle.native_id, name)
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "far-away", "boot_id": "other"}))
    beat = Path(handle.native_id, "node-0/heartbeat.json")
    beat.write_text(json.dumps({**json.loads(beat.read_text()), "at": time.time()}))
    assert (look(backend, handle).phase, look(backend, handle).reason) == (Phase.RUNNING, "on far-away")
    beat.write_text(json.dumps({**json.loads(beat.read_text()), "at": time.time() - 1000}))
    assert look(backend, handle).phase is Phase.UNKNOWN


def test_an_attempt_whose_directory_is_gone_is_lost(backend):
    handle = Handle("local", "local", "orc-x-k3f9a2-a1", str(Path(backend.root) / "jobs/x-k3f9a2/a1"))
    seen = look(backend, handle)
    assert seen.phase is Phase.LOST
    assert "was removed" in seen.reason


@pytest.mark.parametrize("cancel", [False, True])
def test_an_attempt_whose_directory_is_removed_while_it_runs_is_ended(backend, plan, cancel):
    handle = backend.submit(plan(IDLE), {})
    ready(handle)
    gang = pid_of(handle, "gang.json")
    removed = Path(handle.native_id).rename(Path(backend.root) / "removed")  # in one step: its agent writes into it
    shutil.rmtree(removed)
    if cancel:
        backend.cancel([handle], timedelta(seconds=5))
    else:
        assert look(backend, handle).phase is Phase.LOST
    assert marked_processes(handle.native_id) == []
    until(lambda: process_start(gang) is None)


def test_cancelling_an_attempt_whose_agents_are_gone_ends_what_they_left(backend, plan):
    handle = backend.submit(
        plan("import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True);" + IDLE), {}
    )
    ready(handle)
    kill_all(handle)
    until(lambda: len(marked_processes(handle.native_id)) == 1)
    backend.cancel([handle], timedelta(seconds=5))
    assert marked_processes(handle.native_id) == []


def test_a_crash_counts_though_the_agent_was_killed_before_its_record(backend, plan):
    handle = backend.submit(plan(IDLE), {})
    ready(handle)
    kill_all(handle)
    stop = {"node": 0, "host": "h", "outcome": "crash", "reason": "rank 0 exited with 3", "exit_status": 3, "at": 1.0}
    failure = {"rank": 0, "node": 0, "host": "h", "exit_code": 3, "at": 1.0, "log_tail": "oh"}
    Path(handle.native_id, "stop-r0.json").write_text(json.dumps({**stop, "first_failure": failure}))
    seen = until(lambda: (o := look(backend, handle)).phase.ended and o)
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert seen.exit.first_failure.log_tail == "oh"
    assert not seen.exit.complete


def test_the_next_reconciler_pass_is_started_with_the_state_of_this_one(backend, plan, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    rendered = plan("pass", resources={"nodes": 2})
    monkeypatch.undo()
    # In place of the interpreter, something that writes down how it was called.
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$ORC_STATE_DIR $*" >> {tmp_path}/called\n')
    (tmp_path / "python").chmod(0o755)
    argv = (sys.executable, *rendered.commands[0].argv[1:])
    backend.submit(Plan(**{**vars(rendered), "commands": (type(rendered.commands[0])(argv),)}), {})
    called = tmp_path / "called"
    until(lambda: called.exists() and called.read_text().endswith("\n"))
    assert called.read_text() == f"{backend.state_dir} -m orc.orchestrator.cli.main tick --job x-k3f9a2\n"


def test_a_job_of_another_user_gets_nothing_of_the_services_environment(plan, monkeypatch):
    monkeypatch.setenv("ORC_LEDGER_URL", "postgresql://canary")
    monkeypatch.setenv("CANARY", "canary")
    monkeypatch.setenv("LC_TIME", "C")
    program = "import json, os; print('FOUND', json.dumps(dict(os.environ)), flush=True)"
    service = LocalBackend(builtin_local().model_copy(update={"run_as": "service"}))
    prepared = plan(program, env={"MINE": "said"})
    handle = service.submit(prepared, {})
    until(lambda: look(service, handle).phase is Phase.SUCCEEDED)
    output = Path(handle.native_id, "logs", "rank-0.log").read_text()
    environment = json.loads(output.partition("FOUND ")[2].partition("\n")[0])
    assert (environment["MINE"], environment["LC_TIME"], environment["PATH"]) == ("said", "C", os.environ["PATH"])
    assert "canary" not in json.dumps(environment)


def test_files_are_private(backend, plan):
    handle = backend.submit(plan("pass", secrets=["TOKEN"]), {"TOKEN": "x"})
    until(lambda: look(backend, handle).phase.ended)
    gang = pid_of(handle, "gang.json")
    until(lambda: process_start(gang) is None)  # it tidies up behind the last record
    directory = Path(handle.native_id)
    for path in (directory, directory.parent, *directory.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path} has mode {mode:o}"


def test_a_missing_secret_is_refused_and_leaves_nothing(backend, plan):
    rendered = plan("pass", secrets=["TOKEN", "OTHER"])
    with pytest.raises(BackendError, match="OTHER"):
        backend.submit(rendered, {"TOKEN": "geheim"})
    assert not (Path(backend.root) / "jobs").exists()


def test_an_agent_that_cannot_start_is_a_clear_error_and_leaves_no_secret(backend, plan):
    rendered = plan("pass", secrets=["TOKEN"])
    argv = (sys.executable, "-c", "import sys; sys.exit('no memory today')")
    broken = Plan(**{**vars(rendered), "commands": (type(rendered.commands[0])(argv),)})
    with pytest.raises(BackendError, match="no memory today") as caught:
        backend.submit(broken, {"TOKEN": "geheim"})
    assert "geheim" not in str(caught.value)
    assert not list(Path(backend.root).rglob("secrets.json"))
    assert backend.find(rendered.marker) is None
    missing = Plan(**{**vars(rendered), "commands": (type(rendered.commands[0])(("/no/such/python",)),)})
    with pytest.raises(BackendError, match="/no/such/python"):
        backend.submit(missing, {"TOKEN": "geheim"})


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MiB")
def test_a_full_disk_refuses_the_submission_and_says_so(backend, plan):
    rendered = plan("pass", env={"LARGE": "x" * 100_000})
    jobs = Path(backend.root) / "jobs"
    jobs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", jobs], check=True)
    try:
        with pytest.raises(BackendError) as caught:
            backend.submit(rendered, {})
        assert "No space left" in str(caught.value)
        assert not [path for path in jobs.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", jobs], check=True)


def test_find_sees_a_gang_that_is_only_just_starting(backend):
    directory = Path(backend.root) / "jobs/x-k3f9a2/a1"
    directory.mkdir(parents=True)  # as `submit` has written agent.json into it
    argv = [sys.executable, "-c", "import time; time.sleep(600)", "gang", str(directory / "agent.json")]
    starting = subprocess.Popen([*argv, "--owner", "local:orc-x-k3f9a2-a1"])
    try:
        found = until(lambda: backend.find("orc-x-k3f9a2-a1"))
        assert found.native_id == str(directory)
        assert backend.find("orc-x-k3f9a2-a2") is None
    finally:
        starting.kill()
        starting.wait()


@pytest.mark.parametrize(("free", "level"), [(100 << 10, "error"), (10 << 20, "warning"), (1 << 30, None)])
def test_preflight_refuses_a_full_disk(backend, plan, monkeypatch, free, level):
    rendered = plan("pass")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    assert [f.level for f in backend.preflight(rendered) if "are free in" in f.what] == ([level] if level else [])


def test_preflight_tells_what_will_not_work(plan, tmp_path):
    fine = LocalBackend(builtin_local())
    rendered = plan("pass")
    assert [f for f in fine.preflight(rendered) if f.level != "info"] == []
    config = json.loads(rendered.files[0].content)
    broken = {**config, "python": "/no/such/python", "nproc": 10_000}
    file = type(rendered.files[0])(rendered.files[0].path, json.dumps(broken), 0o600)
    findings = fine.preflight(Plan(**{**vars(rendered), "files": (file,)}))
    assert [(f.level, "10000 processes" in f.what or "/no/such/python" in f.what) for f in findings] == [
        ("error", True),
        ("info", True),
    ]
    in_a_file = LocalBackend(Cluster(name="odd", kind="local", root="/etc/passwd/orc"))
    assert [(f.level, f.what) for f in in_a_file.preflight(rendered)][:1] == [
        ("error", "/etc/passwd is not a directory")
    ]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"nodes": 2, "gpus_per_node": 300}, "the job asks for 600 GPUs, this machine has "),
        ({"memory": "9999T"}, "the job asks for 10238976.0 GiB, this machine has "),
    ],
)
def test_preflight_refuses_more_than_the_machine_has(backend, plan, resources, said):
    errors = [f for f in backend.preflight(plan("pass", resources=resources)) if f.level == "error"]
    assert [f.what.startswith(said) for f in errors] == [True]
    assert "resources." in errors[0].hint


def test_preflight_says_that_memory_is_not_limited(backend, plan):
    (finding,) = [f for f in backend.preflight(plan("pass", resources={"memory": "1M"})) if f.level == "warning"]
    assert "limits nothing" in finding.what
    assert finding.hint


TWO_GPUS = "GPU 0: NVIDIA L4 (UUID: GPU-aaaa)\nGPU 1: NVIDIA L4 (UUID: GPU-bbbb)\n"
SHOWN = "import os; print('ready', os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True);" + IDLE


def shown(handle: Handle, rank: int = 0) -> str:
    ready(handle, rank)
    return Path(handle.native_id, "logs", f"rank-{rank}.log").read_text().split("\n")[0]


def numbered(plan: Callable[..., Plan], number: int, **resources: Any) -> Plan:
    return plan(SHOWN, number=number, resources=resources)


def test_each_job_and_each_node_has_gpus_of_its_own_and_the_next_job_waits_for_them(backend, plan, nvidia_smi):
    nvidia_smi(TWO_GPUS)
    first = backend.submit(numbered(plan, 1, gpus_per_node=1), {})
    assert shown(first) == "ready GPU-aaaa"
    second = backend.submit(numbered(plan, 2, gpus_per_node=1), {})
    assert shown(second) == "ready GPU-bbbb"
    both = numbered(plan, 3, gpus_per_node=1, nodes=2)
    with pytest.raises(NoRoom, match="waiting for GPUs, which orc-x-k3f9a1-a1, orc-x-k3f9a2-a1 have"):
        backend.submit(both, {})
    assert backend.find(both.marker) is None
    kill_all(first)
    backend.cancel([second], timedelta(seconds=1))
    until(lambda: all(o.phase.ended for o in backend.poll([first, second]).values()))
    third = until(lambda: _submitted(backend, both))
    assert [shown(third, rank) for rank in range(2)] == ["ready GPU-aaaa", "ready GPU-bbbb"]
    backend.cancel([third], timedelta(seconds=1))
    until(lambda: look(backend, third).phase.ended)


def _submitted(backend: LocalBackend, plan: Plan) -> Handle | None:
    try:
        return backend.submit(plan, {})
    except NoRoom:
        return None


def test_preflight_counts_the_gpus_that_jobs_may_take(backend, plan, nvidia_smi):
    nvidia_smi(TWO_GPUS)
    asked = {"gpus_per_node": 2}
    assert [f for f in backend.preflight(plan("pass", resources=asked)) if f.level == "error"] == []
    chosen = plan("pass", resources=asked, env={"CUDA_VISIBLE_DEVICES": "1"})
    (error,) = [f for f in backend.preflight(chosen) if f.level == "error"]
    assert error.what == "the job asks for 2 GPUs, this machine has 1"
    nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", status=18)
    (error,) = [f for f in backend.preflight(plan("pass", resources=asked)) if f.level == "error"]
    assert error.what == "nvidia-smi -L: Failed to initialize NVML: Driver/library version mismatch"


def test_preflight_names_a_torch_that_cannot_use_the_gpus(backend, plan, nvidia_smi):
    nvidia_smi(TWO_GPUS)
    (finding,) = [f for f in backend.preflight(plan("pass", resources={"gpus_per_node": 2})) if f.level == "warning"]
    assert "+cpu, is built for the CPU alone, and the job asks for 2 GPUs" in finding.what
    assert [f for f in backend.preflight(plan("pass")) if f.level == "warning"] == []


def test_ranks_are_told_how_many_gpus_their_job_asks_for_and_a_job_within_it_is_not(backend, plan, nvidia_smi):
    nvidia_smi(TWO_GPUS)
    assert plan("pass", resources={"gpus_per_node": 2}).env["ORC_GPUS"] == "2"
    assert "ORC_GPUS" not in plan("pass").env
    assert without_own({"ORC_GPUS": "2", "A": "b"}) == {"A": "b"}


def test_gpus_are_counted_without_a_library(tmp_path):
    assert gpu_count(str(tmp_path)) == 0
    for number in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    assert gpu_count(str(tmp_path)) == 2
    for number, gpu in enumerate(("0", "4098")):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu}\n")
    assert gpu_count(str(tmp_path)) == 3
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert gpu_count(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("there", "fp8", "said"),
    [
        ("AO", {}, None),
        (
            "AO",
            {"backend": "te"},
            "fp8 with the back end te needs the package transformer_engine[pytorch], which is not",
        ),
        ("", {}, "needs one of the packages ms-amp, transformer_engine[pytorch], torchao, and none is installed"),
    ],
)
def test_fp8_without_its_library_is_refused_before_anything_is_submitted(plan, backend, tmp_path, there, fp8, said):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncase $* in *find_spec*) echo {there};; *) echo 3 12 0;; esac\n")
    python.chmod(0o755)
    rendered = plan("pass", runtime={"mixed_precision": "fp8", "fp8": fp8})
    config = {**json.loads(rendered.files[0].content), "python": str(python)}
    file = type(rendered.files[0])(rendered.files[0].path, json.dumps(config), 0o600)
    errors = [f.what for f in backend.preflight(Plan(**{**vars(rendered), "files": (file,)})) if f.level == "error"]
    assert len(errors) == (said is not None)
    assert all(said in what and str(python) in what for what in errors)


def test_a_root_elsewhere_gets_its_own_copy_of_the_snapshot(plan, backend, tmp_path):
    rendered = plan("pass")
    elsewhere = LocalBackend(Cluster(name="scratch", kind="local", root=str(tmp_path / "scratch")))
    store = ContentStore(backend.state_dir / "store")
    snapshot = Snapshot(store.load(rendered.trees["code"]), store.load(rendered.trees["runtime"]))
    elsewhere.stage(snapshot)
    elsewhere.stage(snapshot)
    there = ContentStore(Path(Layout.at(str(tmp_path / "scratch")).store))
    assert there.has(rendered.trees["code"])
    assert there.has(rendered.trees["runtime"])


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        ("echo 3 9 18", None, "is Python 3.9.18; ranks need 3.10 or newer"),
        ("echo 3 9 18", {"venv": "requirements.txt"}, None),
        ("echo 3 10 13", None, None),
        ("echo broken >&2; exit 3", None, "cannot be started: broken"),
    ],
)
def test_a_python_that_cannot_start_ranks_is_refused(
    tmp_path: Path, text: str, environment: dict[str, str] | None, said: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    problem = _python_problem(str(python), environment=environment is not None)
    assert (said is None and problem is None) or (said and problem == f"{python} {said}")
