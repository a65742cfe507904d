"""`orc launch`: the grammar of its words, and what reaches the script."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import Run

Script = Callable[[str], str]

REPORT = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
names += tuple(name for name in os.environ if name.startswith("ORC_") or name.startswith("MY_"))
report = {"argv": sys.argv[1:], "env": {name: os.environ.get(name) for name in names}}
os.write(1, json.dumps(report).encode() + b"\\n")  # at once: the processes share the pipe
"""


@pytest.fixture
def script(place: Path) -> Script:
    def write(text: str) -> str:
        (place / "script.py").write_text(text)
        return "script.py"

    return write


def _reports(result: Run) -> list[dict[str, object]]:
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        ["--num_processes", "7", "--x", "--help"],
        ["-n", "3", "--json", "--version"],
        ["--", "--nproc", "9", "-m"],
        ["two words", "", "$HOME", "*"],
    ],
)
def test_what_follows_the_script_reaches_it_untouched(words: list[str], orc_process: Run, script: Script) -> None:
    reports = _reports(orc_process("launch", "-n", "2", script(REPORT), *words))
    assert [report["argv"] for report in reports] == [words, words]


def test_run_is_the_same_and_its_help_begins_with_the_lines_that_are_used_most(
    orc: Run, orc_process: Run, script: Script
) -> None:
    (report,) = _reports(orc_process("run", script(REPORT), "--lr", "1"))
    assert report["argv"] == ["--lr", "1"]
    ended = orc_process("run", "--json", script("import sys\nprint('hello')\nsys.exit(3)\n"))
    assert (ended.code, ended.json, "hello" in ended.err) == (3, {"exit_status": 3}, True)
    for name in ("run", "launch"):
        usage, _, *lines = orc(name, "--help").out.splitlines()
        assert usage.startswith(f"Usage: orc {name} ")
        assert [line.split("  ")[1] for line in lines[:3]] == [
            f"orc {name} {words}"
            for words in ("train.py --lr 0.1", "-n 2 train.py --lr 0.1", "--config_file FILE train.py")
        ]


def test_settings_of_fsdp_reach_the_script_in_either_spelling(orc_process: Run, script: Script) -> None:
    path = script("import os; print({k: v for k, v in os.environ.items() if 'FSDP' in k})")
    words = ["--use_fsdp", "--fsdp_sharding_strategy", "2", "--fsdp-offload-params", "True", "--mixed_precision=bf16"]
    result = orc_process("launch", *words, "--fsdp_transformer_layer_cls_to_wrap", "A,B", path)
    assert result.code == 0, result.err
    assert ast.literal_eval(result.out) == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
    }
    wrong = orc_process("launch", "--use-fsdp", "--fsdp-sharding-strategy", "FULL_SHRD", path)
    assert (wrong.code, "did you mean 'FULL_SHARD'?" in wrong.err) == (2, True)
    alone = orc_process("launch", "--fsdp-version", "2", path)
    assert (alone.code, "--fsdp-version has no effect without --use-fsdp" in alone.err) == (2, True)


def test_settings_of_deepspeed_reach_the_script_in_either_spelling(orc_process: Run, script: Script) -> None:
    path = script("import os; print({k: v for k, v in os.environ.items() if k.startswith('ACCELERATE_')})")
    words = ["--use_deepspeed", "--zero_stage=3", "--offload-param-device", "cpu", "--zero3_save_16bit_model", "True"]
    result = orc_process("launch", *words, "--gradient_accumulation_steps=5", "--gradient-clipping=1.0", path)
    assert result.code == 0, result.err
    fields = "zero_stage,gradient_accumulation_steps,gradient_clipping,offload_param_device,zero3_save_16bit_model"
    assert ast.literal_eval(result.out) == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_CONFIG_DS_FIELDS": fields,
    }
    for words, message in (
        (["--zero-stage", "2"], "--zero-stage has no effect without --use-deepspeed"),
        (["--use-deepspeed", "--zero-stage", "7"], "from 0 to 3"),
        (["--use-deepspeed", "--use-fsdp"], "exclude each other"),
        (["--use-deepspeed", "--deepspeed_hostfile", "nowhere"], "nowhere cannot be read"),
    ):
        wrong = orc_process("launch", *words, path)
        assert (wrong.code, message in wrong.err) == (2, True), wrong.err


