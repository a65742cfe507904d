"""docs/reference/backends.md: which behaviour is tested on which backend, as the tests of this folder are collected.

python tests/launchers/conformance/table.py           exit status 1 and the difference where the page is not current
python tests/launchers/conformance/table.py --write   make it so
"""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "reference" / "backends.md"
BEGIN, END = "<!-- made by tests/launchers/conformance/table.py -->", "<!-- end -->"
TITLES = {  # in the order of the columns; a backend that is not named here comes last, under its own name
    "local": "local",
    "ssh": "ssh",
    "slurm": "slurm",
    "slurm-ssh": "slurm over SSH",
    "kubernetes": "kubernetes",
    "sagemaker": "sagemaker",
    "tpu": "tpu",
    "toy": "toy (a package of its own)",
}
LAUNCHERS = ("python", "torchrun", "mpirun", "deepspeed", "xla")
ABBREVIATED = ("tpu", "xla")


@dataclass
class Behaviour:
    """One test: the launchers that it ran each backend with, or `None` where it chooses its own."""

    backends: dict[str, set[str | None]] = field(default_factory=dict)


@dataclass
class Collected:
    """Behaviours by name, by the module that they are in; a plug-in of pytest fills it."""

    modules: dict[str, dict[str, Behaviour]] = field(default_factory=dict)
    headings: dict[str, str] = field(default_factory=dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            callspec: Any = getattr(item, "callspec", None)
            if callspec is None or "backend_under_test" not in callspec.params:
                continue  # of launchers, on one backend
            assert isinstance(item, pytest.Function)
            module = item.module.__name__.rpartition(".")[2]
            self.headings[module] = " ".join((item.module.__doc__ or "").split()).rstrip(".")
            found = self.modules.setdefault(module, {}).setdefault(item.originalname, Behaviour())
            backend = callspec.params["backend_under_test"]
            found.backends.setdefault(backend, set()).add(callspec.params.get("launcher"))


def collect() -> Collected:
    """What pytest collects, whichever testbeds are up. Ends the process when it collects nothing."""
    collected = Collected()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(HERE)], plugins=[collected])
    if status != pytest.ExitCode.OK or not collected.modules:
        sys.exit(f"pytest could not collect the conformance tests (status {status}):\n{said.getvalue()}")
    return collected


def table(collected: Collected) -> str:
    """The generated part of the page."""
    found = {b for m in collected.modules.values() for one in m.values() for b in one.backends}
    columns = {**TITLES, **{backend: backend for backend in sorted(found - set(TITLES))}}
    parts = []
    totals = dict.fromkeys(columns, 0)
    for module, behaviours in collected.modules.items():
        rows = [f"| {' | '.join(['behaviour', *columns.values()])} |", "|---" * (len(columns) + 1) + "|"]
        for name, one in behaviours.items():
            cells = [_cell(one, backend) for backend in columns]
            for backend in columns:
                totals[backend] += backend in one.backends
            rows.append(f"| {' | '.join([_sentence(name), *cells])} |")
        parts.append("\n".join([f"## {collected.headings[module]}", "", *rows]))
    count = sum(len(behaviours) for behaviours in collected.modules.values())
    numbers = ", ".join(f"{title} {totals[backend]}" for backend, title in columns.items())
    return "\n\n".join([f"{count} behaviours: {numbers}.", *parts])


def _cell(behaviour: Behaviour, backend: str) -> str:
    found = behaviour.backends.get(backend)
    everywhere = behaviour.backends.get("local", set())
    if found is None:
        return "–"
    if found >= everywhere:
        return "✓"
    return ", ".join(name for name in LAUNCHERS if name in found)


def _sentence(name: str) -> str:
    words = [word.upper() if word in ABBREVIATED else word for word in name.removeprefix("test_").split("_")]
    text = " ".join(words)
    return text[0].upper() + text[1:]


def current(page: str, made: str) -> str:
    """*page* with *made* in the place that is for it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = current(page, table(collect()))
    if arguments == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    difference = list(difflib.unified_diff(page.splitlines(), wanted.splitlines(), "the page", "the tests", n=0))
    print("\n".join(difference))
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
