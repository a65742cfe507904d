"""Archives of conda-pack are really unpacked; for environment files, what would be run is looked at."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.environments.build import conda_argv

UNPACK = """#!/usr/bin/env python
import os, sys
prefix = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(prefix, "where"), "w") as file:
    file.write(prefix)
"""


def archive(path: Path, *names: str) -> None:
    """What conda-pack makes: a prefix with its Python, and bin/conda-unpack that repairs paths in it."""
    home = path.parent / "prefix" / "bin"
    home.mkdir(parents=True)
    if "python" in names:
        (home / "python").symlink_to(sys.executable)
    if "conda-unpack" in names:
        (home / "conda-unpack").write_text(UNPACK)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(home, "bin")


def test_an_archive_is_unpacked_and_repaired_once(node: Any) -> None:
    here = node("a")
    tree = here.root / "store/trees/environment"
    tree.mkdir()
    archive(tree / "env.tar.gz", "python", "conda-unpack")
    for expected in ("built in", "is here already"):
        # The root may be in the home directory of a host, whose path only the host knows.
        home = {"HOME": str(here.root)}
        status, output = here.prepare(env=home, kind="conda", archive="env.tar.gz", tree="~/store/trees/environment")
        assert status == 0, output
        assert expected in output
    directory = Path(here.answer["directory"])
    assert (directory / "where").read_text() == str(directory)
    assert here.answer["env"] == {"CONDA_PREFIX": str(directory)}
    assert here.python("import os; print(os.environ['CONDA_PREFIX'])") == str(directory)


def test_an_archive_of_something_else_is_refused(node: Any) -> None:
    here = node("a")
    archive(here.code / "env.tar.gz", "python")
    assert here.prepare(kind="conda", archive="env.tar.gz")[0] == 1
    assert here.answer["error"] == "env.tar.gz is not an archive of conda-pack: it has no bin/conda-unpack"
    (here.code / "env.tar.gz").write_bytes(b"not a tar file")
    assert here.prepare(kind="conda", archive="env.tar.gz")[0] == 1
    assert "unpacking env.tar.gz failed with exit status" in here.answer["error"]
    assert here.envs == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/opt/bin/micromamba", "/opt/bin/micromamba create --yes --prefix /e/1 --file env.yml"),
        ("/usr/bin/mamba", "/usr/bin/mamba env create --yes --prefix /e/1 --file env.yml"),
        ("/usr/bin/conda", "/usr/bin/conda env create --yes --prefix /e/1 --file env.yml"),
    ],
)
def test_each_tool_is_called_in_its_own_way(program: str, expected: str) -> None:
    assert " ".join(conda_argv(program, "/e/1", "env.yml")) == expected


def test_an_environment_file_goes_to_the_fastest_tool_there_is(node: Any, tmp_path: Path) -> None:
    here = node("a")
    (here.code / "environment.yml").write_text("dependencies: [python=3.11]\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    status, _ = here.prepare(env={"PATH": str(bare)}, kind="conda", file="environment.yml")
    assert status == 1
    assert here.answer["error"].startswith("none of micromamba, mamba and conda is on this node's PATH")

    for name in ("conda", "micromamba"):
        tool = bare / name
        tool.write_text(
            "#!/bin/sh\nwhile [ $# -gt 0 ]; do case $1 in --prefix) mkdir -p $2/bin; touch $2/made-by-$(basename $0); "
            f"ln -s {sys.executable} $2/bin/python;; esac; shift; done\n"
        )
        tool.chmod(0o755)
    search = f"{bare}{os.pathsep}/usr/bin{os.pathsep}/bin"
    status, output = here.prepare(env={"PATH": search}, kind="conda", file="environment.yml")
    assert status == 0, output
    assert (Path(here.answer["directory"]) / "made-by-micromamba").exists()
