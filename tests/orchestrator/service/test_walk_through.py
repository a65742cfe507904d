"""The walk-through of docs/how-to/run-the-service.md works as it stands, from the first token to the diagnosis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
from test_serve import serving

PAGE = Path(__file__).parents[3] / "docs/how-to/run-the-service.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_walk_through_works(tmp_path: Path, orc_home: Path) -> None:
    text = PAGE.read_text().partition("## Walk through")[2].partition("\n## ")[0]
    blocks = FENCE.findall(text)
    shell = [content for language, content in blocks if language == "sh"]
    files = dict(
        re.findall(r"# ([\w.]+)\n(.*)", content, re.DOTALL)[0] for lang, content in blocks if lang in ("python", "yaml")
    )
    (expected,) = [content for language, content in blocks if language == "text"]
    assert set(files) == {"clusters.yaml", "train.py", "job.yaml"}
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text(files.pop("clusters.yaml"))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    # `orc` of this interpreter, by its name.
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "orc").write_text(f'#!/bin/sh\nexec {sys.executable} -m orc.orchestrator.cli.main "$@"\n')
    (programs / "orc").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, commands + done.stdout + done.stderr
        return done.stdout + done.stderr

    start, *others = shell
    assert start.endswith("orc serve\n")
    run(start.removesuffix("orc serve\n"))
    with serving() as (url, _):
        port = str(httpx.URL(url).port)
        assert url == f"http://127.0.0.1:{port}"
        said = "".join(run(block.replace("8770", port)) for block in others)
        assert httpx.get(f"{url}/").headers["content-type"].startswith("text/html")
        assert httpx.get(f"{url}/api/v1/jobs").status_code == 401
    for line in expected.splitlines():
        assert line in said
    assert "ada (admin)" in said
    assert "step 4 loss 0.200" in said
    assert '"action":"submit_job"' in said
