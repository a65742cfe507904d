"""Files and directories that are on disk when we say so: every system call, its order, and what is left after each."""

import ctypes
import errno
import os
import re
import stat

import pytest

from orc.runtime.checkpoint.storage import durable
from orc.runtime.checkpoint.storage.durable import (
    Checksum,
    FileRecord,
    Hashing,
    HashingFile,
    exchange,
    keep_entries,
    publish,
    remove_tree,
    replaced_name,
    sync_directory,
    temporary_name,
    write_file,
)


def total(data):
    found = Checksum()
    found.update(memoryview(data))
    return found.value()


class Memory(Hashing):
    """Takes at most *most* bytes at a time, and fails once it holds *room*."""

    chunk = 256

    def __init__(self, most=10**9, room=10**9):
        super().__init__()
        self.most, self.room, self.pieces, self.ends = most, room, [], []

    def _put(self, data):
        if sum(map(len, self.pieces)) >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.pieces.append(bytes(data[: self.most]))
        return len(self.pieces[-1])

    def _finish(self):
        self.ends.append("finished")

    def _drop(self):
        self.ends.append("dropped")


DATA = os.urandom(3000)


@pytest.mark.parametrize("size", [0, 1, 3000])
@pytest.mark.parametrize("most", [10**9, 7])
def test_a_record_has_size_and_sum_of_what_was_written(size, most):
    file = Memory(most)
    assert file.write(DATA[:size]) == size
    assert file.size == size
    assert file.flush() is None
    assert file.close() == FileRecord(size, total(DATA[:size]))
    assert b"".join(file.pieces) == DATA[:size]
    assert file.ends == ["finished"]


def test_no_piece_is_larger_than_a_chunk():
    file = Memory()
    assert file.write(DATA[:300]) == 300
    assert file.write(DATA[300:1100]) == 800
    assert file.write(memoryview(DATA[1100:1104]).cast("I")) == 4
    assert [len(piece) for piece in file.pieces] == [256, 44, 256, 256, 256, 32, 4]
    assert file.size == 1104
    assert file.close() == FileRecord(1104, total(DATA[:1104]))
    assert durable.Hashing.chunk == 256 * 1024


def test_the_reason_of_a_failed_write_comes_back_when_the_file_is_abandoned():
    file = Memory(room=512)
    with pytest.raises(OSError, match="No space left") as failed:
        file.write(DATA)
    assert file.size == 0
    with pytest.raises(OSError, match="No space left") as again:
        file.abandon()
    assert again.value is failed.value
    fine = Memory()
    fine.write(DATA)
    fine.abandon()
    assert (file.ends, fine.ends) == (["dropped"], ["dropped"])


class Calls:
    """The system calls of a test, in order, with the names instead of descriptors; one of them can be made to fail."""

    def __init__(self, monkeypatch):
        self.log, self.names, self.fails = [], {}, None
        self.flags = {}
        for name in ("open", "fsync", "close", "write", "rename", "link", "unlink"):
            monkeypatch.setattr(os, name, self._spy(name, getattr(os, name)))

    def _spy(self, name, real):
        def call(*arguments, **options):
            first = arguments[0]
            base = self.names.get(first) if isinstance(first, int) else os.path.basename(first)
            if base is None or options.get("dir_fd") is not None:  # somebody else's
                return real(*arguments, **options)
            self.log.append(f"{name} {base}")
            if self.log[-1] == self.fails:
                raise OSError(errno.EIO, "Input/output error")
            result = real(*arguments, **options)
            if name == "open":
                self.names[result] = base
                self.flags[base] = arguments[1]
            elif name == "close":
                del self.names[first]
            return result

        return call


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def test_a_file_is_new_written_synced_and_closed(tmp_path, calls):
    mask = os.umask(0)
    try:
        record = write_file(tmp_path / "a", b"content")
    finally:
        os.umask(mask)
    assert calls.log == ["open a", "write a", "fsync a", "close a"]
    assert calls.flags == {"a": os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644
    assert record == FileRecord(7, total(b"content"))
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"other")
    assert (tmp_path / "a").read_bytes() == b"content"


def test_the_disk_begins_with_each_part_while_the_next_is_written(tmp_path, monkeypatch):
    begun, real = [], durable.begin_sync
    monkeypatch.setattr(durable, "_BEGIN", 1000)
    monkeypatch.setattr(durable, "begin_sync", lambda fd, *part: begun.append(part) or real(fd, *part))
    monkeypatch.setattr(Hashing, "chunk", 500)
    record = write_file(tmp_path / "a", DATA)
    assert begun == [(0, 1000), (1000, 1000), (2000, 1000)]
    assert (tmp_path / "a").read_bytes() == DATA
    assert record == FileRecord(len(DATA), total(DATA))


