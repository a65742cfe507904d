"""Measurements and their curves: read on from where the last look ended, bounded, and true."""

from __future__ import annotations

import json
import random

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Handle, Phase
from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.api.insight import read_metrics
from orc.orchestrator.insight import metrics
from orc.orchestrator.insight.metrics import (
    MOST_CURVES,
    MOST_POINTS,
    Curve,
    Curves,
    MeasuredJobs,
    Position,
    Reader,
    course,
    latest_ranks,
    line_of,
    names,
    new_lines,
    series,
)


def line(step, *, attempt=1, restart=0, **values):
    return {"at": 1e6 * attempt + step, "attempt": attempt, "restart": restart, "step": step, **values}


def text(*lines):
    return "".join(json.dumps(one) + "\n" for one in lines)


def steps(lines):
    return [found["step"] for found in lines]


def test_a_training_that_went_on_from_an_earlier_step_is_told_once():
    lines = [line(10), line(20), line(30), line(25, attempt=2), line(35, attempt=2), line(30, attempt=2, restart=1)]
    assert [(found["attempt"], found["restart"], found["step"]) for found in course(lines)] == [
        (1, 0, 10),
        (1, 0, 20),
        (2, 0, 25),
        (2, 1, 30),
    ]


def test_a_training_that_began_anew_forgets_what_was_before():
    assert steps(course([line(10), line(20), line(5, attempt=2)])) == [5]


def test_measurements_are_numbers_and_not_the_place():
    lines = [line(1, loss=0.5, ranks=[0, 1], mfu=None, ok=True), line(2, grad_norm=1)]
    assert names(lines) == ["loss", "grad_norm"]
    assert series(lines, "loss") == [(1.0, 0.5)]


def test_lines_that_are_no_objects_are_left_out():
    texts = [b'{"step": 1}', b"rubbish", b"", b"[1]", b'{"a": {"b": 1}, "ranks": [0, {}]}', b'{"\\ud800": "\\ud800"}']
    assert [line_of(text) for text in texts] == [
        {"step": 1},
        None,
        None,
        None,
        {"a": None, "ranks": [0, None]},
        {"?": "?"},
    ]


