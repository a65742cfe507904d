"""Jobs as text: one line, or all the details of a failure. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orc.orchestrator.cli.ui import output
from orc.orchestrator.ledger.records import JobSize

if TYPE_CHECKING:
    from orc.launchers.attempts.records import AttemptExit, RankFailure
    from orc.orchestrator.views import AttemptView, JobView

TAIL_LINES = 20
SEEN_LATELY_S = 30.0  # what is older is told with its age


def headline(job: JobView) -> str:
    """``digits-k3f9a2m4xq  RUNNING  epoch 3 step 120``, for progress and results."""
    words = [output.style(job.id, bold=True), output.state(job.state)]
    if len(job.attempts) > 1:
        words.append(f"attempt {len(job.attempts)}")
    if detail := first_line(job.reason) if job.ended else situation(job):
        words.append(detail)
    return "  ".join(words)


def situation(job: JobView) -> str:
    """Return the progress of a job that has not ended, or the reason of its wait: never empty while it does not run."""
    attempt = job.attempts[-1] if job.attempts else None
    said = first_line(job.reason or (attempt.reason if attempt else ""))
    if job.state == "RUNNING":
        return (progress(attempt.progress) if attempt else "") or said
    if job.state == "QUEUED" and job.next_attempt_at is not None:
        return f"{said or 'waiting to run again'}, at {output.clock(job.next_attempt_at)}"
    if job.state == "PENDING":
        return said or f"{job.cluster} has it and has not started it yet"
    if job.state == "SUBMITTING":
        if attempt and attempt.state == "AMBIGUOUS":
            return f"being looked for on {job.cluster}: {said or 'its submission was cut off'}"
        since = f" since {output.clock(attempt.submitted_at)}" if attempt and attempt.submitted_at else ""
        return said or f"being sent to {job.cluster}{since}"
    return said or f"about to be sent to {job.cluster}"


def first_line(text: str) -> str:
    """Return the first line of a reason, which may go on with what a program printed."""
    return text.partition("\n")[0].removesuffix(":")


def progress(values: Mapping[str, Any]) -> str:
    """Return ``epoch 3  step 120  loss 0.2134``; empty when the runtime reported nothing."""
    shown = []
    first = [key for key in ("epoch", "step", "loss") if key in values]
    others = [key for key in values if key not in (*first, "at", "samples", "of")]  # when, and how far into the epoch
    for key in [*first, *others]:
        value = values[key]
        if isinstance(value, float):
            value = f"{value:.4g}"
        if isinstance(value, (str, int)):
            shown.append(f"{key} {value}")
    return "  ".join(shown)


def details(job: JobView, checkpoints: str | None = None) -> str:
    """Everything about one job, some lines of text."""
    return "\n".join(_details(job, checkpoints, time.time()))


def _details(job: JobView, checkpoints: str | None, now: float) -> Iterator[str]:
    nodes, ranks = job.spec.get("resources", {}).get("nodes", 1), JobSize.of(job.spec).ranks_per_node
    yield f"{output.style(job.id, bold=True)}  {output.state(job.state)}" + (
        f"  {_deep(job.reason)}" if job.reason else ""
    )
    yield f"  cluster      {job.cluster} ({job.backend}), nodes {nodes}, processes per node {ranks}"
    if job.source:
        yield f"  job file     {job.source}"
    length = output.duration((job.ended_at or now) - job.created_at)
    yield f"  created      {output.clock(job.created_at)}, " + (f"took {length}" if job.ended_at else f"{length} ago")
    if job.seen_at is not None and job.state in ("PENDING", "RUNNING") and now - job.seen_at > SEEN_LATELY_S:
        yield f"  last seen    {output.duration(now - job.seen_at)} ago"
    if job.deadline_at is not None and not job.ended:
        yield f"  deadline     {output.clock(job.deadline_at)}"
    if job.next_attempt_at is not None and not job.ended:
        yield f"  next attempt in {output.duration(job.next_attempt_at - now)}"
    if job.tags:
        yield "  tags         " + ", ".join(f"{key}={value}" for key, value in sorted(job.tags.items()))
    if job.digests:
        yield "  snapshots    " + ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(job.digests.items()))
    if checkpoints:
        yield f"  checkpoints  {checkpoints}"
    for attempt in job.attempts:
        yield from _attempt(attempt, now)


def _attempt(attempt: AttemptView, now: float) -> Iterator[str]:
    why = attempt.reason or attempt.cause or ""
    yield f"  attempt {attempt.number}    {output.state(attempt.state)}" + (f"  {_deep(why)}" if why else "")
    started, ended_at = attempt.started_at, attempt.ended_at
    if started is not None:
        until = f"{output.clock(ended_at)} ({output.duration(ended_at - started)})" if ended_at else "now"
        yield f"    ran          {output.clock(started)} to {until}"
    elif attempt.submitted_at is not None and not ended_at:
        yield f"    waiting      {output.duration(now - attempt.submitted_at)}"
    if attempt.native_id:
        yield f"    native id    {attempt.native_id}"
    if attempt.hosts:
        yield f"    hosts        {', '.join(attempt.hosts)}"
    if attempt.failed_hosts:
        yield f"    to blame     {', '.join(attempt.failed_hosts)}; later attempts keep away"
    if attempt.restarts:
        yield f"    requeued     {attempt.restarts} times by the cluster"
    if attempt.progress and not ended_at:
        yield f"    progress     {progress(attempt.progress)}"
    if attempt.exit:
        yield from _exit(attempt.exit)


def _exit(verdict: AttemptExit) -> Iterator[str]:
    if verdict.ranks:
        yield "    ranks        " + ", ".join(f"{rank}: {_ending(end)}" for rank, end in sorted(verdict.ranks.items()))
    if verdict.first_failure:
        yield from failure(verdict.first_failure, indent="    ")


def _deep(reason: str) -> str:
    return reason.rstrip().replace("\n", "\n    | ")


def _ending(record: Mapping[str, Any]) -> str:
    if record.get("signal"):
        return str(record["signal"])
    return "ok" if record.get("exit_code") == 0 else f"exit {record.get('exit_code')}"


def failure(first: RankFailure, *, indent: str = "") -> Iterator[str]:
    """Return the first failing rank: rank, host, exit, and the last lines of its log."""
    yield f"{indent}first failure: {output.style(first.summary, fg='red')} (node {first.node})"
    for line in first.log_tail.rstrip().splitlines()[-TAIL_LINES:]:
        yield f"{indent}  | {line}"