def test_where_the_disk_cannot_be_told_to_begin_a_file_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_BEGIN", 1000)
    monkeypatch.setattr(Hashing, "chunk", 500)
    asked = []

    class Library:
        def sync_file_range(self, fd, start, size, flags):
            asked.append((start.value, size.value, flags.value))
            return -1

    for library in (Library(), object()):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, found=library: found)
        path = tmp_path / str(len(asked))
        assert write_file(path, DATA) == FileRecord(len(DATA), total(DATA))
        assert path.read_bytes() == DATA
    assert asked == [(0, 1000, 2), (1000, 1000, 2), (2000, 1000, 2)]


def test_a_file_that_cannot_be_written_is_closed(tmp_path, calls):
    calls.fails = "write a"
    with pytest.raises(OSError, match="Input/output error"):
        write_file(tmp_path / "a", b"content")
    assert calls.log == ["open a", "write a", "close a"]


def test_an_interrupted_file_is_closed_without_being_synced(tmp_path, calls):
    file = HashingFile(tmp_path / "a")
    file.write(b"content")
    file.abandon()
    assert calls.log == ["open a", "write a", "close a"]


def test_the_names_in_a_directory_are_synced(tmp_path, calls):
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_bytes(b"")
    sync_directory(tmp_path / "d")
    assert calls.log == ["open d", "fsync d", "close d"]
    assert calls.flags == {"d": os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC}
    with pytest.raises(NotADirectoryError):
        sync_directory(tmp_path / "f")
    calls.fails = "fsync d"
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path / "d")
    assert calls.log[-1] == "close d"


def libc(monkeypatch, result, number=0):
    """A C library whose renameat2 gives *result* and sets errno to *number*; what it is called with."""
    asked = []

    class Library:
        def __init__(self, *arguments, **options):
            asked.append((arguments, options))

        def renameat2(self, *arguments):
            asked.append(arguments)
            ctypes.set_errno(number)
            return result

    monkeypatch.setattr(ctypes, "CDLL", Library)
    return asked


def test_two_names_are_swapped_by_one_call(monkeypatch, tmp_path):
    asked = libc(monkeypatch, 0)
    assert exchange(tmp_path / "é", tmp_path / "b") is True
    loaded, (one_at, one, other_at, other, how) = asked
    assert loaded == ((None,), {"use_errno": True})
    assert (one_at, one, other_at, other) == (-100, f"{tmp_path}/é".encode(), -100, f"{tmp_path}/b".encode())
    assert (type(how), how.value) == (ctypes.c_uint, 2)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM])
def test_a_file_system_that_cannot_swap_says_so(monkeypatch, tmp_path, number):
    libc(monkeypatch, -1, number)
    assert exchange(tmp_path / "a", tmp_path / "b") is False


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EACCES])
def test_a_swap_that_fails_names_both(monkeypatch, tmp_path, number):
    libc(monkeypatch, -1, number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as failed:
        exchange(tmp_path / "a", tmp_path / "b")
    error = failed.value
    assert (error.errno, error.strerror) == (number, os.strerror(number))
    assert (error.filename, error.filename2) == (f"{tmp_path}/a", f"{tmp_path}/b")


def test_a_c_library_without_the_call_cannot_swap(monkeypatch, tmp_path):
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: object())
    assert exchange(tmp_path / "a", tmp_path / "b") is False


def folder(path, content):
    path.mkdir()
    (path / "file").write_text(content)


def there(directory):
    """The directories below *directory*, with what their file holds."""
    return {path.name: (path / "file").read_text() for path in sorted(directory.iterdir())}


def trace(monkeypatch, calls, swaps):
    """Have exchange and the removal of trees in the log of *calls*, too; whether the file system *swaps* names."""
    remove = durable.remove_tree

    def removed(path):
        if path.exists():
            calls.log.append(f"remove {path.name}")
        remove(path)

    def exchanged(one, other):
        calls.log.append(f"exchange {one.name} {other.name}")
        if swaps:
            middle = one.with_name("middle")
            for source, target in ((one, middle), (other, one), (middle, other)):
                source.rename(target)
                calls.log.pop()
        return swaps

    monkeypatch.setattr(durable, "remove_tree", removed)
    monkeypatch.setattr(durable, "exchange", exchanged)


def steps(calls):
    """The log without the closing of directories."""
    return [one for one in calls.log if not one.startswith(("open", "close"))]


def test_a_first_checkpoint_gets_its_name_after_its_content_is_on_disk(tmp_path, calls, monkeypatch):
    trace(monkeypatch, calls, True)
    folder(tmp_path / "c.tmp", "new")
    publish(tmp_path / "c.tmp", tmp_path / "c")
    assert there(tmp_path) == {"c": "new"}
    assert steps(calls) == ["fsync c.tmp", "rename c.tmp", f"fsync {tmp_path.name}"]


ASIDE = ["remove c.replaced", "rename c", "rename c.tmp"]  # the old one waits under another name


