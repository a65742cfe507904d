"""Converted configurations: each is a job that its backend renders, and every value is in it or in a note."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orc.launchers.accelerate.config_file import read_config
from orc.launchers.accelerate.convert import Conversion, convert
from orc.launchers.accelerate.draft import NEWEST_IMAGE, STOCK_IMAGE
from orc.launchers.backends.sagemaker.images import HUGGINGFACE, Image
from orc.launchers.errors import SpecError
from orc.launchers.plan import Plan
from orc.launchers.spec import load_job
from orc.orchestrator.cli.commands.render import plan_of

CONFIGS = Path(__file__).parent / "configs"
FILES = sorted(CONFIGS.iterdir())
TEMPLATES = Path(__file__).parents[3] / "templates" / "configs"


def conversion(name: str) -> Conversion:
    return convert(read_config(next(CONFIGS.glob(f"{name}.*"))))


def rendered(made: Conversion, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Write the converted files as people would, and render the job."""
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text(made.job_text())
    (folder / "clusters.yaml").write_text(made.clusters_text())
    monkeypatch.setenv("ORC_CLUSTERS", str(folder / "clusters.yaml"))
    monkeypatch.setenv("ORC_STATE_DIR", str(folder / "state"))
    return plan_of(load_job(folder / "job.yaml"))[0]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_converted_file_renders_on_its_backend(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = convert(read_config(file))
    plan = rendered(made, tmp_path, monkeypatch)
    kinds = {entry["kind"] for entry in made.clusters.values()} or {"local"}
    assert {plan.backend} == kinds


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_files_that_ship_are_the_converted_ones(file: Path) -> None:
    made = convert(read_config(file))
    shipped = TEMPLATES / file.stem
    remake = f"orc config convert {file} --out {shipped}, after removing what is there"
    assert (shipped / "job.yaml").read_text() == made.job_text(), remake
    clusters = shipped / "clusters.yaml"
    assert (clusters.read_text() if clusters.exists() else "") == made.clusters_text(), remake


def test_every_shipped_config_has_an_original() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {file.stem for file in FILES}


def test_processes_are_divided_among_the_machines() -> None:
    job = conversion("ipex-mpirun").job
    assert job["resources"] == {"nodes": 4, "procs_per_node": 4}
    assert job["launcher"] == {"kind": "mpirun", "options": {"ccl_worker_count": 1}}
    gpus = conversion("multi-node")
    assert gpus.job["resources"] == {"nodes": 2, "procs_per_node": 4, "gpus_per_node": 4}
    assert gpus.job["launcher"]["options"] == {"rdzv_backend": "c10d"}
    assert gpus.clusters["multi-node-hosts"]["options"]["hosts"] == ["192.168.1.10", "node-1.example"]
    runtime = gpus.job["runtime"]
    assert runtime["dynamo_backend"] == "inductor"
    assert runtime["dynamo_use_fullgraph"] is True


def test_a_host_file_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    text = (CONFIGS / "ipex-mpirun.yaml").read_text().replace("/home/user/hostfile", str(tmp_path / "hosts"))
    (tmp_path / "mpi.yaml").write_text(text)
    made = convert(read_config(tmp_path / "mpi.yaml"))
    assert made.clusters["mpi-hosts"]["options"] == {"hostfile": str(tmp_path / "hosts")}
    assert "mpirun_config.mpirun_hostfile" not in {note.key for note in made.notes}


def test_settings_of_sharding_reach_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = rendered(conversion("fsdp"), tmp_path, monkeypatch).env
    assert env["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    assert env["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "BertLayer"
    assert env["ORC_MIXED_PRECISION"] == "bf16"
    env = rendered(conversion("deepspeed-zero3-offload"), tmp_path, monkeypatch).env
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"
    env = rendered(conversion("parallelism"), tmp_path, monkeypatch).env
    assert (env["ACCELERATE_USE_PARALLELISM_CONFIG"], env["PARALLELISM_CONFIG_TP_SIZE"]) == ("true", "2")


def test_sagemaker_settings_go_to_the_cluster_and_what_is_the_jobs_stays_with_it() -> None:
    made = conversion("sagemaker")
    options = made.clusters["sagemaker"]["options"]
    assert options["additional_args"]["use_spot_instances"] is True
    assert (options["region"], options["iam_role_name"]) == ("eu-central-1", "xxxxx")
    assert made.job["resources"] == {
        "nodes": 2, "options": {"sagemaker": {"base_job_name": "accelerate-sagemaker-1"}},
    }  # fmt: skip
    assert made.notes == ()
    old = conversion("sagemaker-data-parallel")  # the documented image, too old for any Python that ranks need
    assert {note.key for note in old.notes} == {"py_version", "pytorch_version", "transformers_version"}
    assert old.clusters["sagemaker-data-parallel"]["options"].items() >= NEWEST_IMAGE.items()
    (transformers, torch), (python, _) = list(HUGGINGFACE.items())[-1]
    assert list(NEWEST_IMAGE.values()) == [python, torch, transformers]
    assert old.job["resources"]["options"]["sagemaker"]["distributed_type"] == "DATA_PARALLEL"


def test_the_documented_local_mode_is_a_job_in_its_image_on_this_machine() -> None:
    made = conversion("sagemaker-local")
    here = {"kind": "local", "environment": {"container": STOCK_IMAGE}}
    assert (made.job["cluster"], made.clusters) == ("sagemaker-local", {"sagemaker-local": here})
    assert (made.job["env"], made.job["setup"]) == ({"SM_MODEL_DIR": "model"}, ["mkdir -p model"])
    assert {note.key for note in made.notes} == {"iam_role_name", "image_uri", "profile", "pytorch_version", "region"}
    assert Image(None, None, None, False, "ml.c5.xlarge", "us-east-1").uri == STOCK_IMAGE


def test_a_tpu_pod_gets_its_variables_commands_and_a_cluster() -> None:
    made = conversion("tpu-pod")
    assert made.job["setup"] == ["pip install -r requirements.txt", "echo ready, steady"]
    assert made.job["env"] == {"XLA_FLAGS": "--xla_dump_to=/tmp/dump"}
    assert made.job["launcher"] == {"kind": "xla", "options": {"function": "training_function"}}
    assert conversion("tpu").job["launcher"] == "xla"
    assert made.clusters["tpu-pod"]["options"]["zones"] == ["us-central1-a"]
    assert made.clusters["tpu-pod"]["options"]["sudo"] is True
    assert {"tpu_name", "num_processes"} <= {note.key for note in made.notes}
    assert conversion("tpu").job["runtime"] == {"mixed_precision": "bf16", "downcast_bf16": True}


def test_single_tpu_machines_become_hosts_with_their_chips(tmp_path: Path) -> None:
    file = tmp_path / "vm.yaml"
    file.write_text("distributed_type: XLA\ntpu_vm: [vm-0, vm-1]\ntpu_use_sudo: true\ntpu_name: unused\n")
    made = convert(read_config(file))
    assert made.clusters["vm-tpu"] == {"kind": "ssh", "options": {"hosts": ["vm-0", "vm-1"], "sudo": True}}
    assert made.job["resources"] == {"nodes": 2, "procs_per_node": 4}
    assert made.job["launcher"] == "xla"
    assert [note.key for note in made.notes] == ["tpu_vm"]


def test_what_has_no_equivalent_is_noted_with_its_place_and_in_the_file() -> None:
    made = conversion("megatron")
    assert made.notes == ()
    assert made.job["runtime"] == {
        "mixed_precision": "bf16",
        "megatron": {
            "tp_degree": 2,
            "pp_degree": 2,
            "num_micro_batches": 2,
            "sequence_parallelism": True,
            "recompute_activations": True,
            "use_distributed_optimizer": True,
            "gradient_clipping": 1.0,
        },
    }
    fp8 = conversion("fp8-transformer-engine")
    assert fp8.job["runtime"]["mixed_precision"] == "fp8"
    assert fp8.job["runtime"]["fp8"]["amax_history_len"] == 1024
    assert not fp8.notes


def test_every_value_is_in_the_job_the_cluster_or_a_note() -> None:
    """Nothing but defaults is left out in silence."""
    for file in FILES:
        config = read_config(file)
        whole = convert(config)
        for name, given in config.given.items():
            if given.option.says_nothing(given.value) or given.value == ["all"] or name == "compute_environment":
                continue
            noted = any(note.where == given.where for note in whole.notes)
            values = yaml.safe_dump([dict(whole.job), dict(whole.clusters)])
            spelled = str(given.value[0] if isinstance(given.value, list) else given.value).lower()
            assert noted or spelled in values.lower() or name in _ELSEWHERE, f"{file.name}: {name}"


# Values that become something else: the kind of a run, and processes divided among machines.
_ELSEWHERE = {
    *("distributed_type", "num_processes", "env", "tpu_cluster", "mpirun_hostfile", "rdzv_backend", "main_process_ip"),
    *("cpu", "additional_args", "machine_rank"),
}


def test_values_that_exclude_each_other_are_refused_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: NO_SHARD}\n")
    with pytest.raises(SpecError, match="version 2 always shards") as caught:
        convert(read_config(file))
    assert f"{file}:1:19" in str(caught.value)


@pytest.mark.parametrize("kind", ["MULTI_XPU", "MULTI_NPU", "MODEL_PARALLEL"])
def test_a_kind_of_run_that_is_not_supported_is_noted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"distributed_type: {kind}\nnum_machines: 1\n"
    if kind == "MODEL_PARALLEL":
        text += "compute_environment: AMAZON_SAGEMAKER\niam_role_name: me\n"
        text += "ec2_instance_type: ml.g5.xlarge\nregion: us-east-1\n"
    (tmp_path / "other.yaml").write_text(text)
    made = convert(read_config(tmp_path / "other.yaml"))
    assert "distributed_type" in {note.key for note in made.notes}
    rendered(made, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"script": "/abs.py"}, "must be relative to the workdir"), ({"name": "---"}, "needs at least one letter")],
)
def test_a_script_or_name_that_a_job_cannot_have_is_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        convert(read_config(CONFIGS / "fsdp.yaml"), **options)
