"""Templates are rendered strictly: what is missing is an error, what is quoted survives a shell."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jinja2 import UndefinedError

from orc.templates.render import _environment, render

NASTY = ["two words", "it's", '"', "$HOME `id` $(id)", "a\nb", "", "-x", "*", "\\"]


def test_a_name_that_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="modules"):
        render("slurm/job.sbatch.j2", marker="orc-x-a1")


def test_quoted_words_reach_a_program_unchanged() -> None:
    template = _environment().from_string("printf '%s\\0' {{ first | sh }} {{ rest | words }}")
    script = template.render(first=NASTY[0], rest=NASTY[1:])
    said = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, text=True).stdout
    assert said.split("\0")[:-1] == NASTY


def test_jinja_is_not_imported_before_something_is_rendered() -> None:
    code = "import sys, orc.templates.render, orc.launchers.backends.slurm; raise SystemExit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
