"""`orc config`: the wizard through pipes and a terminal, the default file, updates, and conversions."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..conftest import Run, tree

SMALL = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the default file."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "accelerate"


def answered(orc: Run, monkeypatch: pytest.MonkeyPatch, place: Path, answers: str, *options: str) -> dict[str, Any]:
    """Return what the wizard writes for *answers*, one a line."""
    (place / "answers").write_text("\n".join(answers.split("|")) + "\n")
    with (place / "answers").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        result = orc("config", "--config_file", "made.yaml", "--force", *options)
    assert result.code == 0, result.err
    data = yaml.safe_load((place / "made.yaml").read_text())
    assert isinstance(data, dict)
    return data


# The documented conversations: answers by label or number, and what has to be in the file.
CONVERSATIONS = {
    "cpu with ipex": (
        "This machine|No distributed training|yes|yes|NO|NO|bf16",
        {"distributed_type": "NO", "ipex_config": {"ipex": True}, "mixed_precision": "bf16", "use_cpu": True},
    ),
    "four machines by mpirun": (
        "0|multi-CPU|4|0|36.112.23.24|29500|yes|yes|yes|/home/user/hostfile|1|NO|16|bf16",
        {
            "distributed_type": "MULTI_CPU",
            "main_process_ip": "36.112.23.24",
            "main_process_port": 29500,
            "mpirun_config": {"mpirun_ccl": "1", "mpirun_hostfile": "/home/user/hostfile"},
            "num_machines": 4,
            "num_processes": 16,
            "use_cpu": True,
        },
    ),
    "fp8 by ms-amp": (
        "This machine|multi-GPU|1||no|no|no|4|all|fp8|msamp|O1",
        {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": "O1"}, "num_processes": 4},
    ),
    "a file of deepspeed": (
        "This machine|multi-GPU|1||yes|yes|ds_config.json|yes|4",
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": True},
            "num_processes": 4,
        },
    ),
    "megatron": (
        "0|2||||NO|yes|2||2|2||||4|bf16",
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config": {
                "megatron_lm_gradient_clipping": 1.0,
                "megatron_lm_num_micro_batches": 2,
                "megatron_lm_pp_degree": 2,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_tp_degree": 2,
                "megatron_lm_use_distributed_optimizer": True,
            },
            "mixed_precision": "bf16",
            "num_processes": 4,
        },
    ),
    "fsdp": (
        "0|2||||yes|1|FULL_SHARD||TRANS|no|BertLayer|||||||no|2|1",
        {
            "distributed_type": "FSDP",
            "num_processes": 2,
            "mixed_precision": "fp16",
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_offload_params": False,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
                "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_use_orig_params": True,
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_sync_module_states": True,
                "fsdp_activation_checkpointing": False,
            },
        },
    ),
    "zero stage 3": (
        "0|0|NO|NO|yes|NO|3|cpu|none|4|yes|0.5|yes|yes|fp16",
        {
            "deepspeed_config": {
                "zero_stage": 3,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "none",
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 0.5,
                "zero3_save_16bit_model": True,
                "zero3_init_flag": True,
            },
            "num_processes": 1,
        },
    ),
    "sagemaker": (
        "AWS (Amazon SageMaker)|mine|eu-west-1|my-role|no|no|no|data parallelism|ml.p4d.24xlarge|2|bf16",
        {
            "compute_environment": "AMAZON_SAGEMAKER",
            "distributed_type": "DATA_PARALLEL",
            "profile": "mine",
            "region": "eu-west-1",
            "iam_role_name": "my-role",
            "num_machines": 2,
        },
    ),
    "tpu pod": (
        "0|TPU|main|yes|my-tpu|us-central2-b|no|yes|no|pip list|no|8|bf16|yes",
        {
            "distributed_type": "TPU",
            "commands": ["pip list"],
            "downcast_bf16": "yes",
            "num_processes": 8,
            "tpu_name": "my-tpu",
            "tpu_use_cluster": True,
            "tpu_zone": "us-central2-b",
        },
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_documented_conversations_make_the_documented_files(
    name: str, orc: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, expected = CONVERSATIONS[name]
    made = answered(orc, monkeypatch, place, answers)
    assert {key: made.get(key) for key in expected} == expected
    assert "mixed_precision" in made or name == "a file of deepspeed"
    assert not [key for key in made if "key" in key or "secret" in key]  # no credentials
    shown = orc("config", "show", "--config-file", "made.yaml", "--json").json
    assert shown["values"] == made  # the wizard writes nothing that the reader refuses
    assert shown["notes"] == []
    assert orc("config", "convert", "made.yaml").code == 0


def test_a_wrong_answer_is_asked_again_and_missing_ones_end_it(
    orc: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = answered(orc, monkeypatch, place, "this|multi-gpu|two|2|5|1|10.0.0.1||no|c10d||||no|3|4|bf16")
    assert (made["num_machines"], made["machine_rank"], made["num_processes"]) == (2, 1, 4)
    assert (made["same_network"], made["rdzv_backend"], made["main_process_port"]) == (False, "c10d", 29500)
    (place / "made.yaml").unlink()
    (place / "answers").write_text("0\n")
    with (place / "answers").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        result = orc("config", "--config-file", "made.yaml")
    assert result.code == 2
    assert "the answers end before the question: Which type of machine" in result.err
    assert not (place / "made.yaml").exists()


def test_a_terminal_is_asked_line_by_line(place: Path) -> None:
    """Two GPUs with bf16, through a pseudo terminal; Ctrl-D ends it."""
    steps = [
        (b"compute environment", b"\n"),
        (b"type of machine", b"multi-GPU\n"),
        (b"How many different machines", b"\n"),
        (b"torch dynamo", b"\n"),
        (b"use DeepSpeed", b"\n"),
        (b"FullyShardedDataParallel", b"\n"),
        (b"Megatron-LM", b"n\n"),
        (b"How many GPU", b"2\n"),
        (b"mixed precision", b"bf16\n"),
    ]
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "orc.orchestrator.cli.main", "config", "--config_file", "made.yaml"]
    streams = {"stdin": inner, "stdout": inner, "stderr": inner, "start_new_session": True}
    process = subprocess.Popen(command, **streams)
    seen = b""
    try:
        for question, keys in steps:
            seen = _until(outer, question, seen)
            os.write(outer, keys)
        _until(outer, b"saved at", seen)
        assert process.wait(30) == 0
        process = subprocess.Popen([*command, "--force"], **streams)
        seen = _until(outer, b"compute environment", b"")
        os.write(outer, b"AWS\n")
        seen = _until(outer, b"AWS Profile", seen)
        os.write(outer, b"\x04")
        _until(outer, b"the answers end before the question: Enter your AWS Profile", seen)
        assert process.wait(30) == 2
    finally:
        process.kill()
        process.wait()
        os.close(outer)
        os.close(inner)
    made = yaml.safe_load((place / "made.yaml").read_text())
    assert (made["distributed_type"], made["num_processes"], made["mixed_precision"]) == ("MULTI_GPU", 2, "bf16")


def _until(terminal: int, text: bytes, before: bytes) -> bytes:
    """Read the terminal until *text* has come since the last question; return what came after it."""
    seen, deadline = before, time.monotonic() + 60
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"{text!r} did not come; there was {seen!r}"
        seen += os.read(terminal, 65536)
    return seen.partition(text)[2]


def test_the_default_file_is_written_once_and_never_over_another(orc: Run, home: Path) -> None:
    result = orc("config", "default", "--mixed_precision", "bf16", "--json")
    file = home / "default_config.yaml"
    assert result.json["file"] == str(file)
    made = yaml.safe_load(file.read_text())
    assert made["mixed_precision"] == "bf16"
    assert made["compute_environment"] == "LOCAL_MACHINE"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    file.write_text("debug: true\n")
    again = orc("config", "default")
    assert again.code == 0
    assert "was not changed" in again.err
    assert file.read_text() == "debug: true\n"
    asked = orc("config")
    assert asked.code == 2
    assert "--force" in asked.err
    assert orc("config", "default", "--force").code == 0
    assert "debug: false" in file.read_text()
    assert orc("config", "default", "--mixed-precision", "fp4").code == 2
    assert [path.name for path in home.iterdir()] == ["default_config.yaml"]


def test_config_file_names_another_place_and_its_form(orc: Run, home: Path, place: Path) -> None:
    assert orc("config", "--config_file", "a.json", "default").code == 0
    assert json.loads((place / "a.json").read_text())["num_machines"] == 1
    assert orc("config", "default", "--config_file", "new/a.yaml").code == 0
    assert (place / "new" / "a.yaml").is_file()
    assert not home.exists()


def test_an_update_adds_what_is_new_keeps_what_is_there_and_renames_old_keys(orc: Run, home: Path) -> None:
    home.mkdir(parents=True)
    file = home / "default_config.yaml"
    file.write_text(f"{SMALL}fp16: true\ndynamo_backend: INDUCTOR\nfsdp_config: {{}}\nmain_process_ip: null\n")
    assert orc("config", "update").code == 0
    made = yaml.safe_load(file.read_text())
    assert made["num_processes"] == 2
    assert made["mixed_precision"] == "fp16"
    assert made["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert made["main_process_ip"] is None
    assert made["num_machines"] == 1  # new
    assert not {"fp16", "dynamo_backend"} & set(made)
    before = file.read_text()
    file.chmod(0o600)  # its tpu_env may hold a key
    assert "nothing was missing" in orc("config", "update").out
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (before, 0o600)


def test_without_a_file_it_says_where_it_looked(orc: Run, home: Path) -> None:
    for command in ("show", "update", "convert"):
        result = orc("config", command)
        assert result.code == 2
        assert str(home / "default_config.yaml") in result.err
        assert "orc config default" in result.err


def test_a_conversion_writes_files_that_render_and_overwrites_none(
    orc: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "two.yaml").write_text(f"{SMALL}num_machines: 2\nmain_process_ip: 10.0.0.7\nmachine_rank: 1\n")
    result = orc("config", "convert", "two.yaml", "--out", "job", "--script", "run.py", "--name", "pair")
    assert result.code == 0
    assert "machine_rank" in result.err
    (place / "job" / "run.py").write_text("")
    monkeypatch.setenv("ORC_CLUSTERS", str(place / "job" / "clusters.yaml"))
    assert orc("render", "job/job.yaml").code == 0
    before = tree(place)
    again = orc("config", "convert", "two.yaml", "--out", "job")
    assert again.code == 2
    assert "would overwrite" in again.err
    assert tree(place) == before
    document = orc("config", "convert", "two.yaml", "--json").json
    assert document["job"]["cluster"] == "two-hosts"
    assert {note["key"] for note in document["notes"]} == {"machine_rank", "num_machines"}


@pytest.mark.parametrize("command", ["render", "submit"])
def test_a_configuration_given_as_a_job_is_recognised(command: str, orc: Run, place: Path) -> None:
    (place / "my config.yaml").write_text(SMALL)
    result = orc(command, "my config.yaml")
    assert result.code == 2
    assert "configuration file of Accelerate" in result.err
    assert "orc config convert 'my config.yaml' --out DIR" in result.err


def test_the_how_to_shows_what_happens(orc: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, its conversion and the piped answers of the page are as the page has them."""
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "accelerate-configs.md").read_text()
    source, job, clusters = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (place / "fsdp.yaml").write_text(source)
    assert orc("config", "convert", "fsdp.yaml", "--out", "job").code == 0
    assert (place / "job" / "job.yaml").read_text() == job
    assert (place / "job" / "clusters.yaml").read_text() == clusters
    (line,) = re.findall(r"^printf '%s\\n' (.*) \| orc config", page, re.MULTILINE)
    made = answered(orc, monkeypatch, place, "|".join(shlex.split(line)))
    assert (made["distributed_type"], made["num_processes"], made["mixed_precision"]) == ("MULTI_CPU", 2, "bf16")


def test_examples_are_listed_and_printed(orc: Run) -> None:
    listed = {row["name"]: row for row in orc("config", "examples", "--json").json["examples"]}
    assert listed["ipex-mpirun"]["cluster"] == "ssh"
    assert listed["fsdp"]["runtime"] == "bf16, fsdp"
    assert "sagemaker-data-parallel" in orc("config", "examples").out
    job, clusters = yaml.safe_load_all(orc("config", "examples", "tpu-pod").out)
    assert job["launcher"]["kind"] == "xla"
    assert clusters["tpu-pod"]["kind"] == "tpu"
    wrong = orc("config", "examples", "fdsp")
    assert wrong.code == 2
    assert "did you mean 'fsdp'?" in wrong.err


def test_orc_config_is_a_program_too(place: Path) -> None:
    script = "from orc.orchestrator.cli.commands.config import main; main()"
    argv = [sys.executable, "-c", script, "default", "--config_file", "new.yaml"]
    assert (
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "configuration saved at new.yaml\n"
    )
