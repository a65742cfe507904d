"""A job's snapshot made by hand, packages made on the spot, and the environment step run the way an agent runs it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.snapshot.runtime_tree import runtime_files


def make_wheel(directory: Path, name: str = "tinypkg", version: str = "1.0", *, needs: str = "") -> Path:
    """A wheel with one module that has VALUE, and a console script."""
    files = {
        f"{name}.py": f"VALUE = {version!r}\ndef main(): print('{name}', VALUE)\n",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-{version}.dist-info/entry_points.txt": f"[console_scripts]\n{name}={name}:main\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text.encode())}\n"
        for path, text in files.items()
    )
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{name}-{version}.dist-info/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return wheel


@dataclass
class Node:
    """One node's root, with the code tree of a job."""

    root: Path

    @property
    def code(self) -> Path:
        return self.root / "store/trees/code"

    @property
    def attempt(self) -> Path:
        return self.root / "jobs/job-1/a1"

    @property
    def answer(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.attempt / "node-0/environment.json").read_text())
        return loaded

    @property
    def envs(self) -> list[str]:
        """Names of the environments that exist here, complete or not."""
        directory = self.root / "envs"
        return sorted(p.name for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []

    def config(self, **environment: Any) -> Path:
        (self.attempt / "node-0").mkdir(parents=True, exist_ok=True)
        config = {
            "format": 1,
            "job": "job-1",
            "name": "job",
            "attempt": 1,
            "nnodes": 1,
            "nproc": 1,
            "root": str(self.root),
            "job_dir": str(self.root / "jobs/job-1"),
            "attempt_dir": str(self.attempt),
            "code_tree": str(self.code),
            "runtime_tree": str(self.root / "store/trees/runtime"),
            "marker": "orc-job-1-a1",
            "python": None,
            "command": {"env": {}},
            "env": {},
            "secrets": [],
            "environment": environment,
        }
        path = self.attempt / "agent.json"
        path.with_suffix(".new").write_text(json.dumps(config))
        path.with_suffix(".new").replace(path)  # a process that was started before may be reading it
        return path

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(self.root / "store/trees/runtime"), "environment", *words]

    def start(
        self, answer: str = "environment.json", /, *, env: dict[str, str] | None = None, **environment: Any
    ) -> Any:
        config = self.config(**environment)
        argv = self.argv("prepare", str(config), str(self.attempt / "node-0" / answer))
        surroundings = {**os.environ, "PYTHONPATH": "/nowhere", **(env or {})}
        return subprocess.Popen(argv, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def prepare(self, *, env: dict[str, str] | None = None, **environment: Any) -> tuple[int, str]:
        """Exit status and output of the environment step."""
        process = self.start(env=env, **environment)
        output, _ = process.communicate(timeout=150)
        return process.returncode, output

    def python(self, code: str) -> str:
        """What *code* prints under the prepared Python."""
        answer = self.answer
        env = {**os.environ, **answer["env"], "PATH": os.pathsep.join([*answer["path"], os.environ["PATH"]])}
        done = subprocess.run([answer["python"], "-c", code], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()


@pytest.fixture
def node(tmp_path: Path) -> Callable[[str], Node]:
    """``node("a")`` is a machine of its own, as far as orc's root is concerned."""

    def make(name: str) -> Node:
        made = Node(tmp_path / name)
        runtime = made.root / "store/trees/runtime"
        runtime.mkdir(parents=True)
        made.code.mkdir(parents=True)
        for path, source in runtime_files().items():
            if path == "__main__.py" or path.startswith("lib/orc/launchers/"):
                (runtime / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, runtime / path)
        return made

    return make


@pytest.fixture
def wheel() -> Callable[..., Path]:
    return make_wheel
