"""A page of the documentation as a program: its files are written, its commands run, its outputs looked for.

A block is a file where its first line names it (``# train.py``). ``sh`` is run, ``console`` only shown. Each line of a
``text`` block has to occur in what the commands print.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class ExecutedPage:
    """The blocks of *text*, run in *folder* with an `orc` that is this interpreter's."""

    def __init__(self, text: str, folder: Path) -> None:
        self._folder = folder
        blocks = _FENCE.findall(text)
        self.commands = [content for language, content in blocks if language == "sh"]
        self.files = dict(
            re.fullmatch(r"# ([\w.]+)\n(.*)", content, re.DOTALL).groups()  # type: ignore[union-attr]
            for language, content in blocks
            if language in ("python", "yaml")
        )
        self._expected = [line for language, content in blocks if language == "text" for line in content.splitlines()]
        self._printed = ""
        programs = folder / "bin"
        programs.mkdir()
        (programs / "orc").write_text(f'#!/bin/sh\nexec {sys.executable} -m orc.orchestrator.cli.main "$@"\n')
        (programs / "orc").chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def write_files(self, configuration: Path) -> None:
        """Write the files: ``clusters.yaml`` into the directory *configuration*, the others beside the commands."""
        for name, content in self.files.items():
            folder = configuration if name == "clusters.yaml" else self._folder
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)

    def run(self, commands: str) -> None:
        """Run the lines of a block, which all have to succeed."""
        done = subprocess.run(
            ["bash", "-euc", commands],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, commands + done.stdout + done.stderr
        self._printed += done.stdout + done.stderr

    def check(self, port: str = "") -> str:
        """Check that what was promised was printed, *port* being the service's here; return all that was printed."""
        expected = [line.replace("8770", port or "8770") for line in self._expected]
        assert [line for line in expected if line not in self._printed] == [], self._printed
        return self._printed