@pytest.mark.parametrize("swaps", [True, False])
def test_a_checkpoint_takes_the_place_of_another_in_one_step_where_names_can_be_swapped(
    tmp_path, calls, monkeypatch, swaps
):
    trace(monkeypatch, calls, swaps)
    folder(tmp_path / "c", "old")
    folder(tmp_path / "c.tmp", "new")
    folder(tmp_path / "c.replaced", "oldest")
    publish(tmp_path / "c.tmp", tmp_path / "c")
    assert there(tmp_path) == {"c": "new"}
    before, after = ([], ["remove c.tmp"]) if swaps else (ASIDE, [])
    swapped = ["fsync c.tmp", "exchange c.tmp c", *before, f"fsync {tmp_path.name}"]
    assert steps(calls) == [*swapped, *after, "remove c.replaced"]


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        ("fsync c.tmp", {"c": "old", "c.tmp": "new"}),
        ("rename c", {"c": "old", "c.tmp": "new"}),
        ("rename c.tmp", {"c.replaced": "old", "c.tmp": "new"}),
        ("fsync PARENT", {"c": "new", "c.replaced": "old"}),
    ],
)
def test_a_step_that_fails_leaves_a_whole_checkpoint(tmp_path, calls, monkeypatch, fails, left):
    trace(monkeypatch, calls, False)
    folder(tmp_path / "c", "old")
    folder(tmp_path / "c.tmp", "new")
    calls.fails = fails.replace("PARENT", tmp_path.name)
    with pytest.raises(OSError, match="Input/output error"):
        publish(tmp_path / "c.tmp", tmp_path / "c")
    assert there(tmp_path) == left


def test_what_an_interrupted_replacement_left_goes_with_the_next(tmp_path):
    folder(tmp_path / "c.replaced", "old")
    folder(tmp_path / "c.tmp", "new")
    publish(tmp_path / "c.tmp", tmp_path / "c")
    assert there(tmp_path) == {"c": "new"}


def test_the_other_names_of_a_directory_are_beside_it(tmp_path):
    assert temporary_name(tmp_path / "c.1") == tmp_path / "c.1.tmp"
    assert temporary_name(tmp_path / "c.1", "site-3") == tmp_path / "c.1.site-3.tmp"
    assert replaced_name(tmp_path / "c.1") == tmp_path / "c.1.replaced"


def test_whatever_has_a_name_is_removed_and_what_a_link_names_is_not(tmp_path):
    kept = tmp_path / "kept"
    folder(kept, "mine")
    folder(tmp_path / "d", "x")
    (tmp_path / "f").touch()
    (tmp_path / "to folder").symlink_to(kept)
    (tmp_path / "to file").symlink_to(kept / "file")
    (tmp_path / "to nothing").symlink_to(tmp_path / "nothing")
    for name in ("d", "f", "to folder", "to file", "to nothing", "not there"):
        remove_tree(tmp_path / name)
    assert there(tmp_path) == {"kept": "mine"}


def same(one, other):
    return os.path.samestat(one.lstat(), other.lstat())


def foreign(source):
    """A directory of several kinds of entries."""
    folder(source, "1")
    folder(source / "logs", "2")
    (source / "logs" / "link").symlink_to("file")
    (source / "logs" / "lost").symlink_to("nowhere")
    (source / "logs" / "up").symlink_to("..")
    (source / "to nothing").symlink_to("nowhere")
    (source / "to logs").symlink_to("logs")


def test_foreign_entries_get_a_second_name(tmp_path):
    source, target = tmp_path / "old", tmp_path / "new"
    foreign(source)
    (source / "ours").touch()
    folder(target, "newer")
    keep_entries(source, target, {"file", "logs", "to nothing", "to logs"})
    assert sorted(os.listdir(target)) == ["file", "logs", "to logs", "to nothing"]
    assert (target / "file").read_text() == "newer"
    assert same(target / "logs" / "file", source / "logs" / "file")
    links = {name: os.readlink(target / "logs" / name) for name in ("link", "lost", "up")}
    assert links == {"link": "file", "lost": "nowhere", "up": ".."}
    assert os.readlink(target / "to nothing") == "nowhere"
    assert os.readlink(target / "to logs") == "logs"
    assert same(target / "to logs", source / "to logs")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV])
def test_foreign_entries_are_copied_where_there_are_no_second_names(tmp_path, monkeypatch, number):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    source, target = tmp_path / "old", tmp_path / "new"
    foreign(source)
    os.utime(source / "file", (5, 5))
    target.mkdir()
    keep_entries(source, target, {"file", "logs", "to nothing", "to logs"})
    assert (target / "file").read_text() == "1"
    assert (target / "file").stat().st_mtime == 5
    assert not same(target / "file", source / "file")
    assert (target / "logs" / "file").read_text() == "2"
    assert os.readlink(target / "to nothing") == "nowhere"
    assert os.readlink(target / "to logs") == "logs"


def test_foreign_entries_that_cannot_be_kept_are_an_error(tmp_path, calls):
    source, target = tmp_path / "old", tmp_path / "new"
    foreign(source)
    target.mkdir()
    calls.fails = "link file"
    for name in ("file", "logs"):
        with pytest.raises(OSError, match="Input/output error"):
            keep_entries(source, target, {name})
    assert sorted(os.listdir(target)) == ["logs"]