def test_a_curve_of_few_measurements_has_them_all():
    curve = Curve()
    points = [(float(step), float(-step)) for step in range(MOST_POINTS)]
    for point in points:
        curve.add(*point)
    assert curve.points(MOST_POINTS) == points
    assert curve.points(2) == [points[0], points[MOST_POINTS // 2], points[-1]]


@pytest.mark.parametrize("count", [1, MOST_POINTS, MOST_POINTS + 1, 2 * MOST_POINTS + 3, 100_003])
def test_a_curve_of_many_measurements_is_bounded_and_knows_the_last_and_the_range(count):
    curve, values = Curve(), random.Random(1)
    numbers = [values.random() for _ in range(count)]
    for step, number in enumerate(numbers):
        curve.add(step, number)
    assert len(curve) <= MOST_POINTS + 1
    assert curve.summary() == {"last": numbers[-1], "step": count - 1, "min": min(numbers), "max": max(numbers)}
    shown = curve.points(MOST_POINTS + 1)
    assert shown[-1] == (count - 1, numbers[-1])
    assert all(numbers[int(step)] == value for step, value in shown)


@pytest.mark.parametrize("seed", range(20))
def test_curves_are_those_of_the_training_as_it_counts(seed):
    chance = random.Random(seed)
    lines, step = [], 0
    for attempt in range(1, 6):
        step = chance.randint(0, step)
        for _ in range(chance.randint(1, 30)):
            step += chance.randint(1, 3)
            lines.append(line(step, attempt=attempt, loss=chance.random()))
    curves = Curves()
    for one in lines:
        curves.add(one)
    assert curves.points(10_000) == {"loss": series(course(lines), "loss")}


def test_a_job_has_a_bounded_number_of_curves():
    curves = Curves()
    curves.add(line(1, **{f"m{number}": 1 for number in range(3 * MOST_CURVES)}))
    assert len(curves.by_name) == MOST_CURVES


@pytest.fixture
def backend(tmp_path):
    return FakeBackend(tmp_path / "fake", hosts={"n1": 1, "n2": 1})


@pytest.fixture
def job(client, job_file):
    return client.submit(job_file(retry={"max_attempts": 2, "on": ["node_failure"], "backoff": 0}))


@pytest.fixture
def write(backend, job):
    """Appends text to the file that rank 0 of the job writes on a host."""

    def write(host, text):
        path = backend.root / "files" / f"orc-{job.id}-{host}" / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    return write


@pytest.fixture
def lose_the_first_host(client, backend, job):
    """The first attempt of the job ends with its host; the second one runs on another."""

    def lose():
        backend.set(job.attempt.marker, Phase.LOST, failed_hosts=["n1"])
        client.refresh()
        client.refresh()

    return lose


@pytest.fixture
def down(backend, monkeypatch):
    """Hosts that do not answer who reads a file there."""
    read_file, silent = backend.read_file, set()

    def read(handle, name, offset=0, limit=None):
        if handle.hosts[0] in silent:
            raise BackendUnreachable("no answer", where=handle.hosts[0])
        return read_file(handle, name, offset, limit)

    monkeypatch.setattr(backend, "read_file", read)
    return silent


@pytest.fixture
def reads(backend, monkeypatch):
    """(offset, bytes) of all that was read."""
    found = []
    read_file = backend.read_file

    def read(handle, name, offset=0, limit=None):
        data = read_file(handle, name, offset, limit)
        found.append((offset, len(data)))
        assert limit == metrics.SLICE
        return data

    monkeypatch.setattr(backend, "read_file", read)
    return found


def test_reading_goes_on_where_it_stopped_and_leaves_half_a_line(client, job, write):
    reader = Reader(client.workspace, job.id)
    assert reader.read() == []
    write("n1", text(line(1)) + json.dumps(line(2))[:10])
    assert steps(reader.read()) == [1]
    assert reader.read() == []
    write("n1", json.dumps(line(2))[10:] + "\n")
    assert steps(reader.read()) == [2]


def test_attempts_on_other_hosts_have_left_a_file_each(client, job, write, lose_the_first_host):
    write("n1", text(line(1), line(2)))
    lose_the_first_host()
    assert client.job(job.id).attempt.hosts == ("n2",)
    write("n2", text(line(2, attempt=2)))
    reader = Reader(client.workspace, job.id)
    assert [(found["attempt"], found["step"]) for found in reader.read()] == [(1, 1), (1, 2), (2, 2)]


def test_a_host_that_is_gone_does_not_hide_what_the_others_have(client, job, write, down, lose_the_first_host):
    lose_the_first_host()
    write("n1", text(line(1)))
    write("n2", text(line(2, attempt=2)))
    down.add("n1")
    reader = Reader(client.workspace, job.id)
    assert steps(reader.read()) == [2]
    assert list(reader.unreachable) == ["n1"]
    down.clear()
    assert steps(reader.read()) == [1]
    assert reader.unreachable == {}
    down.update(("n1", "n2"))
    with pytest.raises(BackendUnreachable):
        reader.read()


def test_ranks_are_those_of_the_attempt_and_what_a_program_has_spoilt_is_left_out(backend):
    handle = Handle("local", "fake", "orc-a-aaaaaa-a2", "1")
    path = backend.root / "files" / "orc-a-aaaaaa" / "ranks.json"
    path.parent.mkdir(parents=True)
    given = {"0": {"step": 3, "step_s": "fast", "data_wait": True}, "-1": {"step": 1}, "x": {}, "1": [], "2": {}}
    path.write_text(json.dumps({"at": 5, "attempt": 2, "ranks": given}))
    assert latest_ranks(backend, handle, 2) == (5.0, {0: {"step": 3.0}, 2: {}})
    assert latest_ranks(backend, handle, 3) == (None, {})
    for spoilt in ("[" * 100_000, '{"attempt": 2, "ranks": [1]}', '{"attempt": NaN}', ""):
        path.write_text(spoilt)
        assert latest_ranks(backend, handle, 2) == (None, {})


def look(client, jobs, job, seconds=60.0):
    return jobs.of(job.id).update(client.workspace, job.id, lambda curves: curves.points(100), seconds)


def test_a_look_reads_what_is_new_in_slices(client, job, write, reads, monkeypatch):
    monkeypatch.setattr(metrics, "SLICE", 200)
    jobs = MeasuredJobs()
    lines = [line(step, loss=step / 2) for step in range(20)]
    write("n1", text(*lines[:10]))
    assert len(look(client, jobs, job)["loss"]) == 10
    assert max(size for _, size in reads) == 200
    first = len(text(*lines[:10]))
    reads.clear()
    write("n1", text(*lines[10:]))
    assert look(client, jobs, job) == {"loss": [(step, step / 2) for step in range(20)]}
    assert min(offset for offset, _ in reads) == first


def test_a_look_ends_in_time_and_the_next_goes_on(client, job, write, reads, monkeypatch):
    monkeypatch.setattr(metrics, "SLICE", 200)
    jobs = MeasuredJobs()
    write("n1", text(*[line(step, loss=1) for step in range(20)]))
    seen = []
    while not seen or not jobs.of(job.id).complete:
        seen.append(len(look(client, jobs, job, 0.0)["loss"]))
    assert seen == sorted(seen)
    assert len(seen) > 5
    assert seen[-1] == 20


def test_a_file_without_a_line_is_passed_over_in_time(client, job, write, reads, monkeypatch):
    monkeypatch.setattr(metrics, "SLICE", 200)
    write("n1", "x" * 1000 + "\n" + text(line(1, loss=1)))
    position = Position()
    assert list(new_lines(client.workspace, job.id, position, 0.0)) == []
    assert not position.complete
    assert len(reads) == 1
    while not position.complete:
        lines = list(new_lines(client.workspace, job.id, position, 0.0))
    assert [one["step"] for one in lines] == [1]


def test_what_a_host_was_silent_about_takes_its_place(client, job, write, down, lose_the_first_host):
    lose_the_first_host()
    write("n1", text(line(1, loss=1), line(2, loss=2)))
    write("n2", text(line(2, attempt=2, loss=3)))
    down.add("n1")
    jobs = MeasuredJobs()
    assert look(client, jobs, job) == {"loss": [(2, 3)]}
    assert list(jobs.of(job.id).unreachable) == ["n1"]
    assert look(client, jobs, job) == {"loss": [(2, 3)]}
    down.clear()
    assert look(client, jobs, job) == {"loss": [(1, 1), (2, 3)]}
    down.update(("n1", "n2"))
    with pytest.raises(BackendUnreachable):
        look(client, jobs, job)


def test_the_jobs_that_were_looked_at_last_are_remembered(monkeypatch):
    jobs = MeasuredJobs()
    monkeypatch.setattr("orc.orchestrator.insight.metrics._KEPT_POINTS", 3 * MOST_POINTS)
    first = jobs.of("a")
    for name in "bcde":
        jobs.of(name)
    assert jobs.of("a") is not first
    assert jobs.of("e") is jobs.of("e")


@pytest.mark.parametrize("given", ["", "0", "12.0.5"])
def test_a_position_is_a_text(given):
    assert Position.from_text(given).to_text() == given


@pytest.mark.parametrize("given", ["x", "-1", "1.", "9" * 19, "\u0661", "1." * 5000 + "1"])
def test_what_is_no_position_is_refused(given):
    with pytest.raises(ValueError, match="no such position"):
        Position.from_text(given)


def test_curves_know_when_each_step_was_and_where_each_attempt_went_on():
    curves = Curves()
    for one in (line(10, loss=1), line(20, loss=1), line(30, loss=1), line(20, attempt=2, loss=1), line(5, attempt=3)):
        curves.add(one)
    assert curves.times.points(9) == [(5, 3e6 + 5)]
    assert curves.begins == [(5, 3)]
    curves.add(line(8, attempt=4, loss=1))
    assert curves.begins == [(5, 3), (8, 4)]


def test_the_lowest_value_is_told_also_where_it_lies_between_the_points(client, job, write):
    write("n1", text(*[line(step, loss=0.1 if step == 7 else 1.0) for step in range(20)]))
    answer = read_metrics(client.session, job.id, points=2)
    assert (answer.lowest, len(answer.series["loss"])) == ({"loss": 0.1}, 3)
