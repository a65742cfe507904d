"""Measure which changes of the code the tests notice: mutmut over the groups of groups.ini (`make mutants`).

run.py [GROUP...]   minutes to hours. Copies the rooms and the tests to .mutants/GROUP, where mutmut changes one
expression at a time and runs the tests that reach it. Prints what survived (`mutmut show NAME` shows it), then for
each module: killed, all, rate. What was interrupted goes on where it stopped.
The rates are in docs/explanation/testing.md.
"""

from __future__ import annotations

import configparser
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
GROUPS = Path(__file__).with_name("groups.ini")
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
MEMORY = 4 << 30  # bytes a process may have of its own: a mutant may fill a list without end
# How a run of the tests on a mutant ends, as mutmut records it.
SURVIVED, NOT_REACHED, NOT_RUN = (0,), (5, 33), (None,)


def prepare(work: Path, modules: list[str], tests: list[str]) -> None:
    """Copy the rooms and the tests to *work*, with the configuration that mutates *modules*."""
    for source, target in [(PROJECT / "tests", work / "tests")] + [
        (PROJECT / room, work / "src" / "orc" / room) for room in ("runtime", "launchers", "orchestrator", "templates")
    ]:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(PROJECT / "pyproject.toml", work)
    options = {
        "source_paths": ["src/"],
        "also_copy": ["src"],
        "timeout_multiplier": ["5"],
        "timeout_constant": ["6"],  # seconds; a limit that a busy machine reaches would count as a kill
        "only_mutate": [f"src/orc/{module}" for module in modules],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:cov", "-m", "not slow and not hosts and not slurm"],
    }
    lines = [f"{name} =\n    " + "\n    ".join(values) for name, values in options.items()]
    (work / "setup.cfg").write_text("[mutmut]\n" + "\n".join(lines) + "\n")


def report(work: Path, modules: list[str]) -> None:
    """Print the names of the surviving mutants below *work* (for `mutmut show`), then a row for each of *modules*."""
    rows = []
    for module in modules:
        meta = work / "mutants" / "src" / "orc" / f"{module}.meta"
        ends = json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}
        lived = [name for name, end in ends.items() if end in SURVIVED + NOT_REACHED + NOT_RUN]
        for name in lived:
            print(f"{name}{' (no test reaches it)' if ends[name] in NOT_REACHED else ''}")
        killed = len(ends) - len(lived)
        rows.append(f"| `{module}` | {killed} | {len(ends)} | {100 * killed / max(len(ends), 1):.1f} % |")
    print("\n| module | killed | of | rate |\n|---|---|---|---|\n" + "\n".join(rows))


def main(names: list[str]) -> None:
    """Run the groups *names*, all of them without any."""
    groups = configparser.ConfigParser()
    groups.read(GROUPS)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for name in names or groups.sections():
        if name not in groups:
            sys.exit(f"{GROUPS.name} has no group {name!r}; there are {', '.join(groups.sections())}")
        modules, tests = groups[name]["modules"].split(), groups[name]["tests"].split()
        work = PROJECT / ".mutants" / name
        prepare(work, modules, tests)
        subprocess.run([MUTMUT, "run"], cwd=work, check=True)
        report(work, modules)


if __name__ == "__main__":
    main(sys.argv[1:])
