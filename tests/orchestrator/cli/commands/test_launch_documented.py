"""`orc launch` with the flags, files and launchers that `accelerate launch` is used with."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from orc.launchers.accelerate.keys import GROUPS, OPTIONS
from orc.launchers.foreground.launch import interpreter_flags
from orc.orchestrator.cli.commands.launch import launch_command
from orc.orchestrator.cli.ui.output import launch_options_with_value

from ..conftest import Run

REPORT = """\
import json, os, sys
print("to stderr", file=sys.stderr)
# A pipe keeps lines of several ranks apart up to 4,096 bytes: without what mpirun adds for itself.
own = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
os.write(1, json.dumps([sys.argv[1:], own]).encode() + b"\\n")
"""
WORLD = """\
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}: {int(total)}\\n".encode())
dist.destroy_process_group()
"""
LAUNCH = [sys.executable, "-m", "orc.launch"]


@pytest.fixture(autouse=True)
def no_configuration(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(place / "hf"))
    (place / "report.py").write_text(REPORT)
    (place / "world.py").write_text(WORLD)


def reports(text: str) -> list[tuple[list[str], dict[str, str]]]:
    found: list[Any] = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    return sorted(found, key=lambda one: int(one[1]["RANK"]))


def test_file_environment_and_flags_reach_the_script(
    orc_process: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "hf/accelerate"
    folder.mkdir(parents=True)
    default = "distributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 2\ndebug: true\n"
    (folder / "default_config.yaml").write_text(default)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    words = ["--num_cpu_threads_per_process=3", "--role", "trainer", "--env", "A=1", "--env", "B=x=y"]
    done = orc_process("launch", *words, "report.py", "--lr", "1")
    assert done.code == 0, done.err
    (first, env), (_, other) = reports(done.out)
    assert first == ["--lr", "1"]
    assert (env["WORLD_SIZE"], other["RANK"], other["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) == ("2", "1", "1", "2")
    assert env["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert "ORC_MIXED_PRECISION" not in env
    assert {env[name] for name in ("ACCELERATE_DEBUG_MODE", "ACCELERATE_USE_CPU", "ORC_USE_CPU")} == {"true"}
    assert (env["OMP_NUM_THREADS"], env["ROLE_NAME"], env["A"], env["B"]) == ("3", "trainer", "1", "x=y")

    (place / "other.json").write_text('{"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}')
    done = orc_process("launch", "--config-file", "other.json", "--mixed-precision", "no", "report.py")
    ((_, env),) = reports(done.out)
    assert (env["ACCELERATE_USE_FSDP"], env["FSDP_VERSION"], env["ACCELERATE_MIXED_PRECISION"]) == ("true", "2", "no")
    # The same script with another framework.
    (place / "zero.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n")
    ((_, env),) = reports(orc_process("launch", "--config-file", "zero.yaml", "report.py").out)
    assert (env["ACCELERATE_USE_DEEPSPEED"], env["ACCELERATE_DEEPSPEED_ZERO_STAGE"]) == ("true", "3")
    assert "ACCELERATE_USE_FSDP" not in env
    (folder / "default_config.yaml").write_text("num_proceses: 2\n")
    wrong = orc_process("launch", "report.py")
    assert (wrong.code, "num_processes" in wrong.err, "default_config.yaml:1" in wrong.err) == (2, True, True), (
        wrong.err
    )
    assert ("orc config default --force" in wrong.err, "--config_file" in wrong.err) == (True, True)
    (folder / "default_config.yaml").write_text("distributed_type: MULTI_GPU\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without = orc_process("launch", "report.py")
    assert (without.code, "distributed_type of the configuration file" in without.err) == (2, True), without.err


def test_help_has_every_flag_in_its_group(orc: Run) -> None:
    shown = orc("launch", "--help").out
    places = [shown.index(f"\n{title}:") for group, title in GROUPS.items() if group != "file"]
    assert places == sorted(places)
    words = set(shown.replace(",", " ").split())
    assert [flag for one in OPTIONS.values() for flag in one.flags if flag not in words] == []
    with_value = [one for one in launch_command.params if isinstance(one, click.Option) and not one.is_flag]
    assert {flag for one in with_value for flag in one.opts} == launch_options_with_value()
    narrow = orc("launch", "--use-fsdp", "--fp8_backend=te", "-h").out
    assert ("--fsdp_offload_params" in narrow, "--fp8_margin" in narrow, "--num_processes" in narrow) == (True,) * 3
    assert ("--zero_stage" in narrow, "--megatron_lm_tp_degree" in narrow) == (False, False)
    wrong = orc("launch", "--num_proceses", "2", "report.py")
    assert (wrong.code, "--num-processes" in wrong.err) == (2, True), wrong.err
    wrong = orc("launch", "--num_processes", "two", "report.py")
    assert (wrong.code, "expected a whole number" in wrong.err) == (2, True), wrong.err
    wrong = orc("launch", "--main_process_port", "65536", "report.py")
    assert (wrong.code, "a whole number from 0 to 65535" in wrong.err) == (2, True), wrong.err
    wrong = orc("launch", "--tpu", "--num_processes", "2", "report.py")
    assert (wrong.code, "launcher: xla" in wrong.err) == (2, True), wrong.err


def test_other_spellings_of_the_command(place: Path) -> None:
    script = shutil.which("orc-launch", path=os.fspath(Path(sys.executable).parent))
    assert script is not None
    for words in (LAUNCH, [script]):
        done = subprocess.run([*words, "--num_processes=2", "report.py", "-m"], capture_output=True, text=True)
        assert [arguments for arguments, _ in reports(done.stdout)] == [["-m"], ["-m"]], done.stderr


def test_the_flags_of_the_interpreter_are_those_of_the_ranks(place: Path) -> None:
    (place / "flags.py").write_text("import sys; print(__debug__, sys.warnoptions, sys.flags.isolated)")
    words = [sys.executable, "-O", "-W", "error", "-m", "orc.launch", "flags.py", "-m"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "False ['error'] 0\n", done.stderr
    assert interpreter_flags(["python", "-I", "-X", "dev", "-m", "orc.launch"]) == ("-X", "dev")
    assert interpreter_flags(["python", "-O", "-m", "pytest", "-m", "orc.launch"]) == ()


def test_streams_go_to_the_terminal_and_to_files_as_chosen(orc_process: Run, place: Path) -> None:
    done = orc_process("launch", "-n", "2", "--tee", "0:3", "-r", "1:2", "--log_dir", "logs", "report.py")
    assert done.code == 0, done.err
    assert len(reports(done.out)) == 2
    assert done.err == "to stderr\n"
    first, second = ((place / f"logs/rank-{rank}.log").read_text() for rank in (0, 1))
    assert ("to stderr" in first, len(reports(first))) == (True, 1)
    assert second == "to stderr\n"


def test_quiet_leaves_the_traceback_alone(orc_process: Run, place: Path) -> None:
    (place / "fails.py").write_text("raise SystemExit('why')")
    assert orc_process("launch", "-q", "fails.py").err == "why\n"
    assert orc_process("launch", "fails.py").err == "why\norc launch: rank 0 exited with 1\n"


def test_launches_with_different_machine_ranks_are_one_run(place: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--cpu"]
    words += ["--main_process_port", str(port)]
    machines = [
        subprocess.Popen([*LAUNCH, *words, "--machine_rank", rank, "world.py"], stdout=subprocess.PIPE, text=True)
        for rank in ("1", "0")
    ]
    assert sorted(machine.communicate(timeout=120)[0] for machine in machines) == ["0 of 2: 3\n", "1 of 2: 3\n"]
    assert [machine.returncode for machine in machines] == [0, 0]


def test_a_rendezvous_of_torchrun_starts_failed_processes_again(orc_process: Run, orc: Run, place: Path) -> None:
    (place / "once.py").write_text(
        "import os, sys\n"
        "os.write(1, b'%s of %s, again: %s\\n' % tuple(os.environ[name].encode() for name in\n"
        "    ('RANK', 'WORLD_SIZE', 'TORCHELASTIC_RESTART_COUNT')))\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1')\n"
    )
    words = ["-n", "2", "--rdzv_backend", "c10d", "--rdzv_conf", "join_timeout=60", "--monitor_interval", "0.1"]
    done = orc_process("launch", *words, "--max_restarts", "1", "once.py")
    again = sorted(line for line in done.out.splitlines() if line.endswith("again: 1"))
    assert (done.code, again) == (0, ["0 of 2, again: 1", "1 of 2, again: 1"]), done.err
    assert "--json does not work with torchrun" in orc("launch", "--json", *words, "once.py").error["what"]


def test_keys_of_aws_leave_the_command_line_and_reach_the_submission_alone(
    orc_process: Run, orc: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries of AWS that say what they have been given, in the place of the real ones."""
    (place / "libraries").mkdir()
    says = "import os, sys; sys.exit(repr([sys.orig_argv[3:], {n: os.environ.get(n) for n in NAMES}]))"
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    (place / "libraries/boto3.py").write_text(f"NAMES = {names}\n{says}")
    monkeypatch.setenv("PYTHONPATH", str(place / "libraries"))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    file = (
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.m5.large\niam_role_name: me\nregion: us-east-1\n"
    )
    (place / "sagemaker.yaml").write_text(file)
    words = ["launch", "--config_file", "sagemaker.yaml"]
    keys = ["--aws_access_key_id=AKIA", "--aws-secret-access-key", "wJalrXUtnFEMI"]
    done = orc_process(*words, *keys, "report.py", "--lr", "1")
    assert (
        str([[*words, "report.py", "--lr", "1"], dict(zip(names, ("AKIA", "wJalrXUtnFEMI", None), strict=True))])
        in done.err
    )
    written = [
        path.read_bytes() for path in place.parent.rglob("*") if path.is_file() and "libraries" not in path.parts
    ]
    assert not [one for one in written if b"AKIA" in one or b"wJalrXUtnFEMI" in one]
    alone = orc(*words, keys[0], "report.py")
    assert (alone.code, "--aws_secret_access_key is missing" in alone.err) == (2, True), alone.err
    (place / "sagemaker.yaml").write_text(file + "profile: me\n")
    assert "that names no profile" in orc(*words, *keys, "report.py").err


