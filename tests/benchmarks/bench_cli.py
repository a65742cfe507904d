"""Start-up of the command line: wall and CPU time, medians, each measured in turn with its peers.

    python tests/benchmarks/bench_cli.py

`python -c pass` is the floor of this machine, `torchrun --help` the peer. Budgets (seconds of wall time): `orc --help`
and `orc list` with 10,000 jobs 0.15, `orc render` and `orc submit` to the local backend 0.35; `orc logs` 1.5 GB/s; from
`Client.submit` of a process that runs already to the first line that the job writes 0.15.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Row, report

from orc.launchers.spec import load_job
from orc.orchestrator.client import Client

ROUNDS = 7
LOG_BYTES = 100_000_000
JOB = "name: bench\ncommand: 'true'\nlauncher: python\n"
BUDGETS = {
    "orc --help": 0.15,
    "orc render": 0.35,
    "orc submit (local)": 0.35,
    "orc list (10,000 jobs)": 0.15,
}


def program(name: str) -> str:
    """A program of this environment."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is not installed"
    return found


def measure(argv: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def multiply(count: int) -> None:
    """Fill the ledger with copies of its only job."""
    with Client() as client, client.workspace.ledger.database.write() as connection:
        columns = [row[1] for row in connection.tuples("PRAGMA table_info(jobs)")]
        ((*values,),) = connection.tuples(f"SELECT {', '.join(columns)} FROM jobs")
        job = dict(zip(columns, values, strict=True))
        rows = [{**job, "id": f"copy-{i:06d}", "created_at": job["created_at"] - i} for i in range(count)]
        marks = ", ".join(f":{name}" for name in job)
        connection.executemany(f"INSERT INTO jobs ({', '.join(job)}) VALUES ({marks})", rows)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def test_start_up(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orc = program("orc")
    subprocess.run([orc, "submit", str(job_file), "--follow"], check=True, capture_output=True)
    multiply(10_000)
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "torchrun --help": [program("torchrun"), "--help"],
        "orc --help": [orc, "--help"],
        "orc render": [orc, "render", str(job_file)],
        "orc submit (local)": [orc, "submit", str(job_file)],
        "orc list (10,000 jobs)": [orc, "list"],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, argv in commands.items():
            times[name].append(measure(argv))
    wall = {name: statistics.median(w for w, _ in measured) for name, measured in times.items()}
    peer = statistics.median(w for w, _ in times["torchrun --help"])
    with capsys.disabled():
        print()
        for name, measured in times.items():
            print(f"{name:24} wall {wall[name]:.3f} s  cpu {statistics.median(c for _, c in measured):.3f} s")
        report(
            Row(name, "torchrun --help", wall[name], peer, "s", wall[name] / peer, budget, "ours")
            for name, budget in BUDGETS.items()
        )


def test_first_line(orc_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text("name: bench\ncommand: date +%s.%N\nlauncher: python\n")
    seconds = []
    with Client() as client:
        for _ in range(ROUNDS + 1):  # the first imports what the others have
            began = time.time()
            job = client.submit(load_job(job_file))
            client.wait([job.id])
            (log,) = (orc_home / "state" / "jobs" / job.id).glob("a1/logs/rank-0.log")
            seconds.append(float(log.read_text()) - began)
    median = statistics.median(seconds[1:])
    with capsys.disabled():
        print()
        report([Row("first line of a job", "none", median, None, "s", None, 0.15, "ours")])


def test_logs(orc_home: Path, job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orc = program("orc")
    subprocess.run([orc, "submit", str(job_file), "--follow"], check=True, capture_output=True)
    (log,) = (orc_home / "state" / "jobs").glob("*/a1/logs/rank-0.log")
    walls: dict[int, list[float]] = {0: [], LOG_BYTES: []}
    for _ in range(7):
        for size, measured in walls.items():
            log.write_bytes((b"x" * 99 + b"\n") * (size // 100))
            began = time.perf_counter()
            with subprocess.Popen([orc, "logs", "@last", "--rank", "0"], stdout=subprocess.PIPE) as reader:
                assert reader.stdout is not None
                got = 0
                while data := os.read(reader.stdout.fileno(), 1 << 20):
                    got += len(data)
            measured.append(time.perf_counter() - began)
            assert got == size
    # The best of each: the difference is small against what other processes add.
    empty, full = (min(measured) for measured in walls.values())
    speed = LOG_BYTES / max(full - empty, 0.005) / 1e9
    with capsys.disabled():
        print(f"\norc logs, 100 MB through a pipe: {full:.3f} s, {speed:.2f} GB/s beyond the start-up of {empty:.3f} s")
        report([Row("orc logs, 100 MB", "none", speed, None, "GB/s", None, 1.5, "at least")])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
