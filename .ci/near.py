"""The tests near a change: ``near.py [FROM]`` runs those of what differs from where this branch left FROM (main).

Near are a changed test itself, and the tests that import a changed module, or a module that imports it. Left out are
those that need a testbed, and what has not begun when the time is over.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import grimp
import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("runtime", "launchers", "orchestrator", "templates")
SECONDS = 90.0
MARKS = frozenset({"slurm", "hosts", "gpu"})
# Fixtures that start a testbed; what needs Slurm or hosts is marked. Chromium starts in a second.
TESTBEDS = frozenset(
    {"postgres", "_sagemaker_server", "tpu_pods", "kubernetes_testbed", "slurm_testbed", "hosts_testbed"}
)


def module_of(path: str) -> str:
    """Return the import name of a file of the rooms."""
    parts = PurePosixPath("orc", path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def near(
    changed: Iterable[str], importers: Mapping[str, Collection[str]], tests: Mapping[str, Collection[str]]
) -> list[str]:
    """Return the test files near *changed* files, nearest first.

    Args:
        changed: Paths below the root of the repository.
        importers: The modules that import each module.
        tests: What each test file imports.
    """
    ranked: dict[str, int] = {}

    def add(rank: int, files: Iterable[str]) -> None:
        for file in files:
            ranked[file] = min(rank, ranked.get(file, rank))

    for path in map(PurePosixPath, changed):
        room, folder = path.parts[0], str(path.parent)
        beside = [test for test in tests if str(PurePosixPath(test).parent) == f"tests/{folder}"]
        if room == "tests":
            below = [test for test in tests if test.startswith(f"{folder}/")]
            add(0, [str(path)] if str(path) in tests else below if path.suffix == ".py" and folder != "tests" else [])
        elif room == "docs":
            add(0, [test for test in ("tests/test_docs.py",) if test in tests])
        elif room in ROOMS and path.suffix != ".py":
            add(1, beside)  # data: those who test what stands beside it
        elif room in ROOMS:
            module = module_of(str(path))
            add(0, [test for test in beside if PurePosixPath(test).stem == f"test_{path.stem}"])
            add(1, [test for test in tests if module in tests[test]])
            add(2, [test for test in tests if not tests[test].isdisjoint(importers.get(module, ()))])
    return sorted(ranked, key=lambda test: (ranked[test], test))


def imports_of(source: str) -> set[str]:
    """Return the names that *source* imports, anywhere in it: modules, and what may be one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return {name for name in found if name.startswith("orc.")}


def changed_since(base: str) -> list[str]:
    """Return the files that differ from where this branch left *base*, committed or not."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split(
            "\0"
        )

    (fork,) = "".join(git("merge-base", "HEAD", base)).splitlines()
    listed = git("diff", "--name-only", "-z", fork), git("ls-files", "--others", "--exclude-standard", "-z")
    return sorted({name for names in listed for name in names if name})


class Nearest:
    """Plugin of pytest: leaves out what needs a testbed, what is slow and unchanged, what comes too late."""

    def __init__(self, changed: Collection[str], seconds: float) -> None:
        self.changed, self.end, self.late = changed, time.monotonic() + seconds, 0

    def _is_wanted(self, item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        fixtures = getattr(item, "fixturenames", ())
        slow = "slow" in marks and str(item.path.relative_to(ROOT)) not in self.changed
        return not (slow or marks & MARKS or TESTBEDS.intersection(fixtures))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is not wanted."""
        left_out = [item for item in items if not self._is_wanted(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Leave out what has not begun in time."""
        if time.monotonic() < self.end:
            return None
        self.late += 1
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how much that was."""
        if self.late:
            terminalreporter.write_line(f"{self.late} tests further away were left out: `make unit` runs all")


def typed_rooms(changed: Iterable[str]) -> Iterator[str]:
    """Yield the packages to check types of."""
    rooms = {PurePosixPath(path).parts[0] for path in changed if path.endswith(".py")}
    yield from (f"orc.{room}" for room in ROOMS if room in rooms and room != "templates")


def main(base: str = "main") -> int:
    """Check types of the rooms that differ from *base*, and run the tests near what does."""
    changed = changed_since(base)
    graph = grimp.build_graph(*(f"orc.{room}" for room in ROOMS))
    importers = {module: graph.find_modules_that_directly_import(module) for module in graph.modules}
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "gpu" not in path.relative_to(ROOT).parts]
    tests = {path.relative_to(ROOT).as_posix(): imports_of(path.read_text()) for path in files}
    packages = [word for room in typed_rooms(changed) for word in ("-p", room)]
    status = subprocess.run([sys.executable, "-m", "mypy", *packages], cwd=ROOT).returncode if packages else 0
    chosen = near(changed, importers, tests)
    sys.stdout.write(f"{len(changed)} files differ from {base}; {len(chosen)} files of tests are near them\n")
    sys.stdout.flush()
    if status or not chosen:
        return status
    status = pytest.main(["-q", *(str(ROOT / test) for test in chosen)], plugins=[Nearest(changed, SECONDS)])
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
