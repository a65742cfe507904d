"""The hold of a run on its folder: who gets it, what it says, what others leave and what goes with it."""

import errno
import fcntl
import json
import os
import socket
import stat
import time

import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state import ownership
from orc.runtime.checkpoint.state.ownership import FILE, Owner, Ownership, disown, forget_dead, own, release_all

HERE = socket.gethostname()
OTHER = {"run": "other", "host": "node7", "pid": 12, "job": "job tides", "since": 0.0}
TEXT = "job tides, process 12 on node7, since 1970-01-01 00:00:00 UTC"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process that holds nothing, in no job, whose clock goes on only while it sleeps."""
    held = {}
    monkeypatch.setattr(ownership, "_held", held)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    yield held
    monkeypatch.setattr(ownership, "_held", held)
    release_all()


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def taken(folder, **changes):
    """A record of somebody else, without a lock."""
    (folder / FILE).write_text(json.dumps(OTHER | changes))
    return folder / FILE


class Lock:
    """Somebody else's lock on a file."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)


NO_JOB = {"job": "", "job_id": "", "attempt": 0, "restart": 0}
JOB = ("ORC_JOB_ID", "ORC_JOB_NAME", "ORC_ATTEMPT", "ORC_RESTART")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, {}),
        ({"ORC_JOB_ID": "j1"}, {"job": "job j1", "job_id": "j1"}),
        ({"ORC_JOB_ID": "j1", "ORC_JOB_NAME": "vowels"}, {"job": "job vowels", "job_id": "j1"}),
        ({"ORC_JOB_NAME": "vowels", "ORC_ATTEMPT": "2"}, {"job": "job vowels attempt 2", "attempt": 2}),
    ],
)
def test_the_record_says_who_has_the_folder(tmp_path, monkeypatch, environment, said):
    monkeypatch.setattr(time, "time", lambda: 86400.5)
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    owned = own(tmp_path, "-part")
    assert owned.path == tmp_path / f"{FILE}-part"
    record = json.loads(owned.path.read_text())
    me = {"run": ownership._RUN, "host": HERE, "pid": os.getpid(), "since": 86400.5}
    assert record == me | NO_JOB | said
    disown(owned)
    assert os.listdir(tmp_path) == []
    assert not is_open(owned.fd)


def test_only_a_later_run_of_the_same_job_succeeds_another():
    def turn(job_id, attempt, restart):
        return Owner(**OTHER, job_id=job_id, attempt=attempt, restart=restart)

    first = turn("j1", 2, 1)
    assert turn("j1", 3, 0).succeeds(first)
    assert turn("j1", 2, 2).succeeds(first)
    for other in (first, turn("j1", 2, 0), turn("j1", 1, 5), turn("j2", 3, 0), turn("", 3, 0)):
        assert not other.succeeds(first)
    assert not turn("", 3, 0).succeeds(turn("", 2, 0)), "outside of a job"


def test_what_an_earlier_attempt_removes_meanwhile_need_not_be_removed(tmp_path, monkeypatch):
    real = Owner.succeeds

    def succeeds(self, other):
        path.unlink()
        return real(self, other)

    monkeypatch.setenv("ORC_JOB_ID", "j1")
    monkeypatch.setenv("ORC_ATTEMPT", "2")
    monkeypatch.setattr(Owner, "succeeds", succeeds)
    path = taken(tmp_path, job_id="j1", attempt=1)
    with Lock(path):
        owned = own(tmp_path)
    assert ownership._same(owned.fd, path)


def test_an_owner_is_described_and_known():
    assert str(Owner(**OTHER)) == TEXT
    assert str(Owner(**OTHER | {"job": "", "since": 1700000000.9})) == (
        "a run without a job, process 12 on node7, since 2023-11-14 22:13:20 UTC"
    )
    mine = OTHER | {"run": ownership._RUN, "pid": os.getpid()}
    assert Owner(**mine).is_here()
    assert not Owner(**mine | {"pid": 1}).is_here(), "it was forked from it"
    assert not Owner(**mine | {"run": "other"}).is_here()


def test_a_longer_record_is_overwritten_whole(tmp_path):
    path = taken(tmp_path, job="x" * 2000)
    mask = os.umask(0)
    try:
        assert own(tmp_path).path == path
        own(tmp_path, "-new")
    finally:
        os.umask(mask)
    assert json.loads(path.read_text())["run"] == ownership._RUN
    assert stat.S_IMODE((tmp_path / f"{FILE}-new").stat().st_mode) == 0o644


