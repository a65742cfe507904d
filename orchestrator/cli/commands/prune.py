"""`orc prune`: delete what jobs have left in the cloud, or old jobs from the ledger."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.options import AGE, cluster_option_for, json_option
from orc.orchestrator.cli.session import open_ledger
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import waiting
from orc.orchestrator.cli.ui.output import echo, echo_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orc.launchers.backends.base import Leftover

_WHY = {
    "over": "its job is over",
    "idle": "idle for too long",
    "kept": "kept after its job",
    "unknown": "not in this ledger",
}


@click.command("prune")
@cluster_option_for("This cluster. [default: all that can be pruned]")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; delete nothing.")
@click.option("--kept", is_flag=True, help="Also delete what was kept on purpose (on_finish: keep, idle).")
@click.option(
    "--unknown",
    is_flag=True,
    help="Also delete what belongs to no job of this ledger. It may belong to another ledger.",
)
@click.option(
    "--jobs-older-than",
    type=AGE,
    metavar="AGE",
    help="Remove jobs that ended longer ago than this (30d) from the ledger, and nothing else.",
)
@click.option("--keep-failed", is_flag=True, help="With --jobs-older-than: keep failed jobs.")
@click.option(
    "--audit-older-than",
    type=AGE,
    metavar="AGE",
    help="Remove lines of a service's audit log that are older than this (365d).",
)
@json_option
def command(
    cluster: str | None,
    dry_run: bool,
    kept: bool,
    unknown: bool,
    jobs_older_than: float | None,
    keep_failed: bool,
    audit_older_than: float | None,
    as_json: bool,
) -> int:
    """Delete what jobs have left in the cloud: TPUs, and what orc has made on Kubernetes, that no live job needs.

    Everything found is shown. Exit status 1 when something could not be deleted, or a cluster did not answer or has an
    entry in clusters.yaml that cannot be used; the others are pruned all the same.

    With --jobs-older-than, remove the history of old jobs from the ledger instead. Their logs and checkpoints stay.
    With --audit-older-than, remove old lines of the audit log; one line says who has done so.
    """
    if audit_older_than is not None:
        if jobs_older_than is not None or keep_failed or kept or unknown or cluster is not None:
            raise click.UsageError("--audit-older-than goes with --dry-run and --json alone")
        return _prune_audit(audit_older_than, dry_run=dry_run, as_json=as_json)
    if jobs_older_than is not None:
        if kept or unknown:
            raise click.UsageError("--jobs-older-than is about the ledger, --kept and --unknown are about the cloud")
        return _prune_jobs(jobs_older_than, cluster, keep_failed=keep_failed, dry_run=dry_run, as_json=as_json)
    if keep_failed:
        raise click.UsageError("--keep-failed goes with --jobs-older-than")
    return _prune_clouds(cluster, dry_run=dry_run, kept=kept, unknown=unknown, as_json=as_json)


def _prune_jobs(age: float, cluster: str | None, *, keep_failed: bool, dry_run: bool, as_json: bool) -> int:
    from orc.orchestrator.ledger.prune import PruneRule, prune, would_prune

    ledger = open_ledger().workspace.ledger
    rule = PruneRule(ledger.now() - age, keep_failed, cluster)
    report = would_prune(ledger, rule) if dry_run else prune(ledger, rule)
    echo_result(
        as_json,
        {"dry_run": dry_run, "jobs": report.jobs, "events": report.events},
        f"{'would remove' if dry_run else 'removed'} {report.jobs} jobs with {report.events} events",
    )
    return 0


def _prune_audit(age: float, *, dry_run: bool, as_json: bool) -> int:
    from orc.orchestrator.ledger import audit

    ws = open_ledger().workspace
    now = ws.ledger.now()
    with ws.ledger.database.write() as connection:
        before = now - age
        lines = audit.count(connection, before) if dry_run else audit.prune(connection, before, now, user=ws.user)
    echo_result(
        as_json,
        {"dry_run": dry_run, "lines": lines},
        f"{'would remove' if dry_run else 'removed'} {lines} lines of the audit log",
    )
    return 0


def _prune_clouds(cluster: str | None, *, dry_run: bool, kept: bool, unknown: bool, as_json: bool) -> int:
    from orc.orchestrator.engine import cleanup

    ws = open_ledger().workspace
    names, silent = ([cluster], {}) if cluster is not None else cleanup.sweepable_clusters(ws)
    wanted = {*cleanup.OVER, *(["kept"] if kept else []), *(["unknown"] if unknown else [])}
    rows: list[tuple[str, Leftover, str]] = []
    failed: dict[str, LaunchError] = {}
    for name in names:
        try:
            with waiting(f"asking {name} what is left there"):
                found = cleanup.leftovers(ws, name)
            chosen = [one for one in found if one.why in wanted]
            with waiting(f"deleting on {name}"):
                errors = {} if dry_run else cleanup.sweep(ws, name, chosen)
        except LaunchError as error:
            if cluster is not None:
                raise
            silent[name] = error
            continue
        failed.update(errors)
        rows += [(name, one, _done(one, one in chosen, dry_run, errors)) for one in found]
    if as_json:
        output.echo_json({"dry_run": dry_run, "leftovers": _to_list(rows, failed), "errors": _texts(silent)})
    else:
        echo(_text(rows))
        for where, problem in {**failed, **silent}.items():
            echo(f"\n{where}: {problem.what}" + (f"\n  {problem.hint}" if problem.hint else ""), err=True)
    return int(bool(failed or silent))


def _done(one: Leftover, chosen: bool, dry_run: bool, errors: Mapping[str, LaunchError]) -> str:
    if not chosen:
        return "left"
    return "would be deleted" if dry_run else "FAILED" if one.native_id in errors else "deleted"


def _to_list(rows: Sequence[tuple[str, Leftover, str]], errors: Mapping[str, LaunchError]) -> list[dict[str, Any]]:
    found = []
    for cluster, one, done in rows:
        error = str(errors[one.native_id]) if one.native_id in errors else None
        found.append({"cluster": cluster, **asdict(one), "done": done, "error": error})
    return found


def _texts(errors: Mapping[str, LaunchError]) -> dict[str, str]:
    return {name: str(error) for name, error in errors.items()}


def _text(rows: Sequence[tuple[str, Leftover, str]]) -> str:
    if not rows:
        return "nothing is left"
    lines = [
        (
            cluster,
            one.what,
            one.state,
            output.clock(one.created_at) if one.created_at else "-",
            _WHY[one.why],
            done,
        )
        for cluster, one, done in rows
    ]
    return output.table(("CLUSTER", "WHAT", "STATE", "CREATED", "WHY", "DONE"), lines)
