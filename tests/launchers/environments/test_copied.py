"""A real virtual environment is packed, brought to another root, and used there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.environments.build import facts_of
from orc.launchers.environments.copied import FACTS, mismatch, moved
from orc.launchers.environments.packing import find_venv, pack_file, pack_venv
from orc.launchers.errors import BundleError
from orc.launchers.snapshot.content_store import ContentStore


@pytest.fixture
def venv(tmp_path: Path, wheel: Any) -> Path:
    """A virtual environment with one package and its script, as pip would have installed it."""
    path = tmp_path / "laptop" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    (packages,) = (path / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel(tmp_path / "wheels")) as archive:
        archive.extractall(packages)
    script = path / "bin" / "tinypkg"
    script.write_text(f"#!{path}/bin/python\nimport sys, tinypkg\ntinypkg.main()\nprint(sys.prefix)\n")
    script.chmod(0o755)
    return path


def packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python*/site-packages"))


def test_a_copied_environment_works_at_another_place(venv: Path, node: Any, tmp_path: Path) -> None:
    laptop, there = ContentStore(tmp_path / "store"), node("b")
    tree = pack_venv(venv, cache=laptop.scan_cache)
    bundle = laptop.ingest(tree)
    assert pack_venv(venv, cache=laptop.scan_cache).digest == bundle.digest
    store = ContentStore(there.root / "store")
    laptop.copy_to(store, bundle.digest)

    status, output = there.prepare(kind="copy", tree=str(store.tree_path(bundle.digest)))
    assert status == 0, output
    directory = there.answer["directory"]
    assert there.python("import sys, tinypkg; print(tinypkg.VALUE, sys.prefix)") == f"1.0 {directory}"
    done = subprocess.run([f"{directory}/bin/tinypkg"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tinypkg", "1.0", directory]
    # When the snapshot it rests on was collected and brought again, the environment is made again, not broken.
    assert "is here already" in there.prepare(kind="copy", tree=str(store.tree_path(bundle.digest)))[1]
    store.remove(bundle.digest)
    assert there.prepare(kind="copy", tree=str(store.tree_path(bundle.digest)))[0] == 1
    assert "cannot be read" in there.answer["error"]
    laptop.copy_to(store, bundle.digest)
    assert there.prepare(kind="copy", tree=str(store.tree_path(bundle.digest)))[0] == 0
    assert there.python("import tinypkg; print(tinypkg.VALUE)") == "1.0"


def test_byte_code_the_interpreter_and_this_program_stay_at_home(venv: Path) -> None:
    site = packages(venv)
    (site / "__pycache__").mkdir()
    (site / "__pycache__" / "tinypkg.cpython-311.pyc").write_bytes(b"x")
    (site / "__editable__.orc_launch-0.1.0.pth").write_text("/work/elsewhere\n")
    (site / "orc_launch-0.1.0.dist-info").mkdir()
    (site / "orc_launch-0.1.0.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    bundle = pack_venv(venv).bundle
    paths = set(bundle.by_path)
    assert not any("__pycache__" in path or "orc_launch" in path for path in paths)
    assert {"bin/python", "bin/python3", "pyvenv.cfg"} & paths == set()
    assert {"bin/tinypkg", FACTS} <= paths


def test_an_editable_install_is_refused_by_name_unless_it_is_left_out(venv: Path, tmp_path: Path) -> None:
    info = packages(venv) / "mylib-2.0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///home/me/mylib", "dir_info": {"editable": True}}))
    with pytest.raises(BundleError, match=r"mylib-2\.0 is an editable install of file:///home/me/mylib"):
        pack_venv(venv)
    source = tmp_path / "mylib"
    source.mkdir()
    (info / "direct_url.json").unlink()
    (packages(venv) / "mylib.pth").write_text(f"# comment\nimport os\n{source}\n")
    with pytest.raises(
        BundleError, match=r"mylib\.pth adds .*/mylib, which is not in the virtual environment"
    ) as caught:
        pack_venv(venv)
    assert "environment.copy.exclude" in caught.value.hint
    assert not any("mylib.pth" in entry.path for entry in pack_venv(venv, ["mylib.pth"]).bundle.entries)


def test_a_link_out_of_the_environment_is_refused(venv: Path) -> None:
    (packages(venv) / "data").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="a link out of itself, to '/etc/hostname'"):
        pack_venv(venv)


def test_what_is_no_virtual_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match=r"not a virtual environment \(no pyvenv.cfg\)"):
        find_venv("here", tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(BundleError, match="no virtual environment is active"):
        find_venv(None, tmp_path)


def test_another_python_platform_or_an_older_c_library_is_refused_with_the_reason() -> None:
    here = facts_of(sys.executable)
    assert here is not None
    assert mismatch(here, here) == ""
    version = here["version"].split(".")
    older = ".".join([version[0], str(int(version[1]) - 1), "0"])
    assert f"it is made for Python {older}, this node has {here['version']}" in mismatch(
        {**here, "version": older}, here
    )
    assert "it is made for linux-s390x" in mismatch({**here, "platform": "linux-s390x"}, here)
    assert "it is made on glibc 9.99" in mismatch(
        {**here, "libc": ["glibc", "9.99"]}, {**here, "libc": ["glibc", "2.36"]}
    )
    assert mismatch({**here, "libc": ["glibc", "2.9"]}, {**here, "libc": ["glibc", "2.36"]}) == ""
    assert "musl" in mismatch({**here, "libc": ["musl", "1.2"]}, {**here, "libc": ["glibc", "2.36"]})


def test_the_refusal_on_a_node_says_what_to_do(node: Any) -> None:
    here = node("a")
    tree = here.root / "store/trees/environment"
    tree.mkdir()
    facts = {**(facts_of(sys.executable) or {}), "platform": "linux-s390x", "venv": "/home/me/venv", "host": "laptop"}
    (tree / FACTS).write_text(json.dumps(facts))
    assert here.prepare(kind="copy", tree=str(tree))[0] == 1
    assert (
        "the environment of laptop (/home/me/venv) cannot be used: it is made for linux-s390x" in here.answer["error"]
    )
    assert "use environment: {venv: requirements.txt}" in here.answer["error"]
    assert here.envs == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"#!/old/bin/python3.11\nx", b"#!/new/bin/python\nx"),
        (
            b"#!/bin/sh\n'''exec' \"/old/bin/python\" \"$0\" \"$@\"\n' '''\nx",
            b"#!/bin/sh\n'''exec' \"/new/bin/python\" \"$0\" \"$@\"\n' '''\nx",
        ),
        (b'VIRTUAL_ENV="/old"\n', b'VIRTUAL_ENV="/new"\n'),
        (b"#!/usr/bin/python3\n# /old/bin\n", b"#!/usr/bin/python3\n# /old/bin\n"),
        (b"\x7fELF\0\0/old", b"\x7fELF\0\0/old"),
    ],
)
def test_scripts_are_moved_to_their_new_place(before: bytes, after: bytes) -> None:
    assert moved(before, "/old", "/new") == after


def test_a_script_whose_first_line_would_be_too_long_goes_through_the_shell(tmp_path: Path) -> None:
    new = tmp_path / ("d" * 120)
    (new / "bin").mkdir(parents=True)
    (new / "bin" / "python").symlink_to(sys.executable)
    script = tmp_path / "script"
    script.write_bytes(moved(b"#!/old/bin/python\nimport sys\nprint(sys.argv[1])\n", "/old", str(new)))
    script.chmod(0o755)
    assert subprocess.run([script, "hello"], capture_output=True, text=True, check=True).stdout == "hello\n"


def test_an_archive_travels_whether_git_ignores_it_or_not(tmp_path: Path) -> None:
    (tmp_path / "env.tar.gz").write_bytes(b"packed")
    tree = pack_file(tmp_path, "env.tar.gz")
    assert [entry.path for entry in tree.bundle.entries] == ["env.tar.gz"]
    store = ContentStore(tmp_path / "store")
    assert (store.tree_path(store.ingest(tree).digest) / "env.tar.gz").read_bytes() == b"packed"
    assert os.path.samefile(tree.sources["env.tar.gz"], tmp_path / "env.tar.gz")
    with pytest.raises(BundleError, match="cannot read the archive"):
        pack_file(tmp_path, "gone.tar.gz")
