"""Commands of groups (`orc sweep`, `orc array`, `orc pipeline`) and of `orc schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.cli.invocation import (
    ask_clusters,
    check_job,
    check_jobs,
    cluster_option,
    job_file_argument,
    json_option,
    open_client,
    refresh_option,
    set_option,
    yes_option,
)
from orc.orchestrator.cli.ui.display import submission_progress, waiting
from orc.orchestrator.cli.ui.output import cells, clock, echo, echo_json, echo_result, listing, of_states, state, table

if TYPE_CHECKING:
    from orc.launchers.spec.groups import LoadedGroup, Member
    from orc.orchestrator.clients.surface import JobsClient
    from orc.orchestrator.views import GroupView, MemberView, ScheduleView


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
    members = [(member, member.loaded.spec) for member in loaded.members]
    if as_json:
        found = [
            {
                "index": m.number,
                "stage": m.stage or None,
                "parameters": dict(m.parameters),
                "job": spec.model_dump(mode="json"),
            }
            for m, spec in members
        ]
        echo_json({"kind": loaded.kind, "name": loaded.name, "max_parallel": loaded.max_parallel, "members": found})
        return
    limit = f", {loaded.max_parallel} at a time" if loaded.max_parallel else ""
    echo(f"# {loaded.kind} {loaded.name}: {len(members)} jobs{limit}; --member INDEX shows the plan of one")
    if loaded.kind == "pipeline":
        header = ["STAGE", "NAME", "CLUSTER", "AFTER"]
        after = [", ".join([*spec.depends_on, *spec.inputs.values()]) or "-" for _, spec in members]
        rows = [[m.stage, spec.name, spec.cluster, what] for (m, spec), what in zip(members, after, strict=True)]
    else:
        keys = list(dict.fromkeys(key for m, _ in members for key in m.parameters))
        header = ["INDEX", "NAME", *keys]
        rows = [[str(m.number), spec.name, *(m.parameters.get(key, "-") for key in keys)] for m, spec in members]
    echo(table(header, rows))


def chosen_member(loaded: LoadedGroup, which: str) -> Member:
    """Return the member with this index or stage. Raises `SpecError`."""
    from orc.launchers.spec.problems import choose

    named = {m.stage or str(m.number): m for m in loaded.members}
    if which not in named:
        raise SpecError(f"no member {which!r}{choose(which, list(named)[:20])}", where="--member")
    return named[which]


def _counts(view: GroupView) -> str:
    return ", ".join(f"{count} {state}" for state, count in view.counts.items())


def _summary(view: GroupView) -> str:
    limit = f", {view.max_parallel} at a time" if view.max_parallel else ""
    return f"{view.kind} {view.id}: {len(view.members)} jobs{limit}; {_counts(view)}"


def _measured(view: GroupView) -> list[str]:
    """Return the names of what any member has measured."""
    return list(dict.fromkeys(name for member in view.members for name in member.metrics))


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
        job_file: str, cluster: str | None, overrides: tuple[str, ...], max_parallel: int | None, **how: bool
    ) -> int:
        from orc.launchers.spec.groups import LoadedGroup

        limit = () if max_parallel is None else (f"max_parallel={max_parallel}",)
        loaded = check_jobs(job_file, (*overrides, *limit), cluster)
        if not isinstance(loaded, LoadedGroup) or loaded.kind != kind:
            found = loaded.kind if isinstance(loaded, LoadedGroup) else "single job"
            raise SpecError(f"describes a {found}, not a {kind}", where=job_file, hint="`orc submit` takes all of them")
        return submit_group(loaded, reconciler=True, **how)

    @command.command("list", help=f"List the newest groups of this kind: {kind}.")
    @click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of lines.")
    @json_option
    def list_(limit: int, as_json: bool) -> None:
        found = open_client().groups(kinds=(kind,), limit=limit)
        rows = [[v.id, v.name, str(sum(v.counts.values())), _counts(v), clock(v.created_at)] for v in found]
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
        echo(_summary(view))
        echo(_members(view, view.members, wanted or [name for name in _METRICS if name in _measured(view)]))

    @command.command("best", help="Show the jobs of the group in the order of a metric, the best first.")
    @argument
    @click.option("--metric", default="loss", show_default=True, metavar="NAME", help="Measurement to order by.")
    @click.option("--max", "largest", is_flag=True, help="The largest value is the best. [default: the smallest]")
    @click.option("--limit", type=click.IntRange(1), default=5, show_default=True, help="Largest number of lines.")
    @json_option
    def best(group: str, metric: str, largest: bool, limit: int, as_json: bool) -> None:
        from orc.launchers.spec.problems import choose

        view = open_client().group(group, kinds=(kind,), metrics=True)
        found = [member for member in view.members if metric in member.metrics]
        if not found:
            names = _measured(view)
            what = f"{metric!r} was measured by none of them" + (choose(metric, names) if names else "; nothing was")
            raise LaunchError(what, where=view.id, hint="metrics are what orc.runtime measures: `orc metrics JOB`")
        found = sorted(found, key=lambda member: member.metrics[metric], reverse=largest)[:limit]
        document = {"id": view.id, "metric": metric, "members": [member.to_dict() for member in found]}
        echo_result(as_json, document, _members(view, found, [metric]))

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


def _members(view: GroupView, members: Sequence[MemberView], metrics: Sequence[str]) -> str:
    keys = view.keys
    staged = any(member.stage for member in members)
    header = ("STAGE" if staged else "INDEX", *keys, "STATE", *(name.upper() for name in metrics), "JOB", "REASON")
    rows = []
    for member in members:
        parameters = [member.parameters.get(key, "-") for key in keys]
        values = [f"{member.metrics[name]:.4g}" if name in member.metrics else "-" for name in metrics]
        job = member.job
        rows.append([member.stage or str(member.index), *parameters, state(job.state), *values, job.id, job.reason])
    return table(header, rows)


sweep_command = group_command("sweep", "Jobs of one file with different values of some keys.")
array_command = group_command("array", "Jobs of one file that differ in a number.")
pipeline_command = group_command("pipeline", "Jobs of one file that wait for each other and pass files on.")


schedule_argument = click.argument("schedule", metavar="SCHEDULE")


@click.group("schedule")
def schedule_command() -> None:
    """Submit a job again and again, by the clock."""


@schedule_command.command("create")
@click.argument("cron", metavar="CRON")
@job_file_argument
@cluster_option
@set_option
@click.option("--name", help="Name of the schedule. [default: the job's name]")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="An IANA name.")
@click.option(
    "--missed", type=click.Choice(["skip", "run_once"]), default="skip", show_default=True,
    help="After times at which nothing of orc ran: submit nothing, or one job for all of them.",
)  # fmt: skip
@click.option(
    "--overlap", type=click.Choice(["allow", "skip"]), default="skip", show_default=True,
    help="If the last job has not ended at a time: skip the time, or submit another job.",
)  # fmt: skip
@yes_option
@json_option
def create_schedule_command(
    cron: str,
    job_file: str,
    cluster: str | None,
    overrides: tuple[str, ...],
    name: str | None,
    yes: bool,
    as_json: bool,
    **when: str,
) -> None:
    """Submit the job in JOB.yaml (./job.yaml unless given) whenever CRON is due: five fields, like '0 3 * * mon-fri'.

    The schedule keeps the snapshot of now. Later changes of the code need another schedule.
    """
    from orc.orchestrator.engine.cron import check

    check(cron, when["timezone"])
    loaded = check_job(job_file, overrides, cluster)
    with submission_progress(silent=as_json, yes=yes) as on_progress:
        view = open_client().create_schedule(loaded, cron, name=name or "", on_progress=on_progress, **when)
    _report_schedule(view, as_json=as_json)


@schedule_command.command("list")
@json_option
def list_schedules_command(as_json: bool) -> None:
    """List the schedules: when each is due next, and its last job."""
    found = open_client().schedules()
    rows = [[*cells(v, "id name cron timezone"), _next(v), *cells(v, "missed overlap last_job")] for v in found]
    header = ("ID", "NAME", "CRON", "TIME ZONE", "NEXT", "MISSED", "OVERLAP", "LAST JOB")
    listing(as_json, {"schedules": [view.to_dict() for view in found]}, header, rows)


@schedule_command.command("pause")
@schedule_argument
@json_option
def pause_command(schedule: str, as_json: bool) -> None:
    """Submit nothing until the schedule is resumed; running jobs go on."""
    _change(schedule, enabled=False, as_json=as_json)


@schedule_command.command("resume")
@schedule_argument
@json_option
def resume_command(schedule: str, as_json: bool) -> None:
    """Go on with a paused schedule; times in the pause stay skipped."""
    _change(schedule, enabled=True, as_json=as_json)


@schedule_command.command("delete")
@schedule_argument
@json_option
def delete_command(schedule: str, as_json: bool) -> None:
    """Delete a schedule; its jobs stay, and running jobs go on."""
    client, schedule_id = _chosen(schedule)
    client.delete_schedule(schedule_id)
    echo_result(as_json, {"deleted": schedule_id}, f"deleted {schedule_id}")


def _chosen(schedule: str) -> tuple[JobsClient, str]:
    """Return the client, and the id of the schedule that is meant. Raises `LaunchError`."""
    from orc.orchestrator.engine.schedules import chosen

    client = open_client()
    return client, chosen(client.schedules(), schedule).id


def _change(schedule: str, *, enabled: bool, as_json: bool) -> None:
    client, schedule_id = _chosen(schedule)
    _report_schedule(client.enable_schedule(schedule_id, enabled=enabled), as_json=as_json)


def _report_schedule(view: ScheduleView, *, as_json: bool) -> None:
    if as_json:
        echo_json(view.to_dict())
    else:
        echo(view.id)
        echo(f"next: {_next(view)}", err=True)


def _next(view: ScheduleView) -> str:
    from orc.orchestrator.engine.cron import shown

    if not view.enabled:
        return "paused"
    return shown(view.next_at, view.timezone) if view.next_at is not None else "-"