def test_a_folder_is_taken_once_and_again_when_it_was_made_anew(tmp_path, alone):
    first = own(tmp_path)
    assert own(tmp_path) is first
    assert alone == {first.path: first}
    first.path.unlink()
    second = own(tmp_path)
    assert second is not first
    assert alone == {first.path: second}
    assert not is_open(first.fd) or first.fd == second.fd
    assert ownership._same(second.fd, second.path)
    first.path.rename(tmp_path / "away")
    first.path.write_text(json.dumps(OTHER))
    third = own(tmp_path)
    assert json.loads(third.path.read_text())["run"] == ownership._RUN


def test_a_folder_that_somebody_else_took_is_told_at_the_next_save(tmp_path):
    owned = own(tmp_path)
    owned.check()
    taken(tmp_path)
    for act in (owned.check, lambda: own(tmp_path)):
        with pytest.raises(CheckpointError) as told:
            act()
        assert str(told.value) == (
            f"{tmp_path} was taken over by another run: {TEXT}. Only one run may save in a folder; give each its own"
        )
    owned.path.write_text("half a rec")
    owned.check()


def test_what_is_somebody_elses_by_now_stays_when_it_is_given_up(tmp_path):
    owned = own(tmp_path)
    taken(tmp_path)
    disown(owned)
    assert not is_open(owned.fd)
    assert (tmp_path / FILE).exists()
    disown(owned)  # once more is nothing
    assert own(tmp_path).path.exists()


def test_a_record_at_the_place_of_ours_is_not_ours(tmp_path):
    owned = own(tmp_path)
    content = owned.path.read_text()
    owned.path.rename(tmp_path / "away")
    owned.path.write_text(content)
    disown(owned)
    assert not is_open(owned.fd)
    assert sorted(os.listdir(tmp_path)) == [FILE, "away"]


def test_a_record_that_cannot_be_removed_is_no_error(tmp_path, monkeypatch):
    owned = own(tmp_path)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    disown(owned)
    assert not is_open(owned.fd)


def test_all_folders_are_given_up_at_the_end(tmp_path, alone):
    holds = [own(tmp_path, part) for part in ("", "-a", "-b")]
    release_all()
    assert alone == {}
    assert os.listdir(tmp_path) == []
    assert not any(is_open(one.fd) for one in holds)


def test_a_living_owner_is_not_waited_for(tmp_path):
    path = taken(tmp_path, host=HERE, pid=os.getpid())
    before = len(os.listdir("/proc/self/fd"))
    with Lock(path), pytest.raises(CheckpointError) as told:
        own(tmp_path)
    assert str(told.value) == (
        f"{tmp_path} is in use by another run: job tides, process {os.getpid()} on {HERE}, since 1970-01-01 00:00:00 "
        "UTC. Only one run may save in a folder; give each its own, or wait until that one has ended"
    )
    assert time.monotonic() == 100.0
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_owner_that_may_be_dead_is_waited_for_and_a_lock_without_a_record_too(tmp_path):
    for content, owner in ((json.dumps(OTHER), TEXT), ("", "it does not say which")):
        (tmp_path / FILE).write_text(content)
        start = time.monotonic()
        with Lock(tmp_path / FILE), pytest.raises(CheckpointError) as told:
            own(tmp_path)
        assert str(told.value).startswith(f"{tmp_path} is in use by another run: {owner}. Only one run may save")
        assert time.monotonic() - start == pytest.approx(15.0, abs=0.21)


def test_a_lock_is_taken_as_soon_as_it_is_free(tmp_path, monkeypatch):
    lock, waits = Lock(taken(tmp_path)), []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            os.close(lock.fd)

    monkeypatch.setattr(time, "sleep", sleep)
    before = len(os.listdir("/proc/self/fd"))
    owned = own(tmp_path)
    assert waits == [0.2] * 3
    assert len(os.listdir("/proc/self/fd")) == before, "one instead of the other's, and none from the waiting"
    assert is_open(owned.fd)


