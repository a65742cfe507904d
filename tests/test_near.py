"""Which tests `make check` runs after a change, and which of those it leaves out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/near.py"
IMPORTERS = {
    "orc.launchers.plan": {"orc.launchers.backends.local"},
    "orc.launchers.backends.local": {"orc.orchestrator.client"},
}
TESTS = {
    "tests/test_docs.py": set(),
    "tests/launchers/test_plan.py": set(),  # called by the module
    "tests/launchers/test_rendering.py": {"orc.launchers.plan"},
    "tests/launchers/test_local.py": {"orc.launchers.backends.local", "orc.launchers.backends.local.backend"},
    "tests/orchestrator/test_client.py": {"orc.orchestrator.client"},
    "tests/orchestrator/web/test_page.py": set(),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("near", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        # Its own test, then who imports it, then who imports what imports it, and no further.
        (["launchers/plan.py"], ["launchers/test_plan.py", "launchers/test_rendering.py", "launchers/test_local.py"]),
        (["launchers/backends/local/__init__.py"], ["launchers/test_local.py", "orchestrator/test_client.py"]),
        (["tests/orchestrator/test_client.py"], ["orchestrator/test_client.py"]),
        (["tests/launchers/conftest.py"], [f"launchers/test_{name}.py" for name in ("local", "plan", "rendering")]),
        (["orchestrator/web/style.css"], ["orchestrator/web/test_page.py"]),
        (["docs/index.md"], ["test_docs.py"]),
        (["launchers/removed.py", "tests/test_removed.py", "tests/conftest.py", "README.md"], []),
        # What is nearer to one of several changes comes first.
        (
            ["launchers/plan.py", "docs/index.md", "tests/launchers/test_local.py"],
            ["launchers/test_local.py", "launchers/test_plan.py", "test_docs.py", "launchers/test_rendering.py"],
        ),
    ],
)
def test_the_tests_near_a_change_are_found_nearest_first(script, changed, tests):
    assert script.near(changed, IMPORTERS, TESTS) == [f"tests/{test}" for test in tests]


def test_imports_are_found_wherever_they_stand(script):
    source = "import os, orc.launchers.spec\ndef test():\n    from orc.launchers import plan\n    from x import y\n"
    assert script.imports_of(source) == {"orc.launchers.spec", "orc.launchers", "orc.launchers.plan"}


def test_types_are_checked_in_the_rooms_that_changed_alone(script):
    assert list(script.typed_rooms(["docs/a.py", "orchestrator/b.py", "runtime/c.md", "templates/d.py"])) == [
        "orc.orchestrator"
    ]


RUN = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import near, pytest
near.ROOT = pathlib.Path.cwd()
changed, seconds = sys.argv[2].split(), float(sys.argv[3])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[near.Nearest(changed, seconds)]))
"""


@pytest.mark.parametrize(
    ("changed", "seconds", "said"),
    [
        ("", "600", "1 passed, 3 deselected"),
        ("test_some.py", "600", "2 passed, 2 deselected"),
        ("", "0", "1 tests further"),
    ],
)
def test_what_needs_a_testbed_is_slow_or_comes_too_late_is_left_out(tmp_path, changed, seconds, said):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow:\n    slurm:\n")
    (tmp_path / "test_some.py").write_text("""
import pytest
@pytest.fixture
def postgres(): raise AssertionError
def test_plain(): pass
def test_with_a_testbed(postgres): pass
@pytest.mark.slurm
def test_marked(): pass
@pytest.mark.slow
def test_slow(): pass
""")
    command = [sys.executable, "-c", RUN, str(SCRIPT.parent), changed, seconds]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert said in done.stdout
    assert done.returncode == 0, done.stdout