MPIRUN = ["mpirun", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe", "-n", "2"]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI")
def test_below_mpirun_the_launches_are_one_run(place: Path) -> None:
    done = subprocess.run([*MPIRUN, *LAUNCH, "world.py"], capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 3", "1 of 2: 3"], done.stderr


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI")
def test_mpirun_is_started_for_a_host_file(place: Path) -> None:
    (place / "hosts").write_text("localhost slots=2\n")
    (place / "mpi.yaml").write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n"
        "mpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: '2'\n"
    )
    words = [*LAUNCH, "--config_file", "mpi.yaml", "report.py", "--lr", "$X"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    found = reports(done.stdout)
    assert [arguments for arguments, _ in found] == [["--lr", "$X"]] * 2, done.stderr
    assert {env["WORLD_SIZE"] for _, env in found} == {"2"}
    assert {(env["CCL_WORKER_COUNT"], env["ACCELERATE_MIXED_PRECISION"]) for _, env in found} == {("2", "bf16")}


@pytest.mark.skipif(not shutil.which("mpiexec.hydra"), reason="needs MPICH")
def test_below_the_mpirun_of_mpich_the_launches_are_one_run(place: Path) -> None:
    words = ["mpiexec.hydra", "-n", "2", *LAUNCH, "report.py"]
    found = reports(subprocess.run(words, capture_output=True, text=True, timeout=60).stdout)
    assert [env["RANK"] for _, env in found] == ["0", "1"]
    assert len({env["MASTER_PORT"] for _, env in found}) == 1