def test_a_lock_on_a_file_that_was_removed_meanwhile_counts_for_nothing(tmp_path, monkeypatch):
    real, locked = ownership._flock, []

    def flock(fd):
        if not locked:
            (tmp_path / FILE).unlink()
        locked.append(fd)
        return real(fd)

    monkeypatch.setattr(ownership, "_flock", flock)
    monkeypatch.setattr(ownership, "_lives", lambda owner: True)
    owned = own(tmp_path)
    assert len(locked) == 2
    assert ownership._same(owned.fd, owned.path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_locks_the_last_to_come_gets_the_folder(tmp_path, monkeypatch, number):
    asked = []

    def refuse(fd, how):
        asked.append(how)
        raise OSError(number, os.strerror(number))

    taken(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert json.loads(own(tmp_path).path.read_text())["run"] == ownership._RUN
    assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB]


def test_a_lock_that_fails_otherwise_is_an_error(tmp_path, monkeypatch):
    def fail(fd, how):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        own(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_whether_an_owner_lives_is_known_only_on_its_machine(monkeypatch):
    asked = []

    def kill(pid, number):
        asked.append((pid, number))
        if pid == 2:
            raise ProcessLookupError
        if pid == 3:
            raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert not ownership._lives(None)
    assert not ownership._lives(Owner(**OTHER))
    assert asked == []
    assert [ownership._lives(Owner(**OTHER | {"host": HERE, "pid": pid})) for pid in (1, 2, 3)] == [True, False, True]
    assert asked == [(1, 0), (2, 0), (3, 0)]


def test_a_file_is_the_same_only_as_itself(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    assert [ownership._same(fd, tmp_path / name) for name in "abc"] == [True, False, False]
    os.close(fd)
    assert not ownership._same(fd, tmp_path / "a")


def test_a_record_is_read_as_it_was_written_or_is_none(tmp_path):
    path = taken(tmp_path)
    assert ownership._read(path) == Owner("other", "node7", 12, "job tides", 0.0)
    path.write_text(json.dumps({"run": 1, "host": 2, "pid": "3", "job": 4, "since": "5"}))
    assert ownership._read(path) == Owner("1", "2", 3, "4", 5.0)
    path.write_text(json.dumps(OTHER | {"job_id": 6, "attempt": "7", "restart": "8"}))
    assert ownership._read(path) == Owner("other", "node7", 12, "job tides", 0.0, "6", 7, 8)
    for content in ("", "[]", "3", json.dumps(OTHER | {"pid": "x"}), json.dumps({"run": "a"}), "\xff"):
        path.write_text(content, encoding="latin-1")
        assert ownership._read(path) is None
    assert ownership._read(tmp_path / "none") is None


def test_what_dead_runs_of_this_machine_left_goes_and_nothing_else(tmp_path, monkeypatch, alone):
    monkeypatch.setattr(ownership, "_lives", lambda owner: owner.pid != 12)
    records = {
        "a-foreign": {"host": "node7"},
        "b-living": {"host": HERE, "pid": 1},
        "c-locked": {"host": HERE},
        "d-held": {"host": HERE},
        "e-dead": {"host": HERE},
        "f-dead": {"host": HERE},
    }
    for name, changes in records.items():
        (tmp_path / f"{FILE}-{name}").write_text(json.dumps(OTHER | changes))
    (tmp_path / f"{FILE}-none").touch()
    (tmp_path / "other").write_text(json.dumps(OTHER | {"host": HERE}))
    held = tmp_path / f"{FILE}-d-held"
    alone[held] = Ownership(held, os.open(held, os.O_RDONLY), tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with Lock(tmp_path / f"{FILE}-c-locked"):
        forget_dead(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    left = ["a-foreign", "b-living", "c-locked", "d-held", "none"]
    assert sorted(os.listdir(tmp_path)) == [*(f"{FILE}-{name}" for name in left), "other"]


def test_what_another_rank_has_removed_meanwhile_is_no_error(tmp_path, monkeypatch):
    path = taken(tmp_path, host=HERE)
    monkeypatch.setattr(ownership, "_lives", lambda owner: path.unlink())
    forget_dead(tmp_path)
    assert os.listdir(tmp_path) == []


def test_files_of_holds_are_not_inherited_by_programs(tmp_path, monkeypatch):
    real, flags = os.open, []

    def opened(path, how, *mode):
        flags.append(how)
        return real(path, how, *mode)

    monkeypatch.setattr(os, "open", opened)
    path = own(tmp_path, "-mine").path
    taken(tmp_path, host=HERE)
    monkeypatch.setattr(ownership, "_lives", lambda owner: False)
    forget_dead(tmp_path)
    assert flags == [os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, os.O_RDWR | os.O_CLOEXEC]
    assert path.exists()
