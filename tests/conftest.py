"""What every test relies on: its own state and configuration, one thread per torch process, no silent skips in CI."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = (
    *("slurm_testbed", "login_node", "hosts_testbed"),
    *("postgres_testbed", "sagemaker_testbed", "tpu_testbed", "chromium_testbed", "kubernetes_testbed"),
)

_HERE = Path(__file__).parent
# Where the tests are that need a testbed. Those on SSH hosts mostly wait: they are two parts, with hosts of their own.
_ON_TESTBEDS = {
    "hosts-e2e": ("e2e",),
    "hosts": (
        *("orchestrator/cli/commands", "orchestrator/engine"),
        *(f"launchers/{room}" for room in ("agent", "conformance", "hosts", "remote", "transfer")),
    ),
    "slurm": (
        *("e2e", "orchestrator/engine", "orchestrator/functions"),
        *("launchers/backends/slurm", "launchers/conformance"),
    ),
}
# Where the others are; `main` is what no other part has.
_ELSEWHERE = {
    "main": (".", "launchers", "launchers/backends"),
    "kubernetes": ("launchers/backends/kubernetes",),
    "e2e": ("e2e", "templates"),
    "orchestrator": ("orchestrator",),
    "runtime": ("runtime",),
    "checkpoint": ("runtime/checkpoint",),
    "runtime-parallel": ("runtime/parallel", "runtime/stand_ins", "runtime/engine"),
}
_MARKS = {"hosts-e2e": "hosts", "hosts": "hosts", "slurm": "slurm and not hosts"}
PARTS = (*_ON_TESTBEDS, *_ELSEWHERE)  # which tests/run.sh runs

collect_ignore = ["gpu"]  # `make test-gpu` runs them, with an environment and settings of their own

_KEPT = ("ORC_REQUIRE_TESTBEDS", "SLURM_TESTBED_", "HOSTS_", "ORC_UPDATE_GOLDEN")
_FOREIGN = ("ORC_", "ACCELERATE_", "TORCHELASTIC_", "SLURM_", "SBATCH_", "OMPI_", "PMI_")
_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")

for _name in list(os.environ):
    if (_name.startswith(_FOREIGN) and not _name.startswith(_KEPT)) or _name in _RENDEZVOUS:
        del os.environ[_name]
# Several processes share few cores; with more threads than cores they mostly wait for each other.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# A test runs the passes that it is about; those of the detached reconciler switch it on.
os.environ["ORC_RECONCILER"] = "off"
# Neither the ignore rules nor the identity of the person who runs the tests may decide their outcome.
os.environ["GIT_CONFIG_GLOBAL"] = os.environ["GIT_CONFIG_SYSTEM"] = os.devnull
for _role in ("AUTHOR", "COMMITTER"):
    os.environ[f"GIT_{_role}_NAME"], os.environ[f"GIT_{_role}_EMAIL"] = "Test", "test@example.org"

# A shim of pyenv starts a dozen shells before each `python3` of a host that is a directory of this machine: the Python
# that runs the tests is found first, as it is behind the shim.
_python3 = Path(shutil.which("python3") or "")
if _python3.parent.name == "shims":
    _programs = Path(sys.executable).resolve().parent
    os.environ["PATH"] = f"{_programs}{os.pathsep}{os.environ['PATH']}"

# A shell that runs the tests in its background has them ignore these, and what they start inherits that.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# How long an example takes says nothing about it where three test processes share the machine.
hypothesis.settings.register_profile("orc", deadline=None)
# Many more lives of jobs, other ones each time: pytest --hypothesis-profile=long tests/orchestrator/engine
hypothesis.settings.register_profile("long", deadline=None, max_examples=int(os.environ.get("LIVES", "2000")))
hypothesis.settings.load_profile("orc")

_homes = itertools.count()


@pytest.fixture(scope="session")
def _all_homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orc-homes", numbered=True)


@pytest.fixture(autouse=True)
def orc_home(_all_homes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own ``state`` and ``config`` directories lie below this one; neither exists yet."""
    home = _all_homes / str(next(_homes))
    monkeypatch.setenv("ORC_STATE_DIR", str(home / "state"))
    monkeypatch.setenv("ORC_CONFIG_DIR", str(home / "config"))
    return home


@pytest.fixture(autouse=True)
def _signals_as_before() -> Generator[None]:
    """Restore the signals after a test: programs that later tests start inherit what is ignored or blocked."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="the tests of one part; without paths: look only where it has some")


def _places(part: str) -> list[str]:
    """Return the directories and files below which *part* has its tests."""
    if part in _ON_TESTBEDS:
        return [str(_HERE / place) for place in _ON_TESTBEDS[part]]
    every = {_HERE / place for places in _ELSEWHERE.values() for place in places}
    found = []
    for place in _ELSEWHERE[part]:
        others = every - {_HERE / place}
        inside = [path for path in sorted((_HERE / place).iterdir()) if path.is_dir() or path.match("test_*.py")]
        found += [str(path) for path in inside if path not in others and path.name not in collect_ignore]
    return found


def pytest_configure(config: pytest.Config) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    config.option.markexpr = _MARKS.get(part, "not hosts and not slurm")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = _places(part)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Refuse a test that no part would find."""
    collected = [(item, item.path.relative_to(_HERE)) for item in items if item.path.is_relative_to(_HERE)]
    yield
    by_mark: dict[str, list[str]] = {}
    for part, places in _ON_TESTBEDS.items():
        by_mark.setdefault(part.partition("-")[0], []).extend(places)
    for item, place in collected:
        for mark, places in by_mark.items():
            if item.get_closest_marker(mark) and not any(place.is_relative_to(known) for known in places):
                raise pytest.UsageError(f"{item.nodeid} is marked `{mark}`: name its directory in tests/conftest.py")


def pytest_collection_finish() -> None:
    """Keep what was collected (and torch) out of garbage collections, each of which took longer than most tests."""
    gc.collect()
    gc.freeze()


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Where all testbeds must be up, a test that did not run is a failure."""
    if report.skipped and os.environ.get("ORC_REQUIRE_TESTBEDS") == "1" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped although ORC_REQUIRE_TESTBEDS=1: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.fixture(scope="session")
def _agent_files() -> dict[str, bytes]:
    from orc.launchers.snapshot.runtime_tree import runtime_files

    package = "orc/runtime/__init__.py"
    return {path: file for path, file in runtime_files().items() if path == package or "orc/runtime/" not in path}


@pytest.fixture
def bare_runtime(_agent_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs bring the agent and nothing else of orc.runtime: most of a small submission is storing its 300 files."""
    monkeypatch.setattr("orc.launchers.snapshot.runtime_tree.runtime_files", lambda: _agent_files)


_FILE = re.compile(r"^```\w+\n# ([\w./-]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def install_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Install the package that a page of docs/how-to builds, for this test and the processes that it starts."""

    def install(page: str) -> Path:
        site = tmp_path / page
        for name, text in _FILE.findall((Path(__file__).parents[1] / "docs" / "how-to" / f"{page}.md").read_text()):
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        project = tomllib.loads((site / "pyproject.toml").read_text())["project"]
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", str(site))
        packages = [entry.parent.name for entry in site.glob("*/*.py")]
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:  # of another test's copy
            monkeypatch.delitem(sys.modules, name)
        return site

    return install
