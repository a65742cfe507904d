"""Room on the ledger's disk, and who holds its file."""

from __future__ import annotations

import errno
import os
import re
import stat
from types import SimpleNamespace

import pytest

from orc.orchestrator.ledger import database
from orc.orchestrator.ledger.database import holders, pids

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def disk(monkeypatch):
    """What the disk says of itself: blocks of 1 KiB free for all and for the owner, and its flags."""
    said = SimpleNamespace(f_bavail=1 << 20, f_bfree=1 << 20, f_frsize=KIB, f_flag=0, f_blocks=1 << 21, asked=[])
    monkeypatch.setattr(os, "statvfs", lambda path: said.asked.append(path) or said)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return said


@pytest.fixture
def file(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"x")
    return tmp_path / "ledger.db"


@pytest.mark.parametrize(("free", "why"), [(256, ""), (255, "its disk is full")])
def test_a_disk_is_full_without_room_for_the_changes_of_one_command(disk, file, free, why):
    disk.f_bavail = free
    assert database.unwritable(file) == why
    assert set(disk.asked) == {file.parent}


def test_what_is_kept_for_the_superuser_counts_for_the_superuser(disk, file, monkeypatch):
    disk.f_bavail = 0
    assert database.unwritable(file) == "its disk is full"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert database.unwritable(file) == ""


def test_a_file_system_of_unknown_size_has_room(disk, file):
    disk.f_bavail = disk.f_blocks = 0
    assert database.unwritable(file) == ""
    database.keep_reserve(file)
    assert file.with_name("ledger.db.reserve").exists()


def test_a_read_only_file_system_is_told_before_anything_is_given_up(disk, file):
    database.keep_reserve(file)
    disk.f_flag, disk.f_bavail = os.ST_RDONLY | os.ST_NOSUID, 0
    assert database.unwritable(file) == "its file system is read-only"
    assert file.with_name("ledger.db.reserve").exists()
    disk.f_flag = os.ST_NOSUID
    assert database.unwritable(file) == "its disk is full"


def test_the_reserve_is_given_up_only_where_there_is_no_room(disk, file, monkeypatch):
    database.keep_reserve(file)
    kept = file.with_name("ledger.db.reserve")
    disk.f_bavail = 256
    assert database.unwritable(file) == ""
    assert kept.exists()
    room = SimpleNamespace(f_bavail=256, f_bfree=256, f_frsize=KIB, f_flag=0, f_blocks=1 << 21)
    full = SimpleNamespace(f_bavail=0, f_bfree=0, f_frsize=KIB, f_flag=0, f_blocks=1 << 21)
    monkeypatch.setattr(os, "statvfs", lambda path: full if kept.exists() else room)
    assert database.unwritable(file) == "", "what was given up is enough"
    assert not kept.exists()


@pytest.mark.parametrize("refused", ["ledger.db", "directory"])
def test_a_file_of_somebody_else_may_not_be_written(disk, file, monkeypatch, refused):
    shut = file if refused == "ledger.db" else file.parent
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK and path != shut)
    assert database.unwritable(file) == "you may not write it"
    file.unlink()
    assert database.unwritable(file) == "", "what does not exist is made first"


def test_a_directory_that_is_not_there_shows_when_it_is_opened(tmp_path):
    assert database.unwritable(tmp_path / "missing" / "ledger.db") == ""
    database.keep_reserve(tmp_path / "missing" / "ledger.db")


@pytest.mark.parametrize(("free", "kept"), [(64 * KIB, True), (64 * KIB - 1, False)])
def test_space_is_kept_back_only_where_there_is_plenty(disk, file, free, kept):
    disk.f_bavail = free
    database.keep_reserve(file)
    assert file.with_name("ledger.db.reserve").exists() == kept
    assert set(disk.asked) == {file.parent}


def test_the_reserve_is_private_cannot_be_compressed_and_is_made_once(disk, file, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments) or real(*arguments))
    kept = file.with_name("ledger.db.reserve")
    before = len(os.listdir("/proc/self/fd"))
    database.keep_reserve(file)
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"
    content = kept.read_bytes()
    assert (len(content), len(set(content))) == (MIB, 256)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    assert opened == [(kept, flags, 0o600)], "new, and nothing that this process starts inherits it"
    database.keep_reserve(file)
    assert kept.read_bytes() == content


