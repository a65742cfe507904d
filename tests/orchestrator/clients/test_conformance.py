"""The same assertions against a ledger and against a service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from served_ledger import Served, requests_of

from orc.launchers.attempts.records import LogSelector
from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.spec import LoadedJob
from orc.launchers.spec.groups import LoadedGroup, load_jobs
from orc.orchestrator import Client, JobNotFound, JobsClient
from orc.orchestrator.clients.errors import GroupNotFound
from orc.orchestrator.views import GroupView

Project = Callable[..., LoadedJob]


@pytest.fixture(params=["ledger", "service"])
def client(request: pytest.FixtureRequest, orc_home, monkeypatch) -> Iterator[JobsClient]:
    with ExitStack() as stack:
        if request.param == "ledger":
            yield stack.enter_context(Client(reconciler=False))
        else:
            served: Served = request.getfixturevalue("served")
            made = stack.enter_context(served.client())
            made.log_interval_s = 0.05
            yield made


def test_a_job_lives_alike(client: JobsClient, project: Project) -> None:
    stages: list[str] = []
    made = client.submit(
        project("print('hello', flush=True)\nprint('bye')\n", tags={"team": "a"}),
        on_progress=lambda s, _: stages.append(s),
    )
    assert {"size", "scan", "submit"} <= set(stages)
    seen: list[str] = []
    (done,) = client.wait([made.id], timeout_s=120, on_change=lambda view: seen.append(view.state))
    assert (done.id, done.state, seen[-1], len(done.attempts)) == (made.id, "SUCCEEDED", "SUCCEEDED", 1)
    assert done.attempts[0].exit is not None
    assert client.job(made.id) == done
    assert client.resolve(made.id[:-1]) == made.id
    rows = client.jobs(name="digits", tags={"team": "a"}, states=["SUCCEEDED"], limit=None)
    assert made.id in [row.id for row in rows]
    kinds = [event.kind for event in client.events(made.id)]
    assert kinds[0] == "queued"
    assert kinds[-1] == "job_succeeded"
    rank = LogSelector(rank=0)
    assert rank in client.log_selectors(made.id)
    assert b"".join(chunk.data for chunk in client.read_log(made.id, rank)) == b"hello\nbye\n"
    assert b"".join(chunk.data for chunk in client.read_log(made.id, rank, offset=6)) == b"bye\n"
    assert client.set_tags(made.id, {"team": None, "best": "yes"}).tags == {"best": "yes"}


def test_a_running_job_is_followed_and_cancelled_alike(client: JobsClient, project: Project) -> None:
    script = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
    made = client.submit(project(script))
    data = b""
    for chunk in client.follow_log(made.id, LogSelector(rank=0)):
        data += chunk.data
        if data == b"ready\n":
            client.cancel([made.id], grace_s=0)
    assert data.startswith(b"ready\n")
    (done,) = client.wait([made.id], timeout_s=120)
    assert done.state == "CANCELLED"
    (again,) = client.cancel([made.id])
    assert again.state == "CANCELLED"


def test_a_clone_with_changes_is_made_alike(client: JobsClient, project: Project) -> None:
    made = client.submit(project("import os\nprint(os.environ['LR'])\n", env={"LR": "1"}))
    clone = client.resubmit(made.id, overrides=["env.LR=2", "tags.of=clone"])
    assert (clone.source, clone.spec["env"], clone.tags) == (f"job:{made.id}", {"LR": "2"}, {"of": "clone"})
    client.wait([made.id, clone.id], timeout_s=120)
    assert b"".join(chunk.data for chunk in client.read_log(clone.id, LogSelector(rank=0))) == b"2\n"
    with pytest.raises(SpecError, match="nods"):
        client.resubmit(made.id, overrides=["resources.nods=2"])
    with pytest.raises(SpecError, match="workdir"):
        client.resubmit(made.id, overrides=["workdir.path=elsewhere"])


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.job("nobody-aaaaaa"),
        lambda client: client.events("nobody-aaaaaa"),
        lambda client: client.cancel(["nobody-aaaaaa"]),
        lambda client: client.resubmit("nobody-aaaaaa"),
        lambda client: client.wait(["nobody-aaaaaa"]),
        lambda client: client.log_selectors("nobody-aaaaaa"),
        lambda client: client.set_tags("nobody-aaaaaa", {"a": "b"}),
        lambda client: client.resolve("nobody-aaaaaa"),
        lambda client: client.resolve("../../etc"),
    ],
    ids=["job", "events", "cancel", "resubmit", "wait", "logs", "tags", "resolve", "hostile"],
)
def test_a_job_that_is_not_there_is_the_same_error(client: JobsClient, ask) -> None:
    with pytest.raises(JobNotFound, match="no such job"):
        ask(client)


def test_what_is_meant_by_a_part_of_an_id_takes_one_request(served: Served, project: Project) -> None:
    with served.client() as client:
        made = client.submit(project())
        asked = requests_of(client)
        assert [client.resolve(ref) for ref in (made.id, made.id[:-1], "@last")] == [made.id] * 3
        with pytest.raises(JobNotFound, match="no such job"):
            client.resolve("x" * 60)
        assert asked == ["GET /resolve"] * 4


@pytest.fixture
def group_file(project: Project) -> Callable[[str], LoadedGroup]:
    """Writes a file with several jobs of one directory, and loads it."""

    def write(text: str, script: str = "print('hello', flush=True)\n") -> LoadedGroup:
        file = project(script).base_dir / "group.yaml"
        file.write_text(text)
        loaded = load_jobs(file)
        assert isinstance(loaded, LoadedGroup)
        return loaded

    return write


def ended(client: JobsClient, group: GroupView) -> GroupView:
    client.wait([member.job.id for member in group.members], timeout_s=120)
    return client.group(group.id, metrics=True)


SWEEP = "{name: tuned, script: train.py, launcher: python, secrets: [API_KEY], sweep: {grid: {env.LR: [1, 2]}}}"
# The second member fails the first time.
MEASURES = """
import json, os
rate = os.environ["LR"]
assert os.environ["API_KEY"] == "s3cret"
with open(os.environ["ORC_JOB_DIR"] + "/metrics.jsonl", "w") as file:
    print(json.dumps({"at": 1.0, "step": 1, "loss": float(rate), "attempt": 1}), file=file)
