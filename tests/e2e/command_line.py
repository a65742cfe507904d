"""The command line as a test uses it, with one cluster that the test has made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from polling import polls

from orc.launchers.spec.clusters import Cluster

EPOCH = re.compile(r"^epoch +(\d+)/", re.MULTILINE)


class Orc:
    """``orc`` in *directory*, with *cluster* in the clusters file; *env* goes over the test's own."""

    def __init__(self, directory: Path, cluster: Cluster, env: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.cluster = cluster
        self.env = {**os.environ, **(env or {})}
        config = Path(self.env["ORC_CONFIG_DIR"])
        config.mkdir(parents=True, exist_ok=True)
        described = {key: value for key, value in cluster.model_dump(mode="json").items() if key != "name" and value}
        (config / "clusters.yaml").write_text(yaml.safe_dump({cluster.name: described}))

    def start(self, *args: str, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "orc.orchestrator.cli.main", *args]
        everything = {**self.env, **(env or {})}
        return subprocess.Popen(argv, cwd=self.directory, env=everything, text=True, stdout=-1, stderr=-1, **more)

    def __call__(self, *args: str, status: int | Sequence[int] = 0, timeout_s: float = 300) -> str:
        """Standard output; the exit status must be *status*."""
        with self.start(*args) as process:
            out, err = process.communicate(timeout=timeout_s)
        expected = (status,) if isinstance(status, int) else status
        assert process.returncode in expected, f"orc {' '.join(args)}: {process.returncode}\n{out}\n{err}"
        return out

    def init_digits(self) -> None:
        """Fill the directory, which is empty, with the starter of digits, for four of its twelve epochs.

        What it promises for twelve is shown in tests/templates.
        """
        self.directory.rmdir()
        argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "init", "digits", str(self.directory)]
        subprocess.run(argv, env=self.env, check=True, capture_output=True)
        job = self.directory / "job.yaml"
        text = job.read_text()
        assert "epochs: 12\n" in text
        job.write_text(text.replace("epochs: 12\n", "epochs: 4\n"))

    def take_time(self, variable: str, value: str) -> None:
        """Let the digits' third epoch take half a minute where *variable* is *value*: what befalls them comes then."""
        script = self.directory / "train.py"
        step, imports = "                optimizer.step()\n", "import argparse\n"
        text = script.read_text()
        assert step in text
        assert imports in text
        late = f"epoch > 1 and os.environ['{variable}'] == '{value}'"
        slowly = f"                if {late}:\n                    time.sleep(1.5)\n"
        script.write_text(text.replace(step, step + slowly).replace(imports, f"{imports}import os\nimport time\n"))

    def write_job(self, script: str, **spec: Any) -> None:
        """A small job with one script."""
        (self.directory / "train.py").write_text(script)
        job = {"name": "small", "script": "train.py", "launcher": "python", "grace": 10, **spec}
        (self.directory / "job.yaml").write_text(yaml.safe_dump(job))

    def submit(self, *args: str) -> str:
        """The new job's id."""
        job: str = json.loads(self("submit", "job.yaml", "--cluster", self.cluster.name, "--json", *args))["id"]
        return job

    def job(self, job: str) -> dict[str, Any]:
        """What ``orc status --json`` says about one job."""
        (found,) = json.loads(self("status", job, "--json", status=(0, 1, 3)))["jobs"]
        view: dict[str, Any] = found
        return view

    def log(self, job: str, rank: int, *args: str) -> str:
        """One rank's output so far; empty before there is any."""
        return self("logs", job, "--rank", str(rank), *args, status=(0, 2))

    def until(self, job: str, done: Callable[[dict[str, Any]], bool], timeout_s: float = 240) -> dict[str, Any]:
        """Look at the job until *done* says so; its last view."""
        for _ in polls(timeout_s, 0.2):
            if done(view := self.job(job)):
                return view
        raise AssertionError(f"not within {timeout_s:g} s: {view}")

    def until_log(self, job: str, rank: int, text: str, timeout_s: float = 240) -> None:
        """Wait until a rank of a running job has said so."""
        self._until_said(job, rank, lambda said: text in said, timeout_s)

    def until_epoch(self, job: str, epoch: int, timeout_s: float = 240) -> None:
        """Wait until rank 0 has trained that many epochs."""
        self._until_said(job, 0, lambda said: max(map(int, EPOCH.findall(said)), default=0) >= epoch, timeout_s)

    def _until_said(self, job: str, rank: int, is_enough: Callable[[str], bool], timeout_s: float) -> None:
        """Follow a rank's log until there *is_enough* of it: one process, however long that takes."""

        def runs(view: dict[str, Any]) -> bool:
            assert view["state"] not in ("FAILED", "SUCCEEDED", "CANCELLED"), view
            return view["state"] == "RUNNING"

        self.until(job, runs, timeout_s)
        said = ""
        with self.start("logs", job, "--rank", str(rank), "--follow") as follower:
            late = threading.Timer(timeout_s, follower.kill)
            late.start()
            try:
                assert follower.stdout is not None
                for line in follower.stdout:
                    said += line
                    if is_enough(said):
                        return
            finally:
                late.cancel()
                follower.kill()
            raise AssertionError(f"rank {rank} of {job} said only {said!r}\n{follower.communicate()[1]}")
