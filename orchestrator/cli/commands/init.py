"""`orc init`: copy a starter job, all of it or nothing."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import json_option
from orc.orchestrator.cli.ui.output import echo, echo_json, echo_result, table

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# Folders of starters and their headings, in the order of the list; "" holds the ones to begin with.
GROUPS = {
    "": "To begin with",
    "by-feature": "One feature each",
    "complete": "Whole programs",
    "libraries": "Programs of other libraries",
    "platforms": "For one platform",
}
SCHEMA = "job.schema.json"


def starters() -> dict[str, Path]:
    """Return the starters that ship with orc: name -> folder, group by group."""
    import orc.templates

    root = Path(orc.templates.__file__).parent / "starters"
    return {file.parent.name: file.parent for group in GROUPS for file in sorted((root / group).glob("*/job.yaml"))}


def group(folder: Path) -> str:
    """Return the heading of the group that a starter's folder is in."""
    return GROUPS.get(folder.parent.name, GROUPS[""])


def description(folder: Path) -> str:
    """Return the description of a starter: the first comment of its job file."""
    return _head(folder)[0].lstrip("# ").strip()


def duration(folder: Path) -> str:
    """Return how long a starter takes, as the second comment of its job file says."""
    return _head(folder)[1].removeprefix("# Takes ").partition(" on ")[0].strip()


def _head(folder: Path) -> list[str]:
    with (folder / "job.yaml").open(encoding="utf-8") as file:
        return [file.readline(), file.readline()]


def needs(folder: Path) -> list[str]:
    """Return what a starter needs: the packages of its requirements, and the cluster that it is made for."""
    clusters = folder / "clusters.yaml"
    kinds = re.findall(r"^  kind: (\w+)", clusters.read_text("utf-8"), re.MULTILINE) if clusters.is_file() else []
    return [*packages(folder), *(f"a {kind} cluster" for kind in kinds)]


def packages(folder: Path) -> list[str]:
    """Return the names of the packages in the requirements of a starter."""
    file = folder / "requirements.txt"
    return re.findall(r"^[\w-]+", file.read_text("utf-8"), re.MULTILINE) if file.is_file() else []


def copy(source: Path, target: Path) -> list[str]:
    """Copy *source* into *target*, which may exist as long as nothing in it is overwritten.

    Returns the relative paths written. Raises `LaunchError`; what was written before the error is removed again.
    """
    files = [path.relative_to(source) for path in _files(source)]
    files_made = [*files, Path(SCHEMA)]
    if target.exists() and not target.is_dir():
        raise LaunchError("there is a file of that name", where=str(target), hint="choose another directory")
    if taken := [str(file) for file in files_made if (target / file).exists()]:
        what = f"would overwrite {', '.join(taken)}; nothing was written"
        raise LaunchError(what, where=str(target), hint="choose another directory: orc init STARTER DIR")
    made: list[Path] = []
    try:
        for file in files:
            for folder in reversed((target / file).parents):
                if not folder.exists():
                    folder.mkdir()
                    made.append(folder)
            made.append(target / file)
            with (source / file).open("rb") as origin, (target / file).open("xb") as written:
                shutil.copyfileobj(origin, written)
        made.append(target / SCHEMA)
        _add_schema(target)
    except OSError as error:
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        what, where = f"cannot write: {error.strerror}", str(error.filename or target)
        raise LaunchError(what, where=where, hint="choose another directory") from None
    return [str(file) for file in files_made]


def _add_schema(target: Path) -> None:
    """Write the schema of job files beside the job file, and name it there for editors, below the first line."""
    import json

    from orc.launchers.spec.json_schema import job_schema

    (target / SCHEMA).write_text(json.dumps(job_schema(), indent=1) + "\n", encoding="utf-8")
    job = target / "job.yaml"
    text = job.read_text(encoding="utf-8")
    first, rest = text.split("\n", 1)
    if "yaml-language-server:" not in text:
        job.write_text(f"{first}\n# yaml-language-server: $schema={SCHEMA}\n{rest}", encoding="utf-8")


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _listing(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [(s["name"], s["takes"], ", ".join(s["needs"]) or "nothing", s["description"]) for s in found]
    shown, *lines = table(("STARTER", "TAKES", "NEEDS", "WHAT IT SHOWS"), rows).splitlines()
    heading = None
    for starter, line in zip(found, lines, strict=True):
        if starter["group"] != heading:
            heading = starter["group"]
            shown += f"\n\n{heading}:"
        shown += f"\n{line}"
    return f"{shown}\n\nTimes are those of two processes on two CPU cores. `orc init STARTER [DIRECTORY]` copies one."


def _missing(folder: Path) -> list[str]:
    """Return the packages of a starter that the Python of orc, in which jobs on this machine run, does not have."""
    from importlib.metadata import distributions

    here = {str(found.name).lower().replace("_", "-") for found in distributions()}
    return [name for name in packages(folder) if name.lower().replace("_", "-") not in here]


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(n, help=description(p)) for n, p in starters().items() if n.startswith(incomplete)]


@click.command("init")
@click.argument("starter", required=False, shell_complete=_complete)
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--list", "listed", is_flag=True, help="List the starters, as without arguments.")
@json_option
def init_command(starter: str | None, directory: Path | None, listed: bool, as_json: bool) -> None:
    """Copy STARTER to DIRECTORY (default: a new directory of its name). Without arguments, list the starters."""
    known = starters()
    if starter is None or listed:
        found = [
            {"name": n, "group": group(p), "description": description(p), "takes": duration(p), "needs": needs(p)}
            for n, p in known.items()
        ]
        echo_result(as_json, {"starters": found}, _listing(found))
        return
    if starter not in known:
        raise LaunchError(f"no starter {starter!r}", hint=f"there are: {', '.join(known)}")
    target = directory or Path(starter)
    files = copy(known[starter], target)
    if as_json:
        echo_json({"starter": starter, "directory": str(target.absolute()), "files": files})
        return
    echo(f"wrote {', '.join(files)} to {target}")
    if missing := _missing(target):
        requirements = shlex.quote(str(target / "requirements.txt"))
        echo(f"not installed here: {', '.join(missing)}; `pip install -r {requirements}`")
    elsewhere = (target / "clusters.yaml").is_file()
    run = "ORC_CLUSTERS=clusters.yaml orc render job.yaml" if elsewhere else "orc submit job.yaml --follow"
    echo(f"next: cd {shlex.quote(str(target))} && {run}")
