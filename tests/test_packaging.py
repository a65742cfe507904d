"""The wheel: complete, nothing generic at its top level, and usable with the declared dependencies alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from orc.launchers.snapshot.scan import scan

ROOT = Path(__file__).parents[1]
ROOMS = ("runtime", "launchers", "orchestrator", "templates")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_folders() -> set[str]:
    """Import names of all folders that hold modules; starters are data."""
    names = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.parent.relative_to(ROOT).parts
            if "starters" not in parts:
                names.add(".".join(("orc", *parts)))
    return names


def test_every_package_folder_is_listed() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(package_folders())


def test_every_package_folder_is_a_package() -> None:
    for name in package_folders():
        assert (ROOT / Path(*name.split(".")[1:]) / "__init__.py").is_file(), name


def test_tested_versions_are_pinned() -> None:
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("dev", "runtime", "slurm", "aws", "gcp", "examples"):
        wanted += extras[extra]
    assert {Requirement(w).name.lower().replace("_", "-") for w in wanted} <= pinned


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git sees: neither stale build folders nor ignored files can help."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path, origin in scan(ROOT).sources.items():
        if path.startswith((*(f"{room}/" for room in ROOMS), "pyproject.toml", "README.md", "LICENSE")):
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes(Path(origin.decode()).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    expected = {f"orc/{path}" for path in scan(ROOT).sources if path.startswith(tuple(f"{room}/" for room in ROOMS))}
    assert shipped == expected
    assert "orc/__init__.py" not in shipped
    assert {f"orc/{room}/py.typed" for room in ROOMS} <= shipped
    assert "orc/templates/starters/digits/job.yaml" in shipped


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that *names* (requirements) need, and what those need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = list(names)
    while pending:
        requirement = Requirement(pending.pop())
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[key] = importlib.metadata.distribution(requirement.name)
        pending += found[key].requires or []
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and its declared dependencies, and without torch. Its ``bin`` directory."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (home / "lib").glob("python3*/site-packages")
    # The dependencies are linked from the environment of the tests: nothing to download, nothing undeclared visible.
    for distribution in closure(PROJECT["project"]["dependencies"]).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return home / "bin"


def python_releases() -> list[str]:
    """The oldest and the newest supported Python that are here."""
    declared = [text.rpartition(":: ")[2] for text in PROJECT["project"]["classifiers"] if ":: Python :: 3." in text]
    newest = f"python{max(declared, key=lambda text: int(text.partition('.')[2]))}"
    works = shutil.which(newest) and subprocess.run([newest, "-c", "import ensurepip, venv"], capture_output=True)
    is_another = not sys.executable.endswith(newest) and works and works.returncode == 0
    return [sys.executable, *([newest] if is_another else [])]


@pytest.fixture(scope="module")
def package_index() -> None:
    """Tests that ask PyPI are skipped where it cannot be reached."""
    try:
        socket.create_connection(("pypi.org", 443), timeout=20).close()
    except OSError as error:
        pytest.skip(f"PyPI cannot be reached: {error}")


def pip_of_a_new_environment(python: str, home: Path) -> list[str]:
    subprocess.run([python, "-m", "venv", str(home)], check=True)
    return [str(home / "bin/python"), "-m", "pip", "--disable-pip-version-check"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("package_index")
def test_all_extras_resolve_by_themselves_on_the_oldest_and_the_newest_python(wheel: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    running = {}
    for python in python_releases():
        pip = pip_of_a_new_environment(python, tmp_path / Path(python).name)
        command = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", f"{wheel}[all]"]
        running[python] = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    told = {python: (process.communicate(), process.returncode) for python, process in running.items()}
    assert {python: texts for python, (texts, status) in told.items() if status} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("package_index")
def test_the_base_installs_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    pip = pip_of_a_new_environment(sys.executable, tmp_path / "venv")
    subprocess.run([*pip, "install", "--quiet", str(wheel)], env=env, check=True)
    assert "submit" in run(tmp_path / "venv/bin", "orc", "--help", cwd=tmp_path)


def run(installed: Path, *words: str, cwd: Path) -> str:
    done = subprocess.run([installed / words[0], *words[1:]], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_but_the_namespace_lands_in_site_packages(installed: Path) -> None:
    (site,) = (installed.parent / "lib").glob("python3*/site-packages")
    own = {path.name for path in site.iterdir() if not path.is_symlink()}
    assert {name for name in own if not name.endswith(".dist-info")} == {"orc"}


def test_the_command_works_without_torch(installed: Path, tmp_path: Path) -> None:
    probe = "import importlib.util as u; print([m for m in ('torch', 'numpy', 'pytest', 'submitit') if u.find_spec(m)])"
    assert run(installed, "python", "-c", probe, cwd=tmp_path).strip() == "[]"
    assert "submit" in run(installed, "orc", "--help", cwd=tmp_path)
    assert PROJECT["project"]["version"] in run(installed, "orc", "version", cwd=tmp_path)
    where = run(installed, "python", "-c", "import orc.launchers as o; print(o.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_a_shipped_starter_can_be_copied_and_rendered(installed: Path, tmp_path: Path) -> None:
    run(installed, "orc", "init", "digits", str(tmp_path / "digits"), cwd=tmp_path)
    shown = run(installed, "orc", "render", "job.yaml", cwd=tmp_path / "digits")
    assert "train.py" in shown
    assert " -I -S " in shown


def test_every_module_of_the_launch_layer_imports_without_torch(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib, pkgutil
import orc.launchers, orc.orchestrator
for room in (orc.launchers, orc.orchestrator):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        if ".migrations." not in module.name and module.name not in NEED_AN_EXTRA:
            importlib.import_module(module.name)
"""
    # Subclasses of a library's classes, imported where they are used.
    code = "NEED_AN_EXTRA = ['orc.orchestrator.submitit_executor']\n" + code
    run(installed, "python", "-c", code, cwd=tmp_path)