raise SystemExit(int(rate) - 1)
"""


def test_a_sweep_lives_alike(client: JobsClient, group_file: Callable[..., LoadedGroup], monkeypatch) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    made = client.submit_group(group_file(SWEEP, MEASURES))
    assert [(m.index, m.stage, m.parameters, m.submissions) for m in made.members] == [
        (0, None, {"env.LR": "1"}, 1),
        (1, None, {"env.LR": "2"}, 1),
    ]
    done = ended(client, made)
    assert done.counts == {"SUCCEEDED": 1, "FAILED": 1}
    assert [member.metrics["loss"] for member in done.members] == [1.0, 2.0]
    for ref in (made.id, made.id[:-1], made.members[1].job.id, "@last"):
        assert client.group(ref, kinds=("sweep",)).id == made.id
    assert made.id in [group.id for group in client.groups(kinds=("sweep",), limit=5)]
    assert made.id not in [group.id for group in client.groups(kinds=("array",))]
    again = client.retry_group(made.id)
    assert [(member.submissions, member.job.owner) for member in again.members] == [
        (1, made.members[0].job.owner),
        (2, made.owner),
    ]
    assert again.members[0].job == done.members[0].job
    assert ended(client, again).counts == {"SUCCEEDED": 1, "FAILED": 1}
    with pytest.raises(LaunchError, match="no such sweep"):
        client.group("nobody-aaaaaa", kinds=("sweep",))
    for change in (client.cancel_group, client.retry_group):
        with pytest.raises(GroupNotFound, match="no such group"):
            change("nobody-aaaaaa")


PIPELINE = """
name: chain
launcher: python
jobs:
  first: {script: train.py, outputs: {model: model.txt}}
  second: {command: 'test "$(cat $ORC_INPUT_MODEL)" = weights', inputs: {model: first.model}}
