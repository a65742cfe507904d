"""The contract of transports, kept by this machine and by one that is reached over SSH alike."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orc.launchers.backends.ssh.hosts import open_transports
from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError, LinkLost
from orc.launchers.remote.ssh.transport import _MOST_FILES, SshTransport
from orc.launchers.remote.transport import CommandTimeout, LocalTransport, Transport, WholeFile


@dataclass
class There:
    """A machine, an empty directory on it, and where that directory can be seen from here."""

    transport: Transport
    directory: str
    seen: Path

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def shell(self, script: str, timeout_s: float = 60, **more):  # type: ignore[no-untyped-def]
        return self.transport.run(("/bin/sh", "-c", script), timeout_s=timeout_s, **more)


class ScriptsHere(SshTransport):
    """The file operations of `SshTransport`, by the shell of this machine."""

    def __init__(self, user: int | None = None) -> None:
        self.name, self.run, self.user = "here", LocalTransport().run, user

    def close(self) -> None:
        pass

    def _connected(self) -> tuple[Any, bool]:
        return SimpleNamespace(alive=False), False

    def _started(self, argv: Sequence[str], *_: object, **__: object) -> Any:
        return nullcontext(SimpleNamespace(gather=partial(self.gather, argv)))

    def gather(self, argv: Sequence[str], stdin: bytes, patient: bool) -> tuple[int, bytes, bytes]:
        env = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(argv, input=stdin, capture_output=True, env=env, check=False, user=self.user)
        return done.returncode, done.stdout, done.stderr


class FirstIsCutOff(ScriptsHere):
    """Loses its first link when half of the input is there; the command goes on when it gets the `rest`."""

    first: subprocess.Popen[bytes] | None = None

    def gather(self, argv: Sequence[str], stdin: bytes, patient: bool) -> tuple[int, bytes, bytes]:
        if self.first is not None:
            return super().gather(argv, stdin, patient)
        self.first = subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
        self.rest = stdin[len(stdin) // 2 :]
        assert self.first.stdin is not None
        self.first.stdin.write(stdin[: len(stdin) // 2])
        self.first.stdin.flush()
        raise LinkLost("the link is lost", where=self.name)


SSH = pytest.param("ssh", marks=pytest.mark.hosts)
AND_BY_SCRIPTS = pytest.mark.parametrize("there", ["local", "scripts", SSH], indirect=True)


@pytest.fixture(params=["local", SSH])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[There]:
    if request.param != "ssh":
        yield There(LocalTransport() if request.param == "local" else ScriptsHere(), str(tmp_path), tmp_path)
        return
    hosts = request.getfixturevalue("hosts")
    transport = open_transports(hosts.cluster(hosts=["node1"]))["node1"]
    transport.mkdir("/home/trainer/work")
    yield There(transport, "/home/trainer/work", hosts.home("node1") / "work")
    transport.close()


def mode(there: There, name: str) -> str:
    return there.shell(f"stat -c %a {there.path(name)}").stdout.strip()


def test_any_exit_status_is_an_answer(there: There) -> None:
    done = there.shell("echo out; echo err >&2; exit 3")
    assert (done.status, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_signal_is_a_negative_status(there: There) -> None:
    assert there.shell("kill -9 $$").status == -9


def test_standard_input_is_given_or_empty(there: There) -> None:
    assert there.transport.run(("cat",), timeout_s=60, stdin=b"words").stdout == "words"
    assert there.transport.run(("cat",), timeout_s=60, stdin=b"").stdout == ""
    assert there.transport.run(("cat",), timeout_s=60).stdout == ""


def test_megabytes_pass_through_a_command_in_both_directions(there: There) -> None:
    data = b"0123456789abcde\n" * 300_000
    done = there.transport.run(("cat",), timeout_s=60, stdin=data)
    assert done.stdout.encode() == data


def test_input_that_a_command_does_not_read_is_no_error(there: There) -> None:
    done = there.transport.run(("echo", "fine"), timeout_s=60, stdin=b"x" * 3_000_000)
    assert (done.status, done.stdout) == (0, "fine\n")


def test_a_command_may_go_on_after_it_closed_its_input(there: There) -> None:
    script = "exec 0<&-; sleep 0.3; echo fine; sleep 0.3"
    done = there.transport.run(("sh", "-c", script), timeout_s=60, stdin=b"x" * 3_000_000)
    assert (done.status, done.stdout) == (0, "fine\n")


def test_output_that_is_not_text_does_not_matter(there: There) -> None:
    assert there.transport.run(("printf", r"a\377b"), timeout_s=60).stdout == "a\ufffdb"


@pytest.mark.parametrize("word", ["a b", "", "$HOME", "`id`", "'\"", "a\nb", "!!", "*", "\\", "-n;", "ünïcode"])
def test_no_shell_ever_reads_an_argument(there: There, word: str) -> None:
    done = there.transport.run(("printf", "<%s>", word), timeout_s=60, env={"WORD": word})
    assert done.stdout == f"<{word}>"
    done = there.transport.run(("printenv", "WORD"), timeout_s=60, env={"WORD": word})
    assert done.stdout == f"{word}\n"


def test_variables_can_be_dropped_kept_and_set(there: There) -> None:
    script = (
        "import json, sys; from orc.launchers.remote.transport import LocalTransport as T; "
        "done = T().run(('env',), timeout_s=60, env={'B_NEW': 'new'}, drop_env=('A_', 'B_'), keep_env=('B_KEPT',)); "
        "print(done.stdout)"
    )
    if there.transport.name == "local":
        env = {"A_GONE": "x", "B_GONE": "y", "B_KEPT": "kept"}
        done = there.transport.run((sys.executable, "-c", script), timeout_s=30, env=env)
        seen = [line for line in done.stdout.splitlines() if line.startswith(("A_", "B_"))]
        assert sorted(seen) == ["B_KEPT=kept", "B_NEW=new"]
    else:
        keep = there.transport.run(("env",), timeout_s=60, env={"SSH_NEW": "1"}, drop_env=("SSH_",))
        assert [line for line in keep.stdout.splitlines() if line.startswith("SSH_")] == ["SSH_NEW=1"]
        keep = there.transport.run(("env",), timeout_s=60, drop_env=("SSH_",), keep_env=("SSH_CLIENT",))
        assert [line.split("=")[0] for line in keep.stdout.splitlines() if line.startswith("SSH_")] == ["SSH_CLIENT"]


def test_a_command_that_hangs_is_ended_with_its_children(there: There) -> None:
    with pytest.raises(CommandTimeout, match="sh did not answer within 6 s"):
        there.shell(f"sleep 300 & echo $! >{there.path('pid')}; wait", timeout_s=6)
    pid = there.transport.read(there.path("pid")).decode().strip()
    deadline = time.monotonic() + 60
    while there.shell(f"kill -0 {pid} && ! grep -q 'State:.Z' /proc/{pid}/status").status == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_that_stays_behind_does_not_hold_up_the_answer(there: There) -> None:
    said = there.path("said")
    script = f"setsid sh -c 'echo $$; touch {said}; exec sleep 300' & until test -e {said}; do sleep 0.05; done"
    done = there.shell(f"{script}; echo mine", timeout_s=100)
    pid, mine = done.stdout.split()
    assert mine == "mine"
    assert there.shell(f"kill {pid}").status == 0, "it runs on"


def test_a_program_that_does_not_exist_is_named(there: There) -> None:
    with pytest.raises(BackendError, match="no-such-program: command not found"):
        there.transport.run(("no-such-program",), timeout_s=60)
    with pytest.raises(BackendError, match="no-such-program: command not found"):
        there.transport.stream(("no-such-program",), timeout_s=60)


def test_a_program_that_cannot_be_executed_is_named(there: There) -> None:
    there.transport.write(there.path("text"), b"")
    with pytest.raises(BackendError, match="text could not be started: Permission denied"):
        there.transport.run((there.path("text"),), timeout_s=60)


def test_one_can_talk_to_a_program(there: There) -> None:
    with there.transport.stream(("cat",), timeout_s=60) as program:
        for word in (b"one", b"two"):
            program.write(word)
            assert program.read(100) == word
        program.close_stdin()
        assert program.read(100) == b""
        assert program.wait().status == 0


def test_what_a_program_says_is_read_in_pieces_and_the_rest_is_kept(there: There) -> None:
    with there.transport.stream(("/bin/sh", "-c", "echo 123456; echo no >&2; exit 4"), timeout_s=60) as program:
        assert program.read(3) == b"123"
        done = program.wait()
        assert (done.status, done.stdout, done.stderr) == (4, "456\n", "no\n")


def test_a_program_that_says_more_than_it_is_asked_for_does_not_block_its_input(there: There) -> None:
    data = b"0123456789abcdef" * 300_000
    with there.transport.stream(("cat",), timeout_s=60) as program:
        program.write(data)
        program.close_stdin()
        got = b""
        while part := program.read(1 << 20):
            got += part
        assert program.wait().status == 0
    assert got == data


def test_a_program_waits_when_nobody_reads(there: There) -> None:
    """Its output is not collected without end."""
    script = (
        f"import os\nfor n in range(400):\n os.write(1, b'x' * 65536)\n open({there.path('n')!r}, 'w').write(str(n))"
    )
    python = sys.executable if there.transport.name == "local" else "python3"
    with there.transport.stream((python, "-c", script), timeout_s=60) as program:
        deadline = time.monotonic() + 60
        before, now = "", there.transport.read_many([there.path("n")])
        while now != before or not now.get(there.path("n")):  # until it has come to a halt
            assert time.monotonic() < deadline
            time.sleep(0.2)
            before, now = now, there.transport.read_many([there.path("n")])  # type: ignore[assignment]
        assert int(now[there.path("n")]) < 200
        size = 0
        while part := program.read(1 << 20):
            size += len(part)
        assert size == 400 * 65536


def test_every_wait_for_a_program_has_a_limit(there: There) -> None:
    with there.transport.stream(("sleep", "60"), timeout_s=4) as program:
        with pytest.raises(CommandTimeout, match="sleep said nothing for 4 s"):
            program.read(1)
        with pytest.raises(CommandTimeout, match="sleep took no input for 4 s"):
            program.write(b"x" * 10_000_000)
        with pytest.raises(CommandTimeout, match="sleep did not end within 4 s"):
            program.wait()


def test_a_program_that_is_left_is_ended_with_its_children(there: There) -> None:
    with there.transport.stream(("/bin/sh", "-c", "sleep 60 & echo $$ $!; wait"), timeout_s=60) as program:
        pids = program.read(100).decode().split()
    deadline = time.monotonic() + 60
    for pid in pids:
        while there.shell(f"kill -0 {pid} && ! grep -q 'State:.Z' /proc/{pid}/status").status == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_writing_to_a_program_that_has_ended_fails(there: There) -> None:
    with there.transport.stream(("true",), timeout_s=60) as program:
        with pytest.raises(BackendUnreachable, match="true ended before it had read all of its input"):
            program.write(b"x" * 10_000_000)
        assert program.wait().status == 0


def test_many_threads_use_one_transport(there: There) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        there.transport.write(there.path(str(number)), b"x" * number * 10_000)
        size = len(there.transport.read(there.path(str(number))))
        found[number] = there.shell(f"sleep 0.2; echo {number} {size}").stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: f"{number} {number * 10_000}\n" for number in range(12)}


@AND_BY_SCRIPTS
def test_a_file_is_written_with_its_mode_and_private_parents(there: There) -> None:
    there.transport.write(there.path("a/b/secret"), b"one", mode=0o600)
    there.transport.write(there.path("a/b/secret"), b"two", mode=0o600)
    assert there.transport.read(there.path("a/b/secret")) == b"two"
    assert [mode(there, name) for name in ("a/b/secret", "a/b", "a")] == ["600", "700", "700"]
    assert there.transport.names(there.path("a/b")) == ["secret"]


@AND_BY_SCRIPTS
def test_a_reader_never_sees_half_a_file(there: There) -> None:
    there.transport.write(there.path("file"), b"a" * 300_000)
    before = (there.seen / "file").open("rb")
    there.transport.write(there.path("file"), b"b" * 300_000)
    with before:
        assert before.read() == b"a" * 300_000
    assert (there.seen / "file").read_bytes() == b"b" * 300_000


@AND_BY_SCRIPTS
def test_many_files_are_written_each_in_one_step(there: There) -> None:
    count = _MOST_FILES + 10
    there.transport.write(there.path("d/7"), b"before", mode=0o644)
    with (there.seen / "d" / "7").open("rb") as before:
        files = [WholeFile(there.path(f"d/{n}"), f"of {n}\n".encode(), 0o600) for n in range(count)]
        long = WholeFile(there.path(f"{'long/' * 40}it's *"), b"x" * 300_000, 0o755)
        for target in ("before", "d"):  # a link is replaced
            links = {there.path(f"links/{n}"): there.path(target) for n in range(2)}
            there.transport.write_many([*files, long], [there.path("e/logs"), there.path("d")], links)
        assert before.read() == b"before"
    assert (there.seen / "links/1").readlink() == Path(there.path("d"))
    assert mode(there, "links") == "700"
    read = there.transport.read_many([file.path for file in [*files, long]])
    assert read == {file.path: file.data for file in [*files, long]}
    assert [mode(there, name) for name in ("d", "d/7", "e", "e/logs", "long")] == ["700", "600", "700", "700", "700"]
    assert (there.seen / long.path.removeprefix(f"{there.directory}/")).stat().st_mode & 0o777 == 0o755
    assert sorted(there.transport.names(there.path("d"))) == sorted(str(n) for n in range(count))
    there.transport.write_many([])


def test_directories_and_links_are_made_a_thousand_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, commands = ScriptsHere(), 0

    def gather(argv: Sequence[str], stdin: bytes, patient: bool) -> tuple[int, bytes, bytes]:
        nonlocal commands
        commands += 1
        return ScriptsHere.gather(transport, argv, stdin, patient)

    monkeypatch.setattr(transport, "gather", gather)
    here = [str(tmp_path / str(number)) for number in range(1000)]
    transport.write_many([], here, {f"{here[0]}/link": here[1]})
    assert commands == 2
    assert len(list(tmp_path.iterdir())) == 1000
    assert (tmp_path / "0" / "link").readlink() == tmp_path / "1"


@AND_BY_SCRIPTS
def test_of_many_files_none_is_left_half_written(there: There) -> None:
    there.transport.write(there.path("file"), b"")
    files = [WholeFile(there.path(name), b"x") for name in ("before", "file/below", "after")]
    with pytest.raises(BackendError, match=r"cannot write .*: "):
        there.transport.write_many(files)
    assert [name for name in there.transport.names(there.directory) if name.endswith(".tmp")] == []


@pytest.mark.parametrize("many", [True, False])
def test_a_command_that_lost_its_link_and_its_repetition_do_not_meet(tmp_path: Path, many: bool) -> None:
    transport = FirstIsCutOff()
    files = [WholeFile(str(tmp_path / name), name.encode() * 200_000) for name in "ab"]
    if many:
        transport.write_many(files)
    else:
        transport.write(files[0].path, files[0].data)
    assert transport.first is not None
    transport.first.communicate(transport.rest, 60)
    assert transport.first.returncode == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        Path(file.path).name: file.data for file in files[: 2 if many else 1]
    }


def test_a_place_that_cannot_be_written_is_named(there: There) -> None:
    there.transport.write(there.path("file"), b"")
    with pytest.raises(BackendError, match=rf"cannot write {there.path('file/below')}: "):
        there.transport.write(there.path("file/below"), b"")
    with pytest.raises(BackendError, match=rf"cannot make {there.path('file/below')}: "):
        there.transport.mkdir(there.path("file/below"))
    with pytest.raises(BackendError, match=r"cannot remove .*: Is a directory"):
        there.transport.remove(there.directory)


@pytest.mark.parametrize("many", [False, True])
def test_a_full_disk_is_named_and_the_old_file_stays(small_disk: Path, many: bool) -> None:
    path, data, transport = str(small_disk / "file"), b"x" * 3_000_000, ScriptsHere()
    transport.write(path, b"before")
    with pytest.raises(BackendError, match=f"cannot write {path}.*: No space left on device") as error:
        transport.write_many([WholeFile(path, data)]) if many else transport.write(path, data)
    assert not isinstance(error.value, BackendUnreachable)
    assert "the disk is full" in error.value.hint
    assert (small_disk / "file").read_bytes() == b"before"
    assert transport.names(str(small_disk)) == ["file"]


def test_a_directory_of_somebody_else_is_named() -> None:
    nobody = ScriptsHere(user=65534 if os.geteuid() == 0 else None)
    with pytest.raises(BackendError, match="here: cannot write /etc/orc: Permission denied") as error:
        nobody.write("/etc/orc", b"")
    assert "check the permissions" in error.value.hint


def test_a_failure_that_no_error_number_stands_for_is_a_failure(there: There) -> None:
    there.transport.mkdir(there.path("full/inside"))
    with pytest.raises(LaunchError):
        there.transport.write(there.path("full"), b"x")


def test_a_directory_that_exists_is_left_as_it_is(there: There) -> None:
    there.transport.mkdir(there.path("d"), mode=0o755)
    there.transport.mkdir(there.path("d"), mode=0o700)
    assert mode(there, "d") == "755"


def test_files_are_read_by_range(there: There) -> None:
    there.transport.write(there.path("log"), b"0123456789")
    assert there.transport.read(there.path("log"), offset=3) == b"3456789"
    assert there.transport.read(there.path("log"), offset=3, limit=2) == b"34"
    assert there.transport.read(there.path("log"), offset=99) == b""
    assert there.transport.read(there.path("log"), limit=0) == b""
    with pytest.raises(FileNotFoundError, match="none"):
        there.transport.read(there.path("none"))
    with pytest.raises(OSError, match="Input/output error"):  # opens, and cannot be read at that place
        there.transport.read("/proc/self/mem", limit=10)


def test_large_files_are_written_and_read(there: There) -> None:
    data = os.urandom(5_000_000)
    there.transport.write(there.path("large"), data)
    assert there.transport.read(there.path("large")) == data


def test_many_files_are_read_and_those_that_are_missing_are_left_out(there: There) -> None:
    there.transport.write(there.path("a"), b"1")
    there.transport.write(there.path("c"), b"")
    paths = [there.path(name) for name in ("a", "b", "c", "a/below")]
    assert there.transport.read_many(paths[:2]) == {paths[0]: b"1"}
    assert there.transport.read_many(iter(paths)) == {paths[0]: b"1", paths[2]: b""}
    assert there.transport.read_many([]) == {}


@AND_BY_SCRIPTS
def test_a_file_is_read_up_to_a_size_and_nothing_that_is_no_file(there: There) -> None:
    there.transport.write(there.path("a"), b"1234")
    there.shell(f"cd {there.directory} && truncate -s 5 five && mkfifo fifo && ln -s /dev/zero zero && ln -s loop loop")
    paths = [there.path(name) for name in ("five", "fifo", "zero", "loop", "a", ".")]
    assert there.transport.read_many(paths, limit=4) == {there.path("a"): b"1234"}
    for name in ("fifo", "zero"):
        with pytest.raises(FileNotFoundError):
            there.transport.read(there.path(name))


def test_names_are_sorted_and_empty_where_there_is_no_directory(there: There) -> None:
    for name in ("b", "a", "ü x\n"):
        there.transport.write(there.path(f"d/{name}"), b"")
    assert there.transport.names(there.path("d")) == ["a", "b", "ü x\n"]
    assert there.transport.names(there.path("none")) == []


def test_removing_what_is_not_there_is_fine(there: There) -> None:
    there.transport.write(there.path("a"), b"")
    there.transport.remove(there.path("a"))
    there.transport.remove(there.path("a"))
    assert there.transport.names(there.directory) == []


def test_the_home_directory_is_the_one_over_there(there: There) -> None:
    home = there.shell("echo ~").stdout.strip()
    assert there.transport.expand("~") == home
    assert there.transport.expand("~/a") == f"{home}/a"
    assert there.transport.expand("~root/a") == "/root/a"
    assert there.transport.expand("/a/~") == "/a/~"


def test_a_closed_transport_opens_again_when_it_is_used(there: There) -> None:
    assert there.shell("echo 1").stdout == "1\n"
    there.transport.close()
    there.transport.close()
    assert there.shell("echo 2").stdout == "2\n"


def test_a_full_disk_leaves_nothing_behind_and_says_what_to_do(tmp_path: Path) -> None:
    script = f"""
import resource, signal
from orc.launchers.errors import LaunchError, BackendError
from orc.launchers.remote.transport import LocalTransport
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    LocalTransport().write({str(tmp_path / "big")!r}, b"x" * 1000)
except BackendError as error:
    print(error.what)
"""
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, timeout=30)
    assert "cannot write" in done.stdout
    assert os.listdir(tmp_path) == []
