"""Commands of groups, shared by `orc sweep`, `orc array` and `orc pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.cli.options import (
    cluster_option,
    job_file_argument,
    json_option,
    refresh_option,
    set_option,
    yes_option,
)
from orc.orchestrator.cli.session import check_jobs, open_client
from orc.orchestrator.cli.session import refresh as ask_clusters
from orc.orchestrator.cli.ui.display import submission_progress, waiting
from orc.orchestrator.cli.ui.output import clock, echo, echo_json, echo_result, listing, state, table
from orc.orchestrator.cli.ui.reporting import of_states

if TYPE_CHECKING:
    from orc.launchers.spec.groups import LoadedGroup, Member
    from orc.orchestrator.views import GroupView, MemberView

_METRICS = ("loss", "accuracy")  # shown without being asked for, as far as there are any


def submit_group(loaded: LoadedGroup, *, reconciler: bool, yes: bool, as_json: bool) -> int:
    """Submit a group, print its id, and return the exit status."""
    client = open_client(reconciler=reconciler)
    with submission_progress(silent=as_json, yes=yes) as on_progress:
        view = client.submit_group(loaded, on_progress=on_progress)
    if as_json:
        echo_json(view.to_dict())
    else:
        echo(view.id)
        echo(_summary(view), err=True)
        if refused := next((member.job for member in view.members if member.job.state == "FAILED"), None):
            echo(f"{refused.id} FAILED: {refused.reason}", err=True)
        echo(f"next: orc {view.kind} status {view.id}, orc wait {view.id}", err=True)
    return int(of_states(member.job.state for member in view.members))


def preview(loaded: LoadedGroup, *, as_json: bool) -> None:
    """Print the jobs that a group would become."""
    limit = f", {loaded.max_parallel} at a time" if loaded.max_parallel else ""
    if as_json:
        members = [
            {"index": m.number, "stage": m.stage or None, "parameters": dict(m.parameters),
             "job": m.loaded.spec.model_dump(mode="json")}
            for m in loaded.members
        ]  # fmt: skip
        echo_json({"kind": loaded.kind, "name": loaded.name, "max_parallel": loaded.max_parallel, "members": members})
        return
    echo(f"# {loaded.kind} {loaded.name}: {len(loaded.members)} jobs{limit}; --member INDEX shows the plan of one")
    if loaded.kind == "pipeline":
        rows = [
            (m.stage, m.loaded.spec.name, m.loaded.spec.cluster,
             ", ".join([*m.loaded.spec.depends_on, *m.loaded.spec.inputs.values()]) or "-")
            for m in loaded.members
        ]  # fmt: skip
        echo(table(("STAGE", "NAME", "CLUSTER", "AFTER"), rows))
        return
    keys = list(dict.fromkeys(key for m in loaded.members for key in m.parameters))
    lines = [(str(m.number), m.loaded.spec.name, *(m.parameters.get(key, "-") for key in keys)) for m in loaded.members]
    echo(table(("INDEX", "NAME", *keys), lines))


def chosen_member(loaded: LoadedGroup, which: str) -> Member:
    """Return the member with this index or stage. Raises `SpecError`."""
    from orc.launchers.spec.problems import choose

    named = {m.stage or str(m.number): m for m in loaded.members}
    if which not in named:
        raise SpecError(f"no member {which!r}{choose(which, list(named)[:20])}", where="--member")
    return named[which]


def _summary(view: GroupView) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in view.counts.items())
    limit = f", {view.max_parallel} at a time" if view.max_parallel else ""
    return f"{view.kind} {view.id}: {len(view.members)} jobs{limit}; {counts}"


def group_command(kind: str, what: str) -> click.Group:
    """Return the command of groups of *kind*; *what* is its help."""

    @click.group(kind, help=what)
    def command() -> None: ...

    argument = click.argument("group", metavar=f"[{kind.upper()}]", default="@last")

    @command.command("submit", help=f"Send the {kind} in JOB.yaml (./job.yaml unless given): all of its jobs, or none.")
    @job_file_argument
    @cluster_option
    @set_option
    @click.option("--max-parallel", type=click.IntRange(1), metavar="N", help="Run N jobs at a time.")
    @yes_option
    @json_option
    def submit(
        job_file: str,
        cluster: str | None,
        overrides: tuple[str, ...],
        max_parallel: int | None,
        yes: bool,
        as_json: bool,
    ) -> int:
        from orc.launchers.spec.groups import LoadedGroup

        limit = () if max_parallel is None else (f"max_parallel={max_parallel}",)
        loaded = check_jobs(job_file, (*overrides, *limit), cluster)
        if not isinstance(loaded, LoadedGroup) or loaded.kind != kind:
            found = loaded.kind if isinstance(loaded, LoadedGroup) else "single job"
            raise SpecError(f"describes a {found}, not a {kind}", where=job_file, hint="`orc submit` takes all of them")
        return submit_group(loaded, reconciler=True, yes=yes, as_json=as_json)

    @command.command("list", help=f"List the newest groups of this kind: {kind}.")
    @click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of lines.")
    @json_option
    def list_(limit: int, as_json: bool) -> None:
        found = open_client().groups(kinds=(kind,), limit=limit)
        rows = [
            (v.id, v.name, str(len(v.members)), ", ".join(f"{n} {s}" for s, n in v.counts.items()), clock(v.created_at))
            for v in found
        ]
        header = ("ID", "NAME", "JOBS", "STATES", "CREATED")
        listing(as_json, {"groups": [view.to_dict() for view in found]}, header, rows)

    @command.command("status", help="Show each job of the group: its values, its state and its newest metrics.")
    @argument
    @click.option("--metric", "wanted", multiple=True, metavar="NAME", help="Show this measurement. May be repeated.")
    @refresh_option
    @json_option
    def status(group: str, wanted: tuple[str, ...], refresh: bool, as_json: bool) -> None:
        client = open_client()
        view = client.group(group, kinds=(kind,))
        if refresh and (ids := [member.job.id for member in view.members]):
            ask_clusters(client, ids)
        view = client.group(view.id, metrics=True)
        if as_json:
            echo_json(view.to_dict())
            return
        measured = {member.job.id: member.metrics for member in view.members}
        echo(_summary(view))
        names = wanted or [name for name in _METRICS if any(name in values for values in measured.values())]
        echo(_members(view, view.members, [(name, {j: v.get(name) for j, v in measured.items()}) for name in names]))

    @command.command("best", help="Show the jobs of the group in the order of a metric, the best first.")
    @argument
    @click.option("--metric", default="loss", show_default=True, metavar="NAME", help="Measurement to order by.")
    @click.option("--max", "largest", is_flag=True, help="The largest value is the best. [default: the smallest]")
    @click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Largest number of lines.")
    @json_option
    def best(group: str, metric: str, largest: bool, limit: int, as_json: bool) -> None:
        from orc.launchers.spec.problems import choose

        view = open_client().group(group, kinds=(kind,), metrics=True)
        measured = {member.job.id: member.metrics for member in view.members}
        found = [member for member in view.members if metric in measured[member.job.id]]
        if not found:
            names = list(dict.fromkeys(name for values in measured.values() for name in values))
            hint = f"{metric!r} was measured by none of them" + (choose(metric, names) if names else "; nothing was")
            raise LaunchError(hint, where=view.id, hint="metrics are what orc.runtime measures: `orc metrics JOB`")
        found.sort(key=lambda member: measured[member.job.id][metric], reverse=largest)
        found = found[:limit]
        echo_result(
            as_json,
            {"id": view.id, "metric": metric, "members": [member.to_dict() for member in found]},
            _members(view, found, [(metric, {m.job.id: measured[m.job.id].get(metric) for m in found})]),
        )

    @command.command("cancel", help="Stop all jobs of the group that have not ended.")
    @argument
    @json_option
    def cancel(group: str, as_json: bool) -> None:
        client = open_client()
        with waiting("telling the clusters to stop the jobs"):
            view = client.cancel_group(client.group(group, kinds=(kind,)).id)
        _report(view, as_json=as_json)

    @command.command("retry", help="Submit the unsuccessful jobs of the group once more; successful jobs stay.")
    @argument
    @json_option
    def retry(group: str, as_json: bool) -> None:
        retry_group(open_client().group(group, kinds=(kind,)).id, as_json=as_json)

    return command


def retry_group(group_id: str, *, as_json: bool) -> int:
    """Submit the members that ended without success once more, and return the exit status."""
    with waiting("handing the jobs to their clusters"):
        view = open_client().retry_group(group_id)
    _report(view, as_json=as_json)
    return 0


def _report(view: GroupView, *, as_json: bool) -> None:
    echo_result(as_json, view.to_dict(), _summary(view))


def _members(
    view: GroupView, members: Sequence[MemberView], columns: Sequence[tuple[str, dict[str, float | None]]]
) -> str:
    keys = view.keys
    staged = any(member.stage for member in members)
    header = ("STAGE" if staged else "INDEX", *keys, "STATE", *(name.upper() for name, _ in columns), "JOB", "REASON")
    rows = []
    for member in members:
        job = member.job
        values = (values.get(job.id) for _, values in columns)
        rows.append(
            (
                member.stage or str(member.index),
                *(member.parameters.get(key, "-") for key in keys),
                state(job.state),
                *("-" if value is None else f"{value:.4g}" for value in values),
                job.id,
                job.reason,
            )
        )
    return table(header, rows)


sweep = group_command("sweep", "Jobs of one file with different values of some keys.")
array = group_command("array", "Jobs of one file that differ in a number.")
pipeline = group_command("pipeline", "Jobs of one file that wait for each other and pass files on.")
