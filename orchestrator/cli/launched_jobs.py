"""Launches that become jobs: their cluster is written down, the job is submitted and its output followed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui.output import echo

if TYPE_CHECKING:
    from orc.launchers.accelerate.remote_launch import JobOfLaunch


def submit_and_follow(launched: JobOfLaunch, *, as_json: bool) -> int:
    """Submit the job of a launch, show the output of all its processes, and return its exit status.

    Raises `LaunchError`, before anything is written where the job itself cannot be.
    """
    from orc.launchers.spec.load import validate
    from orc.launchers.spec.source import Document
    from orc.orchestrator.cli.commands.submit import run
    from orc.orchestrator.engine.validation import check_document

    client = open_ledger()
    document = Document(dict(launched.job), "orc launch", {}, {})
    validate(document)
    for note in launched.notes:
        echo(f"orc launch: {note.key}: {note.text}", err=True)
    _write_down(launched)
    loaded = check_document(document, launched.directory / "orc-launch")
    return run(
        client,
        lambda on_progress: client.submit(loaded, on_progress=on_progress),
        following=True,
        ranks=(),
        all_ranks=True,
        as_json=as_json,
    )


def _write_down(launched: JobOfLaunch) -> None:
    """Add the cluster to clusters.yaml, where passes find it, unless it is there."""
    import yaml

    from orc.launchers.paths import clusters_file
    from orc.launchers.spec.clusters import read_clusters
    from orc.orchestrator.cli.commands.discover import append

    file = clusters_file()
    if launched.name in read_clusters()[0]:
        return
    append(launched.name, yaml.safe_dump({launched.name: dict(launched.cluster)}, sort_keys=False), file)
    echo(f"orc launch: the cluster {launched.name} was added to {file}", err=True)


def hide_credentials(given: Mapping[str, str | None]) -> None:
    """Start this command again with credentials as variables and not in its command line, which all can read.

    *given* are values by the name of their flag. Returns where there are none. Raises `LaunchError` for one of two.
    """
    if not any(given.values()):
        return
    if missing := [f"--{name}" for name, value in given.items() if not value]:
        raise LaunchError(f"{' '.join(missing)} is missing: the two keys go together")
    env = {name: value for name, value in os.environ.items() if name != "AWS_SESSION_TOKEN"}  # of other keys
    env |= {name.upper(): value or "" for name, value in given.items()}
    words = _without(sys.orig_argv[1:], {f"--{name}" for name in given})
    os.execve(sys.executable, [sys.executable, *words], env)  # noqa: S606 — no shell


def _without(words: list[str], flags: set[str]) -> list[str]:
    """Return the command line *words* without the first of each of *flags* and its value."""
    kept: list[str] = []
    left, rest = set(flags), iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        spelled = flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag
        if spelled not in left:
            kept.append(word)
            continue
        left.discard(spelled)
        if not equals:
            next(rest, None)
    return kept