"""


def test_a_pipeline_passes_files_on_alike(client: JobsClient, group_file: Callable[..., LoadedGroup]) -> None:
    script = "import os\nopen(os.environ['ORC_OUTPUT_MODEL'], 'w').write('weights')\n"
    made = client.submit_group(group_file(PIPELINE, script))
    assert [member.stage for member in made.members] == ["first", "second"]
    first, second = (client.job(member.job.id) for member in made.members)
    assert second.spec["inputs"] == {"model": f"{first.id}.model"}
    done = ended(client, made)
    assert done.counts == {"SUCCEEDED": 2}, [member.job.reason for member in done.members]
    with pytest.raises(LaunchError, match="no member of chain"):
        client.retry_group(made.id)


def test_a_group_is_cancelled_alike(client: JobsClient, group_file: Callable[..., LoadedGroup]) -> None:
    text = "{name: long, script: train.py, launcher: python, array: 2, max_parallel: 1}"
    made = client.submit_group(group_file(text, "import time\ntime.sleep(600)\n"))
    assert (made.kind, made.max_parallel) == ("array", 1)
    client.cancel_group(made.id, grace_s=0)
    assert ended(client, made).counts == {"CANCELLED": 2}


def test_a_group_is_submitted_whole_or_not_at_all(
    client: JobsClient, group_file: Callable[..., LoadedGroup], monkeypatch
) -> None:
    before = [group.id for group in client.groups()]
    with pytest.raises(SpecError, match="unknown cluster 'nowhere'"):
        client.submit_group(group_file(PIPELINE.replace("second: {", "second: {cluster: nowhere, ")))
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(SpecError, match="the secret API_KEY has no value"):
        client.submit_group(group_file(SWEEP))
    assert [group.id for group in client.groups()] == before


def test_a_schedule_is_kept_alike(client: JobsClient, project: Project) -> None:
    made = client.create_schedule(project(), "0 3 * * mon-fri", timezone="Europe/Berlin", missed="run_once")
    assert (made.name, made.timezone, made.missed, made.overlap) == ("digits", "Europe/Berlin", "run_once", "skip")
    assert made.enabled
    assert made.next_at is not None
    assert client.schedules() == [made]
    with pytest.raises(SpecError, match="there is a schedule 'digits' already"):
        client.create_schedule(project(), "0 4 * * *")
    paused = client.enable_schedule(made.id, enabled=False)
    assert (paused.enabled, paused.next_at) == (False, None)
    assert client.enable_schedule(made.id, enabled=True).enabled
    client.delete_schedule(made.id)
    assert client.schedules() == []
    for wrong in ("0 3 * *", "0 0 31 2 *"):
        with pytest.raises(SpecError, match="no cron expression"):
            client.create_schedule(project(), wrong)
    with pytest.raises(SpecError, match="no sweep or array"):
        client.create_schedule(project(array="2"), "0 3 * * *")


def test_what_cannot_run_is_refused_with_the_same_words(client: JobsClient, project: Project) -> None:
    with pytest.raises(SpecError, match="unknown cluster 'nowhere'"):
        client.submit(project(cluster="nowhere"))
    with pytest.raises(LaunchError, match="have no queue of their own"):
        client.queue("local")
    with pytest.raises(SpecError, match="the secret MISSING_SECRET has no value"):
        client.submit(project(secrets=["MISSING_SECRET"]))


def test_reports_over_jobs_are_made_alike(client: JobsClient, project: Project) -> None:
    hook = "https://hooks.example.invalid/token"
    one, two = (client.submit(project(env={"LR": lr}, notify=[hook])) for lr in ("1", "2"))
    client.wait([one.id, two.id], timeout_s=120)
    (told,) = client.notifications(job_id=one.id, states=("due", "dead"))
    assert (told.job, told.event) == (one.id, "success")
    assert "token" not in told.target
    assert client.retry_notifications(one.id) == 0
    found = client.diff(one.id, two.id)
    assert found["environment"] == [{"key": "env.LR", "a": "1", "b": "2"}]
    assert [side["state"] for side in found["outcome"]] == ["SUCCEEDED", "SUCCEEDED"]
    costs = client.costs(by="job", job_ids=[one.id, two.id])
    assert {group["key"] for group in costs["groups"]} == {one.id, two.id}
    assert costs["total"]["cost"] is None
    with pytest.raises(LaunchError, match="month"):
        client.costs(by="month")


def test_a_service_takes_no_job_that_would_send_a_secret_of_its_own_somewhere(served: Served, project: Project) -> None:
    with served.client() as client:
        for to in ("slack:${secret:HOME}", "http://example.org/"):
            with pytest.raises(LaunchError, match=r"secrets|https"):
                client.submit(project(notify=[to]))
