"""The batch scripts, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes them anew; read the diff before you commit it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from golden_plans import GOLDEN, SNAPSHOT, compare

from orc.launchers.backends.base import Placement
from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

SHAPES: dict[str, dict[str, Any]] = {
    "smallest": {"script": "train.py", "retry": {"on": []}},
    "two-nodes": {
        "script": "train.py",
        "args": {"lr": 0.1},
        "resources": {"nodes": 2, "procs_per_node": 2, "cpus_per_proc": 3, "memory": "16G", "time": "1:30:00"},
        "retry": {"on": ["preempted", "node_failure"]},
    },
    "gpus": {
        "script": "train.py",
        "resources": {
            "nodes": 4,
            "gpus_per_node": 8,
            "cpus_per_proc": 12,
            "time": "2-00:00:00",
            "options": {
                "slurm": {
                    "partition": "gpu",
                    "gpu_type": "a100",
                    "gres": ["nvme:1"],
                    "constraint": "a100&nvlink",
                    "exclusive": True,
                    "modules": ["cuda/12.4", "nccl"],
                    "srun_args": ["--cpu-bind=none"],
                }
            },
        },
        "grace": 120,
    },
    "no-requeue": {"script": "train.py", "resources": {"time": "10m", "options": {"slurm": {"requeue": False}}}},
    "node-failure-only": {"script": "train.py", "retry": {"on": ["node_failure", "crash"]}},
    "gpus-per-task": {
        "script": "train.py",
        "resources": {
            "nodes": 2,
            "gpus_per_node": 4,
            "options": {
                "slurm": {"gpus_as": "gpus-per-task", "gpu_type": "h100", "mem_per_gpu": "60G", "gres": "nvme:1"}
            },
        },
        "retry": {"on": []},
    },
    "gpus-per-node": {
        "script": "train.py",
        "resources": {"nodes": 2, "gpus_per_node": 4, "options": {"slurm": {"gpus_as": "gpus-per-node", "mem": 0}}},
        "retry": {"on": []},
    },
    "container": {
        "script": "train.py",
        "resources": {
            "nodes": 2,
            "options": {
                "slurm": {
                    "container_image": "nvcr.io#nvidia/pytorch:24.05-py3",
                    "container_mounts": ["/data:/data:ro", "/scratch"],
                    "container_name": "torch",
                    "container_mount_home": False,
                    "container_writable": True,
                    "srun_args": "--cpu-bind=none",
                }
            },
        },
        "retry": {"on": []},
    },
    "heterogeneous": {
        "script": "train.py",
        "resources": {
            "nodes": 3,
            "procs_per_node": 2,
            "time": "1h",
            "memory": "8G",
            "options": {
                "slurm": {
                    "account": "research",
                    "modules": "cuda",
                    "srun_args": "--cpu-bind=none",
                    "heterogeneous": [
                        {"nodes": 1, "partition": "cpu", "memory": "64G", "cpus_per_proc": 4},
                        {
                            "nodes": 2,
                            "partition": "gpu",
                            "gpus_per_node": 2,
                            "gpu_type": "a100",
                            "constraint": "nvlink",
                        },
                    ],
                }
            },
        },
        "retry": {"on": ["preempted"]},
    },
    "range-of-nodes": {"script": "train.py", "resources": {"nodes": "2:4"}, "retry": {"on": []}},
    "every-option": {
        "module": "pkg.train",
        "launcher": "python",
        "resources": {
            "nodes": 2,
            "options": {
                "slurm": {
                    "partition": ["gpu", "cpu"],
                    "account": "research",
                    "qos": "high",
                    "reservation": "maintenance",
                    "constraint": "x",
                    "nodelist": "node[1-2]",
                    "exclude": ["node3", "node4"],
                    "exclusive": "user",
                    "licenses": ["matlab:2"],
                    "mem_per_cpu": "2G",
                    "dependency": "afterok:12",
                    "begin": "now+1hour",
                    "nice": 100,
                    "wckey": "w",
                    "mail_user": "me@example.org",
                    "mail_type": ["END", "FAIL"],
                    "comment": 'the "best" run, 100 % sure\\',
                    "requeue": True,
                    "max_requeues": 3,
                    "signal_lead": "5m",
                    "export": ["HOME", "PATH"],
                    "extra": {"hint": "nomultithread", "spread-job": True},
                }
            },
        },
    },
}


def plan_of(shape: str, root: str = "/shared/orc", **cluster: Any) -> Plan:
    job = JobSpec.model_validate({"name": "digits", **SHAPES[shape]})
    backend = SlurmBackend(Cluster(**{"name": "hpc", "kind": "slurm", "root": root, **cluster}))
    return backend.render(job, SNAPSHOT, AttemptId("digits-k3f9a2", 1))


def script_of(plan: Plan) -> str:
    (script,) = (file for file in plan.files if file.path.endswith("/job.sbatch"))
    return script.content


@pytest.mark.parametrize("shape", SHAPES)
def test_the_batch_script_is_the_golden_one(shape: str) -> None:
    compare(f"slurm/{shape}.sbatch", script_of(plan_of(shape)))


def test_a_cluster_of_its_own_kind_of_installation() -> None:
    plan = plan_of(
        "two-nodes",
        root="/shared/my orc",
        python="/opt/my env/bin/python",
        options={"bin": "/opt/slurm/bin", "conf": "/etc/slurm-b/slurm.conf", "account": "research"},
    )
    compare("slurm/odd-paths.sbatch", script_of(plan))
    assert [str(command) for command in plan.commands] == [
        "/opt/slurm/bin/sbatch --parsable '/shared/my orc/jobs/digits-k3f9a2/a1/job.sbatch'"
    ]


def test_a_root_in_the_home_directory_of_a_login_node() -> None:
    plan = plan_of("two-nodes", root="~/my orc", python="~/venv/bin/python", options={"login": "me@nowhere.invalid"})
    compare("slurm/home-of-login-node.sbatch", script_of(plan))
    assert [command.argv[2:] for command in plan.commands] == [
        (
            "--chdir=~/my orc/jobs/digits-k3f9a2",
            "--output=~/my orc/jobs/digits-k3f9a2/a1/logs/launcher.log",
            "~/my orc/jobs/digits-k3f9a2/a1/job.sbatch",
        )
    ]


@pytest.mark.parametrize("shape", [*SHAPES, "odd-paths", "home-of-login-node"])
def test_bash_can_read_every_golden_script(shape: str) -> None:
    checked = subprocess.run(["bash", "-n", str(GOLDEN / f"slurm/{shape}.sbatch")], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(("shape", "line"), [("two-nodes", "n7,n9"), ("every-option", "node3,node4,n7,n9")])
def test_a_later_attempt_keeps_away_from_nodes_that_failed(shape: str, line: str) -> None:
    job = JobSpec.model_validate({"name": "digits", **SHAPES[shape]})
    backend = SlurmBackend(Cluster(name="hpc", kind="slurm", root="/shared/orc"))
    placement = Placement((), avoid=("n7", "n9"))
    text = script_of(backend.render(job, SNAPSHOT, AttemptId("digits-k3f9a2", 2), placement))
    assert [found for found in text.splitlines() if "exclude" in found] == [f"#SBATCH --exclude={line}"]
