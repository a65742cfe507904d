"""Single lines of the batch script, each in the words that Slurm and its plug-ins have for it; and what cannot be one.

What a job and its options cannot mean at the same time is refused, and both sides are named.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from golden_plans import SNAPSHOT
from pydantic import ValidationError

from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.backends.slurm.script import quote
from orc.launchers.errors import LaunchError, RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster


def render(
    options: dict[str, Any], resources: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **job: Any
) -> str:
    backend = SlurmBackend(Cluster(name="hpc", kind="slurm", **{"root": "/shared/orc", **(cluster or {})}))
    spec = {"name": "x", "script": "t.py", "resources": {**(resources or {}), "options": {"slurm": options}}, **job}
    return backend.render(JobSpec.model_validate(spec), SNAPSHOT, AttemptId("x-k3f9a2", 1)).files[1].content


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


# Stands in for srun whose step daemon was killed: all agents end and leave their records, and it does not notice.
STUCK_SRUN = """#!/bin/bash
for node in 0 1; do
    mkdir -p "$DIRECTORY/node-$node"
    printf '{"node": %s, "restart": 0, "exit_status": %s, "ranks": {}}\\n' $node ${STATUS[$node]} \\
        > "$DIRECTORY/node-$node/exit.json"
done
trap '' TERM
while true; do /bin/sleep 0.1; done
"""


@pytest.mark.parametrize(("first", "second", "ended"), [(0, 0, 0), (0, 1, 1), (75, 75, 75)])
def test_an_srun_that_misses_the_end_of_its_agents_is_ended(tmp_path, first: int, second: int, ended: int) -> None:
    backend = SlurmBackend(
        Cluster(name="hpc", kind="slurm", root=str(tmp_path), options={"bin": str(tmp_path / "bin")})
    )
    spec = {"name": "x", "script": "t.py", "resources": {"nodes": 2}, "retry": {"on": []}}
    plan = backend.render(JobSpec.model_validate(spec), SNAPSHOT, AttemptId("x-k3f9a2", 1))
    directory = tmp_path / "jobs" / "x-k3f9a2" / "a1"
    directory.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    srun = STUCK_SRUN.replace("${STATUS[$node]}", f"$(({first} + node * ({second} - {first})))")
    for name, text in {"srun": srun, "sleep": "#!/bin/sh\nexec /bin/sleep 0.05\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "DIRECTORY": str(directory)}
    done = subprocess.run(["bash", "-c", plan.files[1].content], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == ended, done
    assert "all agents have ended, srun has not: ending it" in done.stdout


@pytest.mark.parametrize(
    ("key", "on", "off"),
    [
        ("container_mount_home", "--container-mount-home", "--no-container-mount-home"),
        ("container_remap_root", "--container-remap-root", "--no-container-remap-root"),
        ("container_entrypoint", "--container-entrypoint", "--no-container-entrypoint"),
        ("container_writable", "--container-writable", "--container-readonly"),
    ],
)
def test_the_switches_of_a_container_are_those_of_pyxis(key: str, on: str, off: str) -> None:
    for given, word, other in ((True, on, off), (False, off, on)):
        words = render({"container_image": "pytorch", key: given}).split()
        assert word in words
        assert other not in words


def test_the_signal_before_the_end_comes_no_earlier_than_slurm_can_send_it() -> None:
    assert "--signal=URG@65535" in directives(render({}, grace="1d"))
    assert "--signal=URG@65535" in directives(render({}, grace=65535 - 30))
    assert "--signal=URG@65534" in directives(render({}, grace=65534 - 30))


@pytest.mark.parametrize("text", ["/shared/orc\n#SBATCH --wrap=id", "/a\rb", "/a\x1b]0;b", "/a\u2028b"])
def test_a_root_of_several_lines_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="must be one line of printable characters"):
        Cluster(name="hpc", kind="slurm", root=text)
    with pytest.raises(RenderError, match="cannot stand in a batch script"):
        quote(text)


def test_a_state_directory_of_several_lines_adds_no_directive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORC_STATE_DIR", "/state\n#SBATCH --wrap=id")
    with pytest.raises(LaunchError, match=r"ORC_STATE_DIR is .* one line of printable characters"):
        SlurmBackend(Cluster(name="here", kind="slurm"))


def test_an_empty_list_asks_for_nothing() -> None:
    keys = ("partition", "exclude", "gres", "licenses", "mail_type", "export")
    made = directives(render({key: [] for key in keys}))
    assert "--export=NONE" in made
    assert not [line for line in made if line.startswith(("--partition", "--exclude", "--gres", "--lic", "--mail"))]
    assert "--nice=0" in directives(render({"nice": 0}))


@pytest.mark.parametrize(
    ("options", "resources", "words"),
    [
        ({"mem_per_cpu": "2G"}, {"memory": "16G"}, ["resources.memory", "mem_per_cpu"]),
        ({"mem_per_cpu": "2G", "mem_per_gpu": "9G"}, {"gpus_per_node": 1}, ["mem_per_cpu", "mem_per_gpu"]),
        ({"mem_per_cpu": "2G", "mem": 0}, {}, ["mem_per_cpu", "option mem "]),
        ({"mem_per_gpu": "9G"}, {}, ["mem_per_gpu = 9G", "no GPUs"]),
        ({"gpu_type": "a100"}, {}, ["gpu_type = a100", "no GPUs"]),
        ({"gres": ["gpu:2"]}, {"gpus_per_node": 2}, ["resources.gpus_per_node", "gres"]),
        ({"gres": "nvme:1,gpu:a100:2"}, {"gpus_per_node": 2}, ["resources.gpus_per_node", "gres"]),
        ({"gres": "gres/gpu:2"}, {"gpus_per_node": 2}, ["resources.gpus_per_node", "gres"]),
        ({"extra": {"tres-per-node": "gres/gpu:2"}}, {"gpus_per_node": 2}, ["--tres-per-node (under extra)"]),
        ({"nodelist": "n[1-3]", "exclude": ["n7", "n2"]}, {"nodes": 4}, ["n2 is in nodelist and in exclude"]),
        (
            {"gpus_as": "gpus-per-task"},
            {"nodes": "1:2", "gpus_per_node": 1},
            ["gpus-per-task", "resources.nodes is 1:2"],
        ),
        ({"nodelist": "n[1-3]"}, {"nodes": 2}, ["nodelist names 3 nodes", "resources.nodes is 2"]),
        ({"exclusive": True, "extra": ["--oversubscribe"]}, {}, ["exclusive and --oversubscribe"]),
        ({"container_mounts": ["/data"]}, {}, ["container_mounts is given, but no container_image"]),
    ],
)
def test_both_sides_are_named(options: dict[str, Any], resources: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RenderError) as caught:
        render(options, resources)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.hint


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"environment": {"container": "pytorch:2"}}, ["container_image and `environment: container`"]),
        ({"root": "~/orc", "options": {"login": "nowhere.invalid"}}, ["absolute path", "~/orc"]),
    ],
)
def test_a_container_of_slurm_needs_its_own_room(cluster: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RenderError) as caught:
        render({"container_image": "pytorch"}, cluster=cluster)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_job_s_memory_replaces_the_cluster_s_in_whichever_form() -> None:
    script = render({}, {"memory": "16G"}, cluster={"options": {"mem-per-cpu": "2G"}})
    assert [line for line in script.splitlines() if "--mem" in line] == ["#SBATCH --mem=16G"]
