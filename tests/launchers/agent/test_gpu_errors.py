"""What the kernel and nvidia-smi say of a job's GPUs; here a file is the kernel's log, and a script is nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orc.launchers.agent.gpu_errors import GpuErrors, xids
from orc.launchers.attempts.records import merge

FELL = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:86:00): 31, pid=4242, name=python3, Ch 00000008, MMU Fault: ENGINE GRAPHICS"


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    log = tmp_path / "kmsg"
    log.write_text(f"4,100,1000000,-;{FAULT}\n")  # of an earlier job
    return log


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    """Ranks 2 and 3 of this node have said which GPUs they have."""
    home = tmp_path / "node-1"
    home.mkdir()
    for rank, pci in ((2, "0000:1b:00.0"), (3, "0000:3b:00.0")):
        (home / f"device-{rank}.json").write_text(json.dumps({"rank": rank, "pci": pci}))
    return home


def say(log: Path, *texts: str) -> None:
    with log.open("a") as file:
        file.writelines(f"4,101,1000001,-;{text}\n SUBSYSTEM=pci\n" for text in texts)


def test_an_xid_is_told_when_it_happens_with_the_rank_that_has_the_gpu(kernel_log, node_dir):
    errors = GpuErrors(str(node_dir), {}, str(kernel_log))
    assert errors.poll() == []  # what was before the job is not the job's
    say(kernel_log, "usb 1-1: new device", FELL)
    told = "GPU 0000:3b:00 of rank 3: Xid 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus"
    assert errors.poll() == [told]
    assert errors.poll() == []
    assert errors.summary() == told


def test_gpus_of_other_jobs_are_left_out_where_the_ranks_have_told_of_theirs(kernel_log, node_dir):
    errors = GpuErrors(str(node_dir), {}, str(kernel_log))
    say(kernel_log, FAULT)
    assert errors.poll() == []
    assert errors.summary() == ""
    for record in node_dir.iterdir():
        record.unlink()
    assert errors.summary().startswith("GPU 0000:86:00: Xid 31, pid=4242")


def test_the_first_errors_are_kept_once_each(kernel_log, node_dir):
    errors = GpuErrors(str(node_dir), {}, str(kernel_log))
    say(kernel_log, *[FELL] * 50, *[FELL.replace("79", str(number)) for number in range(100, 150)])
    numbers = [part.split("Xid ")[1].split(",")[0] for part in errors.summary().split("; ")]
    assert numbers == ["79", "100", "101", "102"]


def test_what_the_kernel_logs_cannot_write_on_a_terminal():
    (error,) = xids("NVRM: Xid (PCI:0000:3b:00): 13, \x1b[31mred\x07" + "x" * 9000)
    assert error == ("0000:3b:00", "Xid 13, [31mred" + "x" * 193)
    assert xids("NVRM: loading NVIDIA UNIX x86_64 Kernel Module") == []


LISTED = """\
00000000:1B:00.0, 0, GPU-aaaa-1, {}
00000000:3B:00.0, 1, GPU-bbbb-1, {}
00000000:86:00.0, 2, GPU-cccc-1, {}
00000000:87:00.0, 3, GPU-dddd-1, [N/A]
"""


def test_without_the_kernels_log_the_counters_say_which_gpu_has_lost_memory_since_the_start(
    tmp_path, node_dir, nvidia_smi
):
    env = {"PATH": str(tmp_path / "nvidia")}
    nvidia_smi(LISTED.format(3, 5, 0))
    errors = GpuErrors(str(node_dir), env, str(tmp_path / "no log"))
    assert errors.poll() == []
    assert errors.summary() == ""
    nvidia_smi(LISTED.format(3, 7, 7))
    told = "2 uncorrected memory errors since the ranks were started"
    assert errors.summary() == f"GPU 00000000:3B:00.0 of rank 3: {told}"
    (tmp_path / "nvidia/nvidia-smi").write_text("#!/no/such/interpreter\n")
    assert errors.summary().startswith("nvidia-smi: ")
    broken = GpuErrors(str(node_dir), env, str(tmp_path / "no log"))
    nvidia_smi(LISTED.format(3, 7, 7))
    assert broken.summary() == ""  # how much of it is the job's cannot be told


@pytest.mark.parametrize(
    ("shown", "named"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, ["3B", "86"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cccc"}, ["86"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, ["1B", "3B", "86"]),
        ({}, ["1B", "3B", "86"]),
    ],
)
def test_gpus_that_the_job_was_not_given_are_left_out_where_no_rank_has_told_of_its_own(
    tmp_path, kernel_log, nvidia_smi, shown, named
):
    env = {"PATH": str(tmp_path / "nvidia"), **shown}
    nvidia_smi(LISTED.format(0, 0, 0))
    counted = GpuErrors(str(tmp_path), env, str(tmp_path / "no log"))
    logged = GpuErrors(str(tmp_path), env, str(kernel_log))
    nvidia_smi(LISTED.format(1, 1, 1))
    say(kernel_log, *(f"NVRM: Xid (PCI:0000:{bus}:00): 79, gone" for bus in ("1b", "3b", "86")))
    assert [part.split(":")[1] for part in counted.summary().split("; ") if part] == named
    assert [line.split(":")[1].upper() for line in logged.poll()] == named


def test_the_exit_record_and_the_verdict_of_a_crash_name_the_gpu(attempt, tmp_path):
    """The agent is told of another log, and of a GPU, by a change of its own copy."""
    log = tmp_path / "kmsg"
    log.touch()
    job = attempt(
        f"""
        import sys
        with open({str(log)!r}, "a") as file:
            file.write("4,1,1,-;{FELL.replace("'", "")}\\n")
        sys.exit(3)
        """
    )
    tree = Path(job.config["runtime_tree"])
    for module, old, new in (
        ("gpu_errors", '"/dev/kmsg"', repr(str(log))),
        ("gpus", "    return len(nvidia) + amd_gpu_count(root)", "    return 1"),
    ):
        path = tree / f"lib/orc/launchers/agent/{module}.py"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    assert job.run() == 3
    record = job.exit()
    assert record["gpu_errors"].startswith("GPU 0000:3b:00: Xid 79, ")
    verdict = merge([record], 1)
    assert verdict.reason == f"rank 0 on {record['host']} exited with 3; {record['host']}: {record['gpu_errors']}"
