"""The wheel: complete, nothing generic at its top level, and usable with the declared dependencies alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
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


def package_folders() -> dict[str, Path]:
    """All folders that hold modules, by import name; starters are data."""
    mapped = {Path(folder): name for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            folder = path.parent.relative_to(ROOT)
            if "starters" not in folder.parts:
                found[mapped.get(folder, ".".join(("orc", *folder.parts)))] = path.parent
    return found


def test_every_package_folder_is_listed() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(package_folders())


def test_every_package_folder_is_a_package() -> None:
    for name, folder in package_folders().items():
        assert (folder / "__init__.py").is_file(), name


def test_tested_versions_are_pinned() -> None:
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("dev", "runtime", "ssh", "client", "slurm", "aws", "gcp", "examples"):
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
    sources = {f"orc/{path}" for path in scan(ROOT).sources if path.startswith(tuple(f"{room}/" for room in ROOMS))}
    expected = {path.replace("orc/orchestrator/cli/launch_program/", "orc/launch/") for path in sources}
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


def environment(home: Path, wheel: Path, requirements: list[str]) -> Path:
    """A new environment with the wheel and the closure of *requirements*. Its ``bin`` directory."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (home / "lib").glob("python3*/site-packages")
    # The dependencies are linked from the environment of the tests: nothing to download, nothing undeclared visible.
    for distribution in closure(requirements).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return home / "bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and its declared dependencies, and without torch. Its ``bin`` directory."""
    return environment(tmp_path_factory.mktemp("venv"), wheel, PROJECT["project"]["dependencies"])


@pytest.fixture(scope="module")
def package_index() -> None:
    """Tests that ask PyPI are skipped where it cannot be reached."""
    try:
        socket.create_connection(("pypi.org", 443), timeout=20).close()
    except OSError as error:
        pytest.skip(f"PyPI cannot be reached: {error}")


@pytest.fixture(scope="module")
def from_the_index(package_index: None, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, what PyPI has for it today, and uv. Its ``bin`` directory."""
    home = tmp_path_factory.mktemp("from-the-index")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin/python")]
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*pip, "install", "--quiet", "--no-compile", "uv"], env=env, check=True)
    uv = [str(home / "bin/uv"), "--no-config", "pip", "install", "--quiet", "--python", str(home / "bin/python")]
    subprocess.run([*uv, str(wheel)], env=env, check=True)
    return home / "bin"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_base_installs_into_an_empty_environment(from_the_index: Path, tmp_path: Path) -> None:
    assert "submit" in run(from_the_index, "orc", "--help", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_extras_resolve_together_on_every_supported_python(
    from_the_index: Path, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "wanted.in").write_text(f"orc-launch[all] @ {wheel.as_uri()}\n")
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    command = ["uv", "--no-config", "pip", "compile", "--quiet", "--universal", "--python-version", oldest, "wanted.in"]
    resolved = run(from_the_index, *command, cwd=tmp_path)
    assert {"torch", "sagemaker", "deepspeed"} <= set(re.findall(r"^([\w-]+)==", resolved, re.MULTILINE))


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


def test_the_base_is_small_and_says_which_extra_is_missing(installed: Path, tmp_path: Path) -> None:
    assert len(closure(PROJECT["project"]["dependencies"])) <= 25
    (tmp_path / "clusters.yaml").write_text("lab: {kind: ssh, options: {hosts: [node1]}}\n")
    env = {"HOME": str(tmp_path), "ORC_CLUSTERS": str(tmp_path / "clusters.yaml")}
    for words, extra in (
        (["clusters", "check", "lab"], "ssh"),
        (["notifications", "test", "webhook:https://hooks.example.org/x"], "client"),
    ):
        command = [installed / "orc", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, input="orc_x\n", capture_output=True, text=True)
        assert done.returncode != 0
        assert f"pip install 'orc-launch[{extra}]'" in done.stderr, done.stderr
    (tmp_path / "job.yaml").write_text("name: x\ncommand: 'true'\ncluster: lab\n")
    done = subprocess.run([installed / "orc", "render"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # a job is rendered without a connection
    assert "missing" in run(installed, "orc", "doctor", cwd=tmp_path)


def test_a_shipped_starter_can_be_copied_and_rendered(installed: Path, tmp_path: Path) -> None:
    run(installed, "orc", "init", "digits", str(tmp_path / "digits"), cwd=tmp_path)
    shown = run(installed, "orc", "render", "job.yaml", cwd=tmp_path / "digits")
    assert "train.py" in shown
    assert " -I -S " in shown


@pytest.mark.slow
def test_a_shipped_starter_trains_where_the_repository_is_not(wheel: Path, tmp_path: Path) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *extras["runtime"], *extras["examples"]]
    programs = environment(tmp_path / "venv", wheel, needed)
    run(programs, "orc", "init", "digits", cwd=tmp_path)
    followed = run(programs, "orc", "submit", "job.yaml", "--follow", "--set", "args.epochs=1", cwd=tmp_path / "digits")
    assert re.search(r"^test accuracy 0\.\d+$", followed, re.MULTILINE)


def test_every_module_of_the_launch_layer_imports_without_torch(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib, pkgutil
import orc.launchers, orc.orchestrator
for room in (orc.launchers, orc.orchestrator):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        if ".migrations." not in module.name and not module.name.startswith(NEED_AN_EXTRA):
            importlib.import_module(module.name)
"""
    # Subclasses of a library's classes, imported where they are used; the service, which is an extra; pytest's plug-in;
    # connections over SSH, which are an extra, too.
    extras = ("orc.orchestrator.submitit_executor", "orc.orchestrator.service", "orc.launchers.testing")
    extras += tuple(f"orc.launchers.remote.ssh.{name}" for name in ("connection", "link", "process"))
    code = f"NEED_AN_EXTRA = {extras}\n" + code
    run(installed, "python", "-c", code, cwd=tmp_path)
