"""The conformance suite as a plug-in of pytest: what a backend of another package needs, and what it is told."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orc.launchers.backends import backend_class
from orc.launchers.errors import SpecError
from orc.launchers.testing.plugin import MODULES
from orc.launchers.testing.surface import STABLE, unstable_imports

PODS = Path(__file__).parents[2] / "packages" / "orc_pods"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in *folder*, whose packages can be imported, with the plug-in and nothing of these tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ORC_"))}
    argv = [sys.executable, "-m", "pytest", "-p", "orc.launchers.testing.plugin", "-p", "no:cacheprovider", "-q"]
    argv += ["--rootdir", str(folder), "--confcutdir", str(folder), "-c", "/dev/null", *arguments]
    return subprocess.run(argv, cwd=folder, env={**env, "PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare (util-linux)")
def test_a_backend_of_containers_in_another_package_passes_the_suite_through_the_plug_in_alone() -> None:
    backend = "orc_pods.backend:PodBackend"
    # Launchers differ in how they start ranks, which the agents do: with one of them everything of a platform is shown.
    chosen = ("-k", "not torchrun and not mpirun")
    done = run_pytest(PODS, f"--orc-backend={backend}", "--orc-view=orc_pods.backend:view", "--tb=short", *chosen)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
    lines = [line for file in (PODS / "orc_pods").glob("*.py") for line in file.read_text().splitlines()]
    assert len(lines) <= 300


def test_the_example_of_the_page_imports_what_is_stable_and_is_collected_with_the_whole_suite(
    install_page: Callable[[str], Path],
) -> None:
    folder = install_page("add-a-backend")
    assert unstable_imports("orc_toy") == []
    done = run_pytest(folder, "--orc-backend=orc_toy.backend:ToyBackend", "--collect-only")
    names = {line.partition("::")[2].partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    modules = [importlib.import_module(f"orc.launchers.testing.suite.{name}") for name in MODULES]
    assert names == {name for module in modules for name in vars(module) if name.startswith("test_")}
    own = folder / "test_own.py"
    own.write_text("def test_of_the_package(): pass\n")
    done = run_pytest(folder, "--orc-backend=orc_toy.backend:ToyBackend", "test_own.py")
    assert "1 passed" in done.stdout  # paths that are given are not replaced


def test_what_is_stable_is_there() -> None:
    for module, names in STABLE.items():
        found = importlib.import_module(module)
        assert [name for name in names if not hasattr(found, name)] == []


def test_what_a_package_imports_that_is_not_stable_is_named_with_its_place(tmp_path, monkeypatch) -> None:
    (tmp_path / "unstable").mkdir()
    (tmp_path / "unstable" / "__init__.py").write_text(
        "import orc.launchers.paths\nfrom orc.launchers.ids import AttemptId, new_job_id\nimport json\n"
        "def later():\n    from orc.launchers.backends.ssh import SshBackend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert unstable_imports("unstable") == [
        "__init__.py:1: orc.launchers.paths",
        "__init__.py:2: orc.launchers.ids.new_job_id",
        "__init__.py:5: orc.launchers.backends.ssh.SshBackend",
    ]


def test_a_backend_for_another_version_of_the_protocol_is_refused_with_what_to_update(
    install_page: Callable[[str], Path], monkeypatch
) -> None:
    install_page("add-a-backend")
    kind = backend_class("toy")
    monkeypatch.setattr(kind, "protocol", 2)
    with pytest.raises(SpecError, match="toy was written for version 2 of the protocol, and this orc has 1"):
        backend_class("toy")


def test_schema_and_completion_know_the_options_of_a_package(install_page: Callable[[str], Path], capsys) -> None:
    from orc.orchestrator.cli.commands.env import schema_command
    from orc.orchestrator.cli.completion import complete

    install_page("add-a-backend")
    schema_command.main(["clusters"], standalone_mode=False)
    schema = json.loads(capsys.readouterr().out)
    assert "nice" in schema["$defs"]["toy options"]["properties"]
    assert "resources.options.toy." in [item.value for item in complete("resources.options.")]
    assert [(i.value, i.help) for i in complete("resources.options.toy.")] == [
        ("resources.options.toy.nice=", "As of nice(1).")
    ]
