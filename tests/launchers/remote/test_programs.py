"""Programs that are sent to an interpreter on its standard input."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from orc.launchers.remote import programs
from orc.launchers.remote.programs import Program


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program of two modules."""
    (tmp_path / "launchers" / "inner").mkdir(parents=True)
    (tmp_path / "launchers" / "inner" / "first.py").write_text(
        "import sys\nfrom orc.launchers.second import WORD\n"
        "def main():\n    print(WORD, sys.argv[1:], sys.stdin.read(), __name__)\n    sys.exit(len(sys.argv))\n"
    )
    (tmp_path / "launchers" / "second.py").write_text("WORD = 'sent'\n")
    monkeypatch.setattr(programs, "_ROOT", tmp_path)
    return Program("inner.first", ("second",))


def test_a_program_reads_its_arguments_and_its_input(program: Program) -> None:
    argv = program.argv(sys.executable, ("a b", "c"))
    done = subprocess.run(argv, input=program.packed + b"words", capture_output=True, timeout=60)
    assert done.stdout.decode() == "sent ['a b', 'c'] words orc.launchers.inner.first\n"
    assert done.returncode == 3


def test_a_program_that_is_cut_off_on_its_way_does_not_run(program: Program) -> None:
    done = subprocess.run(program.argv(sys.executable), input=program.packed[:-5], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"cut off on its way" in done.stderr


def test_an_older_python_can_read_the_message_that_it_is_too_old(program: Program) -> None:
    boot = program.argv("python3")[4]
    ast.parse(boot, feature_version=(3, 4))
    pretend = f"import sys; sys.version_info = (3, 6, 8); sys.version = '3.6.8 (main)'; exec({boot!r})"
    done = subprocess.run([sys.executable, "-c", pretend, "1", "x"], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().endswith("is too old: Python 3.6.8")
