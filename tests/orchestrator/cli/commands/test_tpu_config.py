"""`orc tpu-config`: commands on the workers of a TPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orc.launchers.backends.tpu import TpuBackend
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.transfer.targets import Targets

TPU = {"kind": "tpu", "options": {"project": "demo-project", "zones": ["us-central2-b"], "accelerator_type": "v4-16"}}
REFUSED = [
    (("--command", "id"), "which TPU? Give --tpu-name"),
    (("--tpu-name", "n"), "nothing to run: give --command, --command-file or --install-orc"),
    (("--tpu-name", "n", "--command", "id", "--env", "A"), "'A' sets no variable; write NAME=VALUE"),
    (("--tpu-name", "n", "--install-orc", "--orc-version", "x; id"), "'x; id' is no version; give latest, dev or"),
    (("--tpu-name", "n", "--command-file", "nowhere"), "cannot be read: No such file or directory"),
    (("--tpu-name", "n", "--command-file", "empty"), "the file holds no commands"),
    (("--config-file", "list.yaml"), "expected a mapping of keys and values"),
    (("--config-file", "bad.yaml"), "bad.yaml:1:1: unknown key 'tpu_nme', did you mean 'tpu_name'?"),
    (("--config-file", "bad.yaml"), "bad.yaml:2:11: commands: expected a list of texts, not a mapping"),
    (("--tpu-name", "n", "--command", "id", "--cluster", "local"), "local is of kind local, not tpu"),
]


@pytest.fixture
def clusters(orc_home: Path):
    """Write clusters.yaml: TPU clusters by name."""

    def write(**found: Any) -> None:
        (orc_home / "config").mkdir(parents=True, exist_ok=True)
        (orc_home / "config" / "clusters.yaml").write_text(yaml.safe_dump(found))

    write(pod=TPU)
    return write


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """This machine in the place of two workers; what they were asked for."""
    asked: dict[str, Any] = {}

    def stores(backend: TpuBackend, plan: Any = None) -> Targets:
        asked.update(zones=list(backend.settings.options.zones), name=backend.settings.options.name)
        return Targets({f"worker-{number}": (LocalTransport(), "/r") for number in (0, 1)}, {})

    monkeypatch.setattr(TpuBackend, "stores", stores)
    return asked


def test_debug_prints_what_would_be_run_and_touches_nothing(orc, clusters) -> None:
    done = orc(
        *("tpu-config", "--debug", "--command", "echo a", "--command", "echo 'b c'", "--tpu_name", "n"),
        *("--tpu_zone", "europe-west4-a", "--install_accelerate"),
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "# on all workers of the TPU n in europe-west4-a (cluster pod):\n"
        "/bin/sh -e -c 'eval \"$(cat)\"' <<'EOF'\n"
        "exec 2>&1 </dev/null\n"
        "python3 -m pip install --upgrade orc-launch\n"
        "echo a\n"
        "echo 'b c'\n"
        "EOF\n"
    )
    loaded = [name for name in sys.modules if name.startswith(("google.cloud.tpu", "grpc"))]
    done = orc("tpu-config", "--debug", "--json", "--command", "id", "--tpu-name", "n", "--worker", "1", "--use-sudo")
    assert done.json == {
        "cluster": "pod",
        "tpu": "n",
        "zones": ["us-central2-b"],
        "workers": [1],
        "argv": ["sudo", "-n", "/bin/sh", "-e", "-c", 'eval "$(cat)"'],
        "script": "exec 2>&1 </dev/null\nid",
    }
    assert [name for name in sys.modules if name.startswith(("google.cloud.tpu", "grpc"))] == loaded


def test_lines_of_all_workers_come_with_their_names(orc, clusters, workers, place: Path) -> None:
    (place / "prepare.sh").write_text("echo $GREETING\nfor i in 1 2; do\n  echo $i\ndone\n")
    done = orc(
        *("tpu-config", "--tpu-name", "my-tpu", "--command-file", "prepare.sh", "--command", "echo last"),
        *("--env", "GREETING=hello there"),
    )
    assert (done.code, done.err) == (0, "")
    for worker in ("worker-0", "worker-1"):
        lines = [line for line in done.out.splitlines() if line.startswith(f"{worker}: ")]
        assert lines == [f"{worker}: {text}" for text in ("hello there", "1", "2", "last")]
    assert workers == {"zones": ["us-central2-b"], "name": "my-tpu"}


def test_the_status_is_that_of_the_worst_worker(orc, clusters, workers) -> None:
    done = orc("tpu-config", "--tpu-name", "n", "--worker", "1", "--command", "echo on", "--command", "exit 3")
    assert (done.code, done.out) == (3, "worker-1: on\n")
    assert done.err == "worker-1: ended with status 3\nfailed on 1 of 1 workers\n"
    found = json.loads(orc("tpu-config", "--json", "--tpu-name", "n", "--command", "echo x; exit 4").out)
    assert found["workers"] == [{"worker": f"worker-{n}", "status": 4, "problem": "", "output": ["x"]} for n in (0, 1)]


def test_the_orc_that_is_here_is_copied_to_the_workers_and_installed(
    orc, clusters, workers, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place / "home"))
    target = place / "target"
    monkeypatch.setenv("PIP_TARGET", str(target))
    for name in ("PIP_NO_DEPS", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    python = {**TPU, "python": sys.executable}
    clusters(pod=python)
    words = ("tpu-config", "--tpu-name", "n", "--worker", "0", "--install-accelerate", "--accelerate-version", "dev")
    done = orc(*words)
    assert done.code == 0, done.out + done.err
    (wheel,) = (place / "home/.cache/orc/wheels").iterdir()
    code = "import orc.launch, orc.runtime, orc.templates; from importlib.metadata import version as v;"
    code += "print(orc.runtime.__path__[0], v('orc-launch'))"
    shown = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(target)}, capture_output=True)
    assert shown.stdout.decode().split() == [str(target / "orc/runtime"), wheel.name.split("-")[1]], shown.stderr
    assert (target / "orc/orchestrator/service/web/templates/base.html").exists()


def test_accelerates_configuration_is_read_and_options_win(orc, clusters, workers, place: Path) -> None:
    (place / "more.sh").write_text("echo from a file\n")
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "TPU",
        "tpu_name": "configured",
        "tpu_zone": "europe-west4-a",
        "commands": "echo $A, again\n",
        "command_file": "more.sh",
        "tpu_env": ["A=configured"],
    }
    (place / "accelerate.yaml").write_text(yaml.safe_dump(config))
    done = orc("tpu-config", "--config_file", "accelerate.yaml", "--worker", "0")
    assert done.out == "worker-0: from a file\nworker-0: configured, again\n"
    assert workers == {"zones": ["europe-west4-a"], "name": "configured"}
    done = orc(
        *("tpu-config", "--config-file", "accelerate.yaml", "--worker", "0", "--command", "echo only $A"),
        *("--tpu-name", "other", "--env", "A=given"),
    )
    assert (done.out, workers["name"]) == ("worker-0: only given\n", "other")


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_what_cannot_be_done_is_refused_before_anybody_is_asked(orc, clusters, place, arguments, reason) -> None:
    (place / "empty").write_text("\n")
    (place / "list.yaml").write_text("- a\n")
    (place / "bad.yaml").write_text("tpu_nme: n\ncommands: {a: id}\n")
    done = orc("tpu-config", *arguments)
    assert done.code == 2
    assert reason in done.err


def test_which_cluster_is_meant_has_to_be_clear(orc, clusters) -> None:
    clusters(one=TPU, two=TPU)
    assert "several clusters are of kind tpu: one, two" in orc("tpu-config", "--tpu-name", "n", "--command", "id").err
    clusters(one=TPU, two={**TPU, "rot": "/x"})  # which may be meant, too
    done = orc("tpu-config", "--tpu-name", "n", "--command", "id")
    assert (done.code, done.out) == (2, "")
    assert "two" in done.err
    clusters()
    assert "there is no cluster of kind tpu" in orc("tpu-config", "--tpu-name", "n", "--command", "id").err


def test_debug_needs_no_cluster_when_name_and_zone_are_given(orc) -> None:
    given = ("tpu-config", "--debug", "--tpu_name", "n", "--command", "a", "--command", "b")
    done = orc(*given, "--tpu_zone", "z")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "# on all workers of the TPU n in z:"
    assert done.out.splitlines()[-3:] == ["a", "b", "EOF"]
    assert orc(*given, "--tpu_zone", "z", "--json").json["cluster"] is None
    assert "there is no cluster of kind tpu" in orc(*given).err


@pytest.mark.hosts
@pytest.mark.xdist_group("hosts")
def test_workers_of_a_real_pod_run_it_over_ssh(orc, clusters, tpu_pods) -> None:
    from google.cloud.tpu_v2 import Node
    from tpu_testbed import PROJECT, ZONE

    public = tpu_pods.hosts.identity.with_suffix(".pub").read_text().strip()
    node = Node(accelerator_type="v4-16", runtime_version="tpu-ubuntu2204-base", metadata={"ssh-keys": f"u:{public}"})
    parent = f"projects/{PROJECT}/locations/{ZONE}"
    tpu_pods.api.client().create_node(parent=parent, node=node, node_id="setup").result(timeout=60)
    cluster = tpu_pods.cluster(connect_timeout=30).model_dump(mode="json", exclude_defaults=True)
    clusters(pod={key: value for key, value in cluster.items() if key != "name"})
    done = orc(
        *("tpu-config", "--tpu-name", "setup", "--command", "echo $HOME >made", "--command", "cat made; uname -n"),
        *("--command", 'test "$(uname -n)" != node2'),
    )
    assert done.code == 1, done
    said = {worker: [] for worker in ("worker-0", "worker-1")}
    for line in done.out.splitlines():
        worker, _, text = line.partition(": ")
        said[worker].append(text)
    homes = tpu_pods.homes("setup")
    assert [home.joinpath("made").read_text().strip() for home in homes] == [lines[0] for lines in said.values()]
    assert [lines[1] for lines in said.values()] == ["node1", "node2"]
    assert done.err == "worker-1: ended with status 1\nfailed on 1 of 2 workers\n"