@pytest.fixture
def quota(file, monkeypatch):
    """What is opened and written; writing fails with the next of *errors*."""
    found = SimpleNamespace(opened=[], written=[], errors=[])
    real_open, real_write = os.open, os.write

    def write(descriptor, content):
        found.written.append(content)
        if found.errors:
            raise found.errors.pop(0)
        return real_write(descriptor, content)

    monkeypatch.setattr(os, "open", lambda *arguments: found.opened.append(arguments) or real_open(*arguments))
    monkeypatch.setattr(os, "write", write)
    return found


def test_a_small_private_file_is_tried_that_leaves_nothing_behind(disk, file, quota):
    before = len(os.listdir("/proc/self/fd"))
    assert database.unwritable(file) == ""
    assert len(os.listdir("/proc/self/fd")) == before
    ((trial, flags, mode),) = quota.opened
    assert (flags, mode) == (os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    assert trial.parent == file.parent
    assert re.fullmatch(rf"\.ledger\.db\.{os.getpid()}\.[0-9a-f]{{8}}", trial.name)
    assert quota.written == [bytes(64 * KIB)]
    assert list(file.parent.iterdir()) == [file]


def test_where_a_quota_is_used_up_the_reserve_is_given_up_before_that_is_told(disk, file, quota):
    database.keep_reserve(file)
    kept = file.with_name("ledger.db.reserve")
    quota.errors = [OSError(errno.EDQUOT, "Disk quota exceeded")]
    assert database.unwritable(file) == "", "what was given up is enough"
    assert not kept.exists()
    quota.errors = [OSError(errno.EDQUOT, "Disk quota exceeded")] * 2
    assert database.unwritable(file) == "nothing can be written beside it: Disk quota exceeded"
    quota.errors = [OSError("odd")] * 2
    assert database.unwritable(file) == "nothing can be written beside it: odd"
    assert list(file.parent.iterdir()) == [file]


# -- holders


TABLE = """\
1: POSIX  ADVISORY  WRITE 41 08:01:131 120 120
2: POSIX  ADVISORY  READ  42 08:01:131 124 124
3: POSIX  ADVISORY  WRITE 43 08:01:1310 0 EOF
4: POSIX  ADVISORY  WRITE -1 08:01:131 0 EOF
5: POSIX  ADVISORY  WRITE 0 08:01:131 0 EOF
6: -> POSIX  ADVISORY  WRITE 44 08:01:131 0 EOF

7: too few WRITE 45
8: POSIX ADVISORY WRITE 1 08:01:132
9: OFDLCK ADVISORY  WRITE 41 08:01:132 0 EOF
"""


def test_holders_are_those_who_hold_a_lock_for_writing_in_the_order_of_the_table():
    assert pids(TABLE, [131]) == [41]
    assert pids(TABLE, [132, 131]) == [41, 1, 41]
    assert pids(TABLE, []) == []


def test_holders_of_the_file_and_of_its_shared_memory_are_named_once(file, tmp_path):
    (tmp_path / "ledger.db-shm").write_bytes(b"")
    main, shared = (path.stat().st_ino for path in (file, tmp_path / "ledger.db-shm"))
    gone = 2**22 + 1  # no process has this number
    table = "".join(
        f"{number}: POSIX ADVISORY WRITE {pid} 08:01:{inode} 0 EOF\n"
        for number, (pid, inode) in enumerate([(gone, shared), (os.getpid(), main), (os.getpid(), shared), (7, 1)])
    )
    locks = tmp_path / "locks"
    locks.write_text(table)
    with open("/proc/self/comm") as comm:
        me = f"process {os.getpid()} ({comm.read().strip()})"
    assert holders(file, locks) == [f"process {gone}", me]
    file.unlink()
    assert holders(file, locks) == [f"process {gone}", me], "the shared memory alone"
    (tmp_path / "ledger.db-shm").unlink()
    assert holders(file, locks) == []


def test_nobody_is_named_where_the_locks_cannot_be_read(file, tmp_path):
    assert holders(file, tmp_path / "nothing") == []


def test_a_name_that_is_no_text_is_shown_all_the_same(file, tmp_path, monkeypatch):
    real = type(file).read_text

    def read_text(path, encoding=None, errors=None):
        if str(path) == "/proc/7/comm":
            return b"n\xff\n".decode(encoding, errors)
        return real(path, encoding, errors)

    monkeypatch.setattr(type(file), "read_text", read_text)
    (tmp_path / "locks").write_text(f"1: POSIX ADVISORY WRITE 7 08:01:{file.stat().st_ino} 0 EOF\n")
    assert holders(file, tmp_path / "locks") == ["process 7 (n\N{REPLACEMENT CHARACTER})"]
