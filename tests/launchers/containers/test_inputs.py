"""The program that containers start, as one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from orc.launchers.backends.sagemaker import entry
from orc.launchers.containers import output, program
from orc.launchers.containers.inputs import entry_program

# Read from the tree that the program has unpacked.
OF_THE_AGENT = "orc.launchers.agent.link.channel"


@pytest.mark.parametrize("module", [program, output, entry], ids=lambda module: module.__name__)
def test_it_runs_under_any_python_from_3_9_on_with_nothing_but_the_standard_library_and_itself(module) -> None:
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name.startswith("orc.")}
    assert ours <= {OF_THE_AGENT, program.__name__, output.__name__}
    assert {name.partition(".")[0] for name in imported - ours} <= sys.stdlib_module_names


def test_the_program_of_a_platform_finds_the_kit_and_later_what_was_unpacked_beside_it(tmp_path: Path) -> None:
    (tmp_path / "agent/lib/orc/launchers").mkdir(parents=True)
    (tmp_path / "agent/lib/orc/launchers/unpacked.py").write_text("SAID = 'unpacked'")
    own = tmp_path / "own.py"
    own.write_text(
        "import sys\n"
        "from orc.launchers.containers.program import Failure, main\n"
        "def describe():\n"
        f"    sys.path.insert(0, {str(tmp_path / 'agent/lib')!r})\n"
        "    from orc.launchers.unpacked import SAID\n"
        "    raise Failure(SAID)\n"
        f"sys.exit(main(describe, failure={str(tmp_path / 'out/failure')!r}))\n"
    )
    packed = tmp_path / "entry.pyz"
    packed.write_bytes(entry_program(own))
    assert packed.read_bytes() == entry_program(own)
    done = subprocess.run([sys.executable, "-I", "-S", packed], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (program.EXIT_LAUNCH, "orc: unpacked\n", "")
    assert (tmp_path / "out/failure").read_text() == "unpacked"
