from __future__ import annotations

import json

import pytest
from fake_backend import FakeBackend

from orc.launchers.backends.base import Handle, Phase
from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.insight.metrics import Reader, course, latest_ranks, line_of, names, series


def line(step, *, attempt=1, restart=0, **values):
    return {"at": 100.0 * attempt + step, "attempt": attempt, "restart": restart, "step": step, **values}


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


def test_reading_goes_on_where_it_stopped_and_leaves_half_a_line(client, job, write):
    reader = Reader(client.workspace, job.id)
    assert reader.read() == []
    write("n1", json.dumps(line(1)) + "\n" + json.dumps(line(2))[:10])
    assert steps(reader.read()) == [1]
    assert reader.read() == []
    write("n1", json.dumps(line(2))[10:] + "\n")
    assert steps(reader.read()) == [2]


def test_attempts_on_other_hosts_have_left_a_file_each(client, backend, job, write):
    write("n1", json.dumps(line(1)) + "\n" + json.dumps(line(2)) + "\n")
    backend.set(job.attempt.marker, Phase.LOST, failed_hosts=["n1"])
    client.refresh()
    client.refresh()
    assert client.job(job.id).attempt.hosts == ("n2",)
    write("n2", json.dumps(line(2, attempt=2)) + "\n")
    reader = Reader(client.workspace, job.id)
    assert [(found["attempt"], found["step"]) for found in reader.read()] == [(1, 1), (1, 2), (2, 2)]


def test_a_host_that_is_gone_does_not_hide_what_the_others_have(client, backend, job, write, monkeypatch):
    backend.set(job.attempt.marker, Phase.LOST, failed_hosts=["n1"])
    client.refresh()
    client.refresh()
    write("n1", json.dumps(line(1)) + "\n")
    write("n2", json.dumps(line(2, attempt=2)) + "\n")
    read_file, down = backend.read_file, {"n1"}

    def read(handle, name, offset=0, limit=None):
        if handle.hosts[0] in down:
            raise BackendUnreachable("no answer", where=handle.hosts[0])
        return read_file(handle, name, offset, limit)

    monkeypatch.setattr(backend, "read_file", read)
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