def test_options_become_the_runtimes_variables(orc_process: Run, script: Script) -> None:
    options = ["--mixed-precision", "bf16", "--gradient-accumulation-steps", "4", "--cpu", "--debug", "--seed", "7"]
    (report,) = _reports(orc_process("launch", *options, "--env", "MY_NAME=a=b", script(REPORT)))
    env = report["env"]
    assert env["ORC_MIXED_PRECISION"] == "bf16"
    assert env["ORC_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert env["ORC_USE_CPU"] == env["ORC_DEBUG_MODE"] == "true"
    assert env["ORC_SEED"] == "7"
    assert env["MY_NAME"] == "a=b"


def test_what_is_not_asked_for_is_not_set(orc_process: Run, script: Script) -> None:
    (report,) = _reports(orc_process("launch", script(REPORT)))
    assert not {"ORC_MIXED_PRECISION", "ORC_USE_CPU", "ORC_SEED", "ORC_DEBUG_MODE"} & set(report["env"])


def test_modules_and_other_programs_run_too(orc_process: Run, script: Script) -> None:
    script(REPORT)
    (report,) = _reports(orc_process("launch", "-m", "script", "--flag"))
    assert report["argv"] == ["--flag"]
    assert orc_process("launch", "-n", "2", "--no-python", "echo", "--json").out == "--json\n--json\n"
    assert orc_process("launch", "-m", "--no-python", "echo").code == 2


def test_the_first_failing_process_gives_the_exit_status(orc_process: Run, script: Script) -> None:
    path = script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(60)\n")
    result = orc_process("launch", "-n", "2", "--grace", "1", path)
    assert result.code == 9
    assert "rank 1 exited with 9" in result.err
    killed = orc_process("launch", script("import os\nos.kill(os.getpid(), 9)\n"))
    assert killed.code == 128 + 9


def test_restarts_are_as_many_as_asked_for(orc_process: Run, script: Script) -> None:
    path = script(
        "import os, sys\nprint('restart', os.environ['ORC_RESTART'])\nsys.exit(os.environ['ORC_RESTART'] != '2')\n"
    )
    result = orc_process("launch", "--max-restarts", "2", path)
    assert (result.code, result.out) == (0, "restart 0\nrestart 1\nrestart 2\n")
    assert orc_process("launch", "--max-restarts", "1", path).code == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0", "script.py"], "0"),
        (["absent.py"], "absent.py"),
        ([], "SCRIPT"),
        (["--env", "NAME", "script.py"], "NAME=VALUE"),
        (["--mixed-precision", "f16", "script.py"], "bf16"),
        (["--nporc", "2", "script.py"], "--nproc"),
        (["--python", "/absent/python", "script.py"], "/absent/python"),
    ],
)
def test_bad_words_are_refused_with_status_2(words: list[str], said: str, orc_process: Run, script: Script) -> None:
    script(REPORT)
    result = orc_process("launch", *words)
    assert result.code == 2
    assert said in result.err
    assert result.err.startswith("error: ")


def test_the_launcher_imports_nothing_heavy(script: Script) -> None:
    code = (
        "import sys\n"
        "from orc.orchestrator.cli.main import main\n"
        f"code = main(['launch', '-n', '2', {script('pass')!r}])\n"
        "print(*sys.modules)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    tops = {module.partition(".")[0] for module in done.stdout.split()}
    assert not tops & {"torch", "numpy", "pydantic", "pydantic_core", "sqlalchemy", "rich", "yaml", "sqlite3", "jinja2"}
