"""Commands about the ledger as a whole: `orc export`, `import`, `prune`, `adopt`, and hidden ones that run passes."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orc.launchers.errors import LaunchError
from orc.orchestrator.cli.invocation import AGE, cluster_option_for, json_option, open_ledger
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import agree, waiting
from orc.orchestrator.cli.ui.output import echo, echo_json_line, echo_result

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orc.orchestrator.engine.adoption import AdoptionResult


@click.command("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--force", is_flag=True, help="Overwrite an existing FILE.")
@json_option
def export_command(file: str, force: bool, as_json: bool) -> int:
    """Write the history of all jobs into FILE (- for standard output), as JSON lines for `orc import`.

    Jobs may run and be submitted meanwhile: the file shows one moment. It has no secrets and no tokens in it.
    """
    from orc.orchestrator.ledger.history import export

    ledger = open_ledger().workspace.ledger
    if file == "-":
        export(ledger, sys.stdout)
        return 0
    path = Path(file)
    if path.exists() and not force:
        raise LaunchError("the file is there already", where=file, hint="choose another name, or --force")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            counts = export(ledger, opened)
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(path)
    except OSError as error:
        what = f"cannot write the file: {error.strerror or error}"
        raise LaunchError(what, where=file, hint="name a file in a directory that you can write to") from error
    finally:
        new.unlink(missing_ok=True)
    text = f"wrote {counts['jobs']} jobs with {counts['events']} events into {file}"
    echo_result(as_json, {"file": file, "rows": counts}, text)
    return 0


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--take-over", is_flag=True,
    help="Go on with the file's live jobs and schedules here, after showing what will run. The other ledger must rest.",
)  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="With --take-over: go on without asking.")
@json_option
def import_command(file: str, take_over: bool, yes: bool, as_json: bool) -> int:
    """Read FILE (- for standard input), which `orc export` wrote, into this ledger: all of it or nothing.

    It is read as an archive: nothing of it runs. Jobs that had not ended come in as cancelled, schedules as disabled.
    Jobs that are here already stay as they are, so that a second time changes nothing.
    """
    from orc.orchestrator.ledger.history import import_history

    if yes and not take_over:
        raise click.UsageError("--yes goes with --take-over")
    ledger = open_ledger(reconciler=False).workspace.ledger
    where = "standard input" if file == "-" else file
    try:
        with click.open_file(file, encoding="utf-8") as opened:
            history: Iterable[str] = opened
            if take_over:
                history = list(opened)  # what is imported is what was shown, even if the file is written meanwhile
                _agree(history, where, yes=yes)
            report = import_history(ledger, history, where, take_over=take_over)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text in UTF-8"
        raise LaunchError(f"cannot read the file: {why}", where=file, hint="`orc export FILE` writes one") from error
    lines = [f"added {report.added['jobs']} jobs with {report.added['events']} events"]
    if report.known["jobs"]:
        lines.append(f"{report.known['jobs']} jobs were here already")
    if report.ended:
        lines.append(f"{report.ended} jobs had not ended: here they are cancelled, and do not run")
    if report.disabled:
        lines.append(f"{report.disabled} schedules came in disabled; `orc schedule resume NAME` starts one")
    told = {name: getattr(report, name) for name in ("added", "known", "ended", "disabled")}
    echo_result(as_json, {"file": file, **told}, "\n".join(lines))
    return 0


def _agree(lines: list[str], where: str, *, yes: bool) -> None:
    """Print what will run, and ask.

    Raises `InvalidImport`, `click.UsageError` where orc cannot ask, and `click.exceptions.Exit` for a no.
    """
    from orc.orchestrator.ledger.history import live_work

    work = live_work(lines, where)
    for each in work:
        spec = each.spec.get("job", each.spec) if each.what == "schedule" else each.spec
        program = next((f"{key} {spec[key]}" for key in ("script", "module", "command") if spec.get(key)), "?")
        echo(f"{each.what} {each.name}  {each.state}  of {each.owner}  runs {program}", err=True)
    if work and not yes:
        agree(f"go on with these {len(work)} here, with the rights of this account")


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
    "--jobs-older-than", type=AGE, metavar="AGE",
    help="Remove jobs that ended longer ago than this (30d) from the ledger, and nothing else.",
)  # fmt: skip
@click.option("--keep-failed", is_flag=True, help="With --jobs-older-than: keep failed jobs.")
@click.option(
    "--audit-older-than", type=AGE, metavar="AGE",
    help="Remove lines of a service's audit log that are older than this (365d).",
)  # fmt: skip
@json_option
def prune_command(
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
    text = f"{'would remove' if dry_run else 'removed'} {report.jobs} jobs with {report.events} events"
    echo_result(as_json, {"dry_run": dry_run, "jobs": report.jobs, "events": report.events}, text)
    return 0


def _prune_audit(age: float, *, dry_run: bool, as_json: bool) -> int:
    from orc.orchestrator.ledger import audit

    ws = open_ledger().workspace
    now = ws.ledger.now()
    with ws.ledger.database.write() as connection:
        before = now - age
        lines = audit.count(connection, before) if dry_run else audit.prune(connection, before, now, user=ws.user)
    text = f"{'would remove' if dry_run else 'removed'} {lines} lines of the audit log"
    echo_result(as_json, {"dry_run": dry_run, "lines": lines}, text)
    return 0


def _prune_clouds(cluster: str | None, *, dry_run: bool, kept: bool, unknown: bool, as_json: bool) -> int:
    from orc.orchestrator.engine import cleanup

    ws = open_ledger().workspace
    names, silent = ([cluster], {}) if cluster is not None else cleanup.sweepable_clusters(ws)
    wanted = {*cleanup.OVER, *(["kept"] if kept else []), *(["unknown"] if unknown else [])}
    rows: list[dict[str, Any]] = []
    failed: dict[str, LaunchError] = {}
    for name in names:
        try:
            with waiting(f"asking {name} what is left there"):
                found = cleanup.leftovers(ws, name)
            chosen = [left for left in found if left.why in wanted]
            with waiting(f"deleting on {name}"):
                errors = {} if dry_run else cleanup.sweep(ws, name, chosen)
        except LaunchError as error:
            if cluster is not None:
                raise
            silent[name] = error
            continue
        failed.update(errors)
        deleted = "would be deleted" if dry_run else "deleted"
        for left in found:
            problem = errors.get(left.native_id)
            done = "left" if left not in chosen else "FAILED" if problem else deleted
            rows.append({"cluster": name, **asdict(left), "done": done, "error": str(problem) if problem else None})
    if as_json:
        texts = {name: str(error) for name, error in silent.items()}
        output.echo_json({"dry_run": dry_run, "leftovers": rows, "errors": texts})
    else:
        header = ("CLUSTER", "WHAT", "STATE", "CREATED", "WHY", "DONE")
        cells = [
            (r["cluster"], r["what"], r["state"], output.clock(r["created_at"] or None), _WHY[r["why"]], r["done"])
            for r in rows
        ]
        echo(output.table(header, cells) if rows else "nothing is left")
        for where, problem in {**failed, **silent}.items():
            echo(f"\n{where}: {problem.what}" + (f"\n  {problem.hint}" if problem.hint else ""), err=True)
    return int(bool(failed or silent))


@click.command("adopt")
@click.option("--dry-run", is_flag=True, help="List the jobs that the ledger does not know; ask and change nothing.")
@json_option
def adopt_command(dry_run: bool, as_json: bool) -> int:
    """Find jobs that have a directory in the state directory and that the ledger does not know.

    Their clusters are asked what became of them, and they are written into the ledger: after it was deleted, or
    replaced by an old backup. Exit status 1 when a cluster could not be asked.
    """
    from orc.orchestrator.engine import adoption
    from orc.orchestrator.engine.job_copies import unknown

    client = open_ledger()
    ws = client.workspace
    kept = unknown(ws)
    if dry_run:
        found = [adoption.AdoptionResult(one.job.id, one.job.cluster, 0) for one in kept]
    else:
        with waiting(f"asking the clusters about {len(kept)} jobs"):
            found = [adoption.adopt(ws, one) for one in kept]
            client.refresh([one.job for one in found if one.attempts])
        client.session.leave_reconciler()
    told = {"dry_run": dry_run, "jobs": [asdict(one) for one in found]}
    rows = [(one.job, one.cluster, _result(one, dry_run)) for one in found]
    text = "the ledger knows every job that has a directory here"
    echo_result(as_json, told, output.table(("JOB", "CLUSTER", "RESULT"), rows) if rows else text)
    return int(any(one.error for one in found))


def _result(found: AdoptionResult, dry_run: bool) -> str:
    if dry_run:
        return "not in the ledger"
    if found.error:
        return f"left: {found.error}"
    if not found.attempts:
        return "left: its cluster has nothing of it"
    return f"adopted, attempts: {found.attempts}"


@click.command("reconcile", hidden=True)
@json_option
def reconcile_command(as_json: bool) -> None:
    """Run passes until every job has ended; ends at once where another process does that."""
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.engine import detached
    from orc.orchestrator.notifications.delivery import Deliverer, drain

    def report_line(text: str) -> None:
        if as_json:
            echo_json_line({"at": time.time(), "what": text})
        else:
            echo(f"{output.clock(time.time())} {text}")

    def open_session() -> LedgerSession:
        return LedgerSession(reconciler=False)

    with Deliverer(lambda: open_session().workspace.ledger, report_line=report_line):
        detached.run(open_session, report_line)
    with open_session() as session:
        # Notifications of the last job's end go out, too.
        drain(session.workspace.ledger, lambda: not session.workspace.state_dir.is_dir())


@click.command("tick", hidden=True)
@click.option("--job", "job", required=True, metavar="ID", help="The job to look at.")
@json_option
def tick_command(job: str, as_json: bool) -> None:
    """Run one reconciler pass over a job, waiting first for the backoff of a retry that is due."""
    client = open_ledger(reconciler=False)
    view = client.tick(client.resolve(job))
    if as_json:
        output.echo_json(view.to_dict())
