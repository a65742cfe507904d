"""`orc render`: the plan of a job, exactly as a submission would send it, without network and without ledger."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.cli.options import cluster_option, job_file_argument, json_option, set_option
from orc.orchestrator.cli.ui.display import READING, waiting
from orc.orchestrator.cli.ui.output import echo, echo_json
from orc.orchestrator.cli.ui.reporting import warn

if TYPE_CHECKING:
    from orc.launchers.findings import Finding
    from orc.launchers.plan import Plan
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup


def plan_of(loaded: LoadedJob) -> tuple[Plan, list[Finding]]:
    """Return the plan of a job that is not submitted (its id ends in 000000), and its snapshot's findings."""
    from orc.launchers.backends import open_backend
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.ids import AttemptId, placeholder_job_id
    from orc.launchers.paths import state_dir
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.runtime_tree import runtime_bundle
    from orc.launchers.snapshot.scan import scan
    from orc.launchers.spec.clusters import get_cluster
    from orc.orchestrator.engine.snapshots import check_script, code_exclude, environment_tree

    spec = loaded.spec
    backend = open_backend(get_cluster(spec.cluster))
    state = state_dir(create=False)
    # The hashes that submissions have left; a place without any is left as it is.
    cache = ContentStore(state / "store").scan_cache if state.is_dir() else None
    code = scan(loaded.workdir, code_exclude(loaded, backend), cache=cache, skip=(state,))
    check_script(spec, code.bundle)
    runtime = runtime_bundle(cache=cache)
    attempt = AttemptId(placeholder_job_id(spec.name), 1)
    brought = environment_tree(loaded, backend.cluster, cache)
    snapshot = Snapshot(code.bundle, runtime.bundle, brought.bundle if brought else None)
    return backend.render(spec, snapshot, attempt), list(code.findings)


def text(plan: Plan, workdir: str) -> str:
    """Return the plan for people: what runs, then every file and command as it would be sent."""
    from orc.orchestrator.cli.ui.command_lines import as_text

    lines = [
        *as_text(plan, workdir),
        f"# plan {plan.marker} for cluster {plan.cluster} ({plan.backend})",
        f"# digest {plan.digest}",
        *(f"# {name} tree {digest}" for name, digest in sorted(plan.trees.items())),
    ]
    if plan.secrets:
        lines.append(f"# secrets, by name only: {', '.join(plan.secrets)}")
    lines += ["", "# environment of the ranks"]
    lines += [f"{name}={shlex.quote(value)}" for name, value in sorted(plan.env.items())]
    for number, file in enumerate(plan.files, 1):
        lines += ["", f"# file {number} of {len(plan.files)}: {file.path} (mode {file.mode:04o})"]
        lines.append(file.content.removesuffix("\n"))
        if not file.content.endswith("\n"):
            lines.append("# (no newline at the end of this file)")
    for number, step in enumerate(plan.commands, 1):
        purpose = f": {step.purpose}" if step.purpose else ""
        lines += ["", f"# command {number} of {len(plan.commands)}{purpose}"]
        lines.append(f"cd {shlex.quote(step.cwd)} && {step}" if step.cwd else str(step))
    return "\n".join(lines)


def write(plan: Plan, document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plan into *folder*, which must not exist or be empty: ``plan.json``, ``commands.sh``, ``files/...``.

    *document* is the plan as JSON.

    Raises `LaunchError`; the folder appears complete or not at all.
    """
    import json
    import shutil
    import tempfile

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(
            "something is in the way of the rendered plan", where=str(folder), hint="choose a new --output DIR"
        )
    contents = {Path("plan.json"): (json.dumps(document, indent=2, ensure_ascii=False) + "\n", 0o644)}
    steps = [f"cd {shlex.quote(c.cwd)} && {c}" if c.cwd else str(c) for c in plan.commands]
    contents[Path("commands.sh")] = ("\n".join(["#!/bin/sh", "set -e", *steps, ""]), 0o755)
    for file in plan.files:
        contents[Path("files") / file.path.lstrip("/")] = (file.content, file.mode)
    staging: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for path, (content, mode) in contents.items():
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).write_text(content, encoding="utf-8", newline="")
            (staging / path).chmod(mode)
        staging.chmod(0o755 & ~_umask())
        staging.replace(folder)
    except OSError as error:
        raise LaunchError(
            f"cannot write the plan: {error.strerror}", where=str(folder), hint="choose a new --output DIR"
        ) from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return [folder / path for path in contents]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def show(loaded: LoadedJob, form: str, output: Path | None) -> None:
    """Print the plan of a job as *form*: text, json, or dir, which writes it to *output* and prints the paths."""
    from orc.orchestrator.cli.ui.command_lines import command_lines

    with waiting(READING):
        plan, findings = plan_of(loaded)
    for finding in findings:
        warn(finding)
    workdir = os.path.normpath(loaded.workdir)
    document = plan.to_dict() | {
        "digest": plan.digest,
        "command_lines": [line.to_dict() for line in command_lines(plan, workdir)],
    }
    if output is not None:
        written = write(plan, document, output)
        if form == "json":
            echo_json({"directory": str(output.absolute()), "files": [str(p.absolute()) for p in written]})
        else:
            echo("\n".join(str(path) for path in written))
    elif form == "json":
        echo_json(document)
    else:
        echo(text(plan, workdir))


def show_any(loaded: LoadedJob | LoadedGroup, form: str, output: Path | None, member: str | None = None) -> None:
    """Print the plan of a job as `show`; of a group, what its members are, or the plan of *member*."""
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.cli.commands.groups import chosen_member, preview

    if isinstance(loaded, LoadedGroup) and member is None:
        if output is not None:
            raise SpecError("--format dir writes the plan of one job", hint="choose one with --member")
        preview(loaded, as_json=form == "json")
    elif isinstance(loaded, LoadedGroup):
        show(chosen_member(loaded, member or "").loaded, form, output)
    else:
        show(loaded, form, output)


@click.command("render")
@job_file_argument
@cluster_option
@set_option
@click.option("--format", "form", type=click.Choice(["text", "json", "dir"]), default="text", show_default=True)
@click.option("--output", "-o", metavar="DIR", type=click.Path(path_type=Path), help="New directory for --format dir.")
@click.option("--member", metavar="INDEX", help="Print the plan of this job of a sweep, array or pipeline.")
@json_option
def command(
    job_file: str,
    cluster: str | None,
    overrides: tuple[str, ...],
    form: str,
    output: Path | None,
    member: str | None,
    as_json: bool,
) -> None:
    """Print what would run, as lines for a shell, and exactly what `orc submit` would send. Touches no network.

    JOB.yaml is ./job.yaml unless given. For a sweep, an array or a pipeline it lists the jobs.
    """
    if output is not None and form != "dir":
        raise click.UsageError("--output needs --format dir", click.get_current_context())
    if form == "dir" and output is None:
        raise click.UsageError("--format dir needs --output DIR", click.get_current_context())
    from orc.orchestrator.engine.validation import load_jobs_checked

    show_any(load_jobs_checked(job_file, overrides, cluster=cluster), "json" if as_json else form, output, member)
