"""Virtual environments that are really built, without a network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import until


def command_lines() -> Iterator[bytes]:
    """Of every process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


VENV = {"kind": "venv", "requirements": "requirements.txt", "find_links": ["wheels"], "no_index": True}


def test_an_environment_is_built_once_and_used_by_all(node: Any, wheel: Any) -> None:
    here = node("a")
    digest = hashlib.sha256(wheel(here.code / "wheels").read_bytes()).hexdigest()
    (here.code / "requirements.txt").write_text(f"tinypkg==1.0 \\\n    --hash=sha256:{digest}\n")

    processes = [here.start(f"{number}.json", **VENV) for number in range(3)]
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("-m pip" in text for text in outputs) == 1
    assert len(here.envs) == 1

    status, output = here.prepare(**VENV)
    assert (status, "is here already" in output, "-m pip" in output) == (0, True, False)
    assert here.python("import sys, tinypkg; print(tinypkg.VALUE, sys.prefix)") == f"1.0 {here.answer['directory']}"


def test_what_a_killed_build_has_left_is_not_used(tmp_path: Path) -> None:
    from orc.launchers.environments.build import built

    made = []

    def build(directory: str) -> None:
        assert not Path(directory).exists()
        Path(directory).mkdir()
        (Path(directory) / "whole").touch()
        made.append(directory)

    (tmp_path / "envs" / "abc").mkdir(parents=True)
    (tmp_path / "envs" / "abc" / "half").touch()
    for _ in range(2):
        directory = Path(built(str(tmp_path), "abc", build, lambda d: True))
        assert [path.name for path in directory.iterdir()] == ["whole"]
    assert len(made) == 1
    # One that is not usable any more, because what it links to is gone, is made again as well.
    built(str(tmp_path), "abc", build, lambda d: False)
    assert len(made) == 2


def test_a_package_that_is_not_what_the_lock_file_says_is_refused_in_pips_words_and_leaves_nothing(
    node: Any, wheel: Any
) -> None:
    here = node("a")
    wheel(here.code / "wheels")
    (here.code / "requirements.txt").write_text(f"tinypkg==1.0 --hash=sha256:{'0' * 64}\n")
    # Two nodes that share the root: the second one, which waits, need not fail as slowly.
    first = here.start("environment.json", **VENV)
    until(lambda: here.envs)
    first.send_signal(signal.SIGSTOP)
    second = here.start("other.json", **VENV)
    waits = second.stdout.readline()
    first.send_signal(signal.SIGCONT)
    assert "waiting for another process" in waits
    processes = [first, second]
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert sum("-m venv" in output for output in outputs) == 1
    error = here.answer["error"]
    assert "installing requirements.txt failed with exit status 1" in error
    assert "DO NOT MATCH THE HASHES" in error
    assert all(error in output for output in outputs)
    assert here.envs == []


@pytest.mark.parametrize("moment", ["*", "*/lib/*/site-packages/pip"])  # the latter by a child of `venv`
def test_a_build_that_is_told_to_end_leaves_nothing(moment: str, node: Any, wheel: Any) -> None:
    here = node("a")
    wheel(here.code / "wheels")
    (here.code / "requirements.txt").write_text("tinypkg==1.0\n")
    process = here.start(**VENV)
    until(lambda: [path for path in (here.root / "envs").glob(moment) if path.is_dir()])
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert here.envs == []
    assert [line for line in command_lines() if os.fsencode(here.root / "envs") in line] == []


def test_the_digest_covers_all_that_goes_in(node: Any, wheel: Any) -> None:
    from orc.launchers.environments.requirements import local_files, read_requirements

    here = node("a")
    (here.code / "base").mkdir()
    (here.code / "base" / "more.txt").write_text("numpy\n")
    (here.code / "requirements.txt").write_text("-r base/more.txt\n-c limits.txt\n# nothing\nwheels/tinypkg-1.0.whl\n")
    (here.code / "limits.txt").write_text("numpy<3\n")
    first = read_requirements(str(here.code / "requirements.txt"))
    assert {Path(path).name for path in first} == {"requirements.txt", "more.txt", "limits.txt"}
    (here.code / "limits.txt").write_text("numpy<2\n")
    assert read_requirements(str(here.code / "requirements.txt")) != first
    path = wheel(here.code / "wheels")
    relative = f"wheels/{path.name}"
    before = local_files([f"{relative} ; python_version > '3'", "numpy", "x @ https://a/b.whl"], str(here.code))
    assert list(before) == [relative]
    path.write_bytes(b"other")
    assert local_files([relative], str(here.code)) != before


def test_what_belongs_to_one_working_copy_is_refused(node: Any) -> None:
    here = node("a")
    for line, reason in (
        ("-e .", "an editable install belongs to one working copy"),
        ("--editable=.", "an editable install belongs to one working copy"),
        ("./lib", "a directory would have to be built in the job's snapshot"),
        ("-r gone.txt", "gone.txt: No such file or directory"),
    ):
        (here.code / "lib").mkdir(exist_ok=True)
        (here.code / "requirements.txt").write_text(f"{line}\n")
        assert here.prepare(kind="venv", requirements="requirements.txt")[0] == 1
        assert reason in here.answer["error"]
    assert here.envs == []


def test_a_python_that_is_not_there_is_told_with_those_that_are(node: Any) -> None:
    here = node("a")
    (here.code / "requirements.txt").write_text("")
    assert here.prepare(kind="venv", requirements="requirements.txt", python="3.99")[0] == 1
    assert "there is no Python 3.99 on this node; found 3." in here.answer["error"]
    assert here.prepare(kind="venv", requirements="requirements.txt", python="/no/python")[0] == 1
    assert "/no/python is not a Python that runs here" in here.answer["error"]
