"""Pods that wait, are evicted, lose their node or run out of memory: verdicts on a cluster that is this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from kubernetes_testbed import IMAGE, MOUNT, NAMESPACE, KubernetesTestbed

from orc.launchers.backends.base import Backend, Cause, Phase
from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.containers.transport import wait_for
from orc.launchers.testing.jobs import Job, MakeJob

SAVING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def started(job: Job, ranks: int = 2) -> Job:
    job.submit()
    for rank in range(ranks):
        job.until_log(rank, "ready")
    return job


def test_evicted_pods_save_and_the_attempt_was_preempted(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = started(make_job(SAVING, nodes=2))
    kubernetes_testbed.evict(kubernetes_testbed.pods()[1])
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.PREEMPTED)
    assert [job.log(rank) for rank in (0, 1)] == ["ready\nsaved\n"] * 2  # all of them, not only those that were told


def commands() -> str:
    """Return the command lines of all processes; a pod has other numbers of them."""
    found = ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found += path.read_text(errors="replace")
    return found


def test_a_command_that_is_left_is_ended_and_no_thread_waits_for_its_output(
    backend_under_test: KubernetesBackend,
) -> None:
    argv = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)", f"left-{os.getpid()}"]
    with backend_under_test.transport.stream(argv, timeout_s=60) as process:
        assert process.read(100) == b"up\n"
        assert argv[-1] in commands()
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("container python"))
    thread.join(20)
    assert not thread.is_alive()
    assert wait_for(lambda: argv[-1] not in commands(), 20)


def test_a_node_that_is_lost_ends_the_attempt_and_is_named(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(SAVING, nodes=2, grace=1, resources={"gpus_per_node": 2, "procs_per_node": 1})
    config = json.loads(job.plan.files[0].content)
    config["peer_timeout_s"], config["heartbeat_s"] = 3.0, 0.5
    changed = type(job.plan.files[0])(job.plan.files[0].path, json.dumps(config), 0o600)
    object.__setattr__(job.plan, "files", (changed, *job.plan.files[1:]))
    started(job)
    away = kubernetes_testbed.pods()[1]["spec"]["nodeName"]
    kubernetes_testbed.node_lost(away)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.LOST, Cause.NODE_FAILURE)
    assert seen.failed_hosts == (away,)
    assert "was taken from" in seen.reason


def test_a_pod_that_takes_too_much_memory_is_a_crash_with_what_to_do(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = started(make_job(SAVING, resources={"memory": "2G"}), ranks=1)
    kubernetes_testbed.kill(kubernetes_testbed.pods()[0], "OOMKilled")
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.CRASH)
    assert "its limit of 2Gi (OOMKilled): ask for more `memory`" in seen.reason


def test_a_job_that_fits_nowhere_waits_with_the_schedulers_reason_and_can_be_cancelled(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(
        "pass", nodes=2, resources={"gpus_per_node": 4, "procs_per_node": 1}, secrets={"TOKEN": "x"}
    ).submit()
    seen = job.until(lambda o: "Insufficient" in o.reason)
    assert (seen.phase, seen.reason) == (Phase.PENDING, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    report = job.backend.queue([job.handle])  # type: ignore[attr-defined]
    assert [(q.marker, q.state, q.nodes, q.reason) for q in report.jobs] == [
        (job.plan.marker, "Pending", 2, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    ]
    assert [(p.name, p.nodes, p.idle_nodes, p.resources) for p in report.partitions] == [
        ("nodes", 2, 2, ("nvidia.com/gpu:2 per node",))
    ]
    job.cancel(0)
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.CANCELLED, Cause.CANCELLED)
    assert kubernetes_testbed.pods() == []
    assert kubernetes_testbed.store.list("secrets", NAMESPACE) == []


def test_a_part_that_does_not_start_within_its_window_ends_the_whole_attempt(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    kubernetes_testbed.store.update("nodes", "", "node-2", lambda node: node["spec"].update(unschedulable=True))
    options = {"kubernetes": {"start_within": 1}}
    resources = {"gpus_per_node": 2, "procs_per_node": 1, "options": options}
    job = make_job("import time; time.sleep(600)", nodes=2, resources=resources).submit()
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.NODE_FAILURE)
    told = "1 of 2 pods did not start within 1 s: 0/2 nodes are available: 1 Insufficient nvidia.com/gpu, "
    assert seen.reason == f"{told}1 node(s) were unschedulable."
    again = job.poll()  # its Job is gone, the reason is not
    assert (again.phase, again.cause, again.reason) == (seen.phase, seen.cause, seen.reason)
    assert kubernetes_testbed.store.list("jobs", NAMESPACE) == []


@pytest.mark.parametrize(
    ("image", "what"),
    [("missing/image:1", "missing/image:1 cannot be pulled: failed to pull"), ("bare/scratch", '"python3"')],
)
def test_an_image_that_is_missing_or_has_no_python_is_a_failed_launch(make_job: MakeJob, image: str, what: str) -> None:
    job = make_job("pass", resources={"options": {"kubernetes": {"image": image}}}).submit()
    seen = job.wait()
    assert (seen.phase, seen.cause) == (Phase.FAILED, Cause.LAUNCH)
    assert what in seen.reason


def test_a_gate_whose_image_is_missing_says_so_and_one_that_is_gone_is_made_again(
    kubernetes_testbed: KubernetesTestbed, backend_under_test: Backend
) -> None:
    from orc.launchers.errors import BackendError

    lost = KubernetesBackend(kubernetes_testbed.cluster(image="missing/image:1"))
    with pytest.raises(
        BackendError, match=r"that reaches the volume, orc-gate-.* does not start: the image missing/image:1 cannot"
    ):
        lost.transport.names(MOUNT)
    transport = backend_under_test.stores().roots["k8s"][0]
    transport.write(f"{MOUNT}/a", b"1")
    (gate,) = [p for p in kubernetes_testbed.pods("orc-launch/gate") if p["spec"]["containers"][0]["image"] == IMAGE]
    kubernetes_testbed.store.delete("pods", NAMESPACE, gate["metadata"]["name"], grace=0)
    assert transport.read(f"{MOUNT}/a") == b"1"


def test_commands_run_in_the_pod_of_a_node_with_their_input_and_their_exit_status(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    from dataclasses import replace

    job = started(make_job(SAVING, nodes=2))
    first, second = job.backend.entries(job.handle)  # type: ignore[attr-defined]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["sh", "-c", "hostname; cat; echo no >&2; exit 3"]
    done = subprocess.run(second.argv(words), input=b"in", capture_output=True, env=env, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (3, f"{job.plan.marker}-1\nin", b"no\n")
    # The size is sent after the start.
    words = ["sh", "-c", "test -t 0 && while stty size | grep -q '^0 '; do sleep 0.1; done; stty size && exit 4"]
    done = subprocess.run(
        first.argv(words, terminal=True), stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False
    )
    assert (done.returncode, done.stdout.decode().split()) == (4, ["24", "80"])
    away = replace(first, prefix=(*first.prefix[:-1], "7"))
    done = subprocess.run(away.argv(["true"]), capture_output=True, env=env, check=False)
    assert (done.returncode, done.stderr.decode()) == (
        1,
        f"orc: Job {job.plan.marker}: the pod of node 7 does not run\n",
    )


def test_files_of_configmaps_and_secrets_are_in_the_pods(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    for resource, kind, name, key, data in (
        ("configmaps", "ConfigMap", "settings", "data", {"rate": "3"}),
        ("secrets", "Secret", "login", "stringData", {"key": "k"}),
    ):
        body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, key: data}
        kubernetes_testbed.store.create(resource, NAMESPACE, body)
    volumes = [{"config_map": "settings", "path": "/mnt/settings"}, {"secret": "login", "path": "/mnt/login"}]
    source = "print(open('/mnt/settings/rate').read(), open('/mnt/login/key').read())"
    job = make_job(source, resources={"options": {"kubernetes": {"volumes": volumes}}}).submit()
    assert job.wait().phase is Phase.SUCCEEDED
    assert job.log(0) == "3 k\n"
