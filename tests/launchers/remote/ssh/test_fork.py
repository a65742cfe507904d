"""Programs that run in copies of the hand: they are like those of a new interpreter, and go when nobody is there."""

from __future__ import annotations

import json
import marshal
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.errors import BackendUnreachable
from orc.launchers.remote import programs
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import CommandTimeout

from .local_hand import Here

ABOUT = """
import json, os, signal, sys

def main():
    number = lambda s: getattr(signal.getsignal(s), "__name__", None) or int(signal.getsignal(s))
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    print(json.dumps({
        "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)),
        "signals": {s.name: number(s) for s in signal.valid_signals() if isinstance(s, signal.Signals)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "threads": len(os.listdir("/proc/self/task")),
        "flags": list(sys.flags), "path": sys.path, "executable": sys.executable, "prefix": sys.prefix,
        "words": sys.argv[1:], "cwd": os.getcwd(), "umask": os.umask(0o77),
        "environ": {k: v for k, v in os.environ.items() if k not in ("_", "SHLVL")},
        "said": sys.stdin.read(), "stdout": [sys.stdout.encoding, sys.stdout.line_buffering],
        "nice": fields[16], "ours": sorted(name for name in sys.modules if name.startswith("orc")),
    }))
"""
ENDS = """
import os, signal, sys

def main():
    how = sys.argv[1]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        print(1 / 0)
    sys.exit(None if how == "none" else int(how) if how.isdigit() else how)
"""
WAITS = """
import os, subprocess, sys, time

def main():
    below = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), below.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    transport = Here(tmp_path)
    yield transport
    transport.close()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Program]:
    """``program(text)``: one that is not among ours."""

    read, code = programs.source, programs._code

    def make(text: str) -> Program:
        coded = marshal.dumps(compile(text, "mine", "exec"))
        monkeypatch.setattr(programs, "source", lambda name: text if name == "mine" else read(name))
        monkeypatch.setattr(programs, "_code", lambda name: coded if name == "mine" else code(name))
        return Program("mine")

    return make


def gone(pid: int) -> bool:
    """Whether it ends soon (a zombie that nobody has waited for has ended)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def another(tmp_path: Path) -> str:
    """The same interpreter by another name, which is not the hand's."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    return str(link)


@pytest.mark.parametrize("code", [True, False], ids=["byte code", "source"])
def test_a_copy_is_like_a_new_interpreter(
    here: Here, tmp_path: Path, program: Callable[[str], Program], code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = program(ABOUT)
    if not code:  # as where the host's Python is another version
        monkeypatch.setitem(here._connected()[0].hello, "code", "cpython-39 610d0d0a")
    options: dict[str, Any] = {"timeout_s": 60, "stdin": b"a request"}
    copy = here.run_program(about, ("a", "b c"), python=sys.executable, **options)
    anew = here.run_program(about, ("a", "b c"), python=another(tmp_path), **options)
    assert (copy.status, copy.stderr, anew.status, anew.stderr) == (0, "", 0, "")
    found, expected = json.loads(copy.stdout), json.loads(anew.stdout)
    assert found.pop("executable") == sys.executable
    expected.pop("executable")
    assert found == expected
    assert found["leads"]
    assert found["threads"] == 1
    assert (found["words"], found["said"]) == (["a", "b c"], "a request")
    assert found["ours"] == ["orc", "orc.launchers", "orc.launchers.mine"]


@pytest.mark.parametrize("how", ["none", "0", "3", "256", "a reason", "raises", "killed"])
def test_it_ends_like_a_new_interpreter(
    here: Here, tmp_path: Path, program: Callable[[str], Program], how: str
) -> None:
    ends = program(ENDS)
    copy, anew = (
        here.run_program(ends, (how,), python=python, timeout_s=60) for python in (sys.executable, another(tmp_path))
    )
    assert (copy.status, copy.stdout) == (anew.status, anew.stdout)
    assert copy.stderr.splitlines()[-1:] == anew.stderr.splitlines()[-1:]


def test_what_it_has_started_is_ended_with_it_when_its_time_is_over(
    here: Here, program: Callable[[str], Program]
) -> None:
    with here.stream_program(program(WAITS), python=sys.executable, timeout_s=60) as process:
        pids = [int(word) for word in process.read(100).split()]
    assert all(map(gone, pids))
    with pytest.raises(CommandTimeout):
        here.run_program(program(WAITS), python=sys.executable, timeout_s=0.5)


@pytest.mark.parametrize("how", ["the laptop goes away", "the hand is killed", "the one that forks is killed"])
def test_nothing_is_left_when_nobody_is_there(here: Here, program: Callable[[str], Program], how: str) -> None:
    process = here.stream_program(program(WAITS), python=sys.executable, timeout_s=60)
    pids = [int(word) for word in process.read(100).split()]
    source = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    hand = here.hand_pid
    if how == "the laptop goes away":
        here.close()
    else:
        os.kill(hand if how == "the hand is killed" else source, signal.SIGKILL)
        with pytest.raises(BackendUnreachable):
            process.wait()
    assert all(map(gone, (*pids, source, hand)))
    ends = program(ENDS)
    assert here.run_program(ends, ("3",), python=sys.executable, timeout_s=60).status == 3  # by a new connection


def test_many_at_once_do_not_get_in_each_others_way(here: Here, program: Callable[[str], Program]) -> None:
    from orc.launchers.remote.ssh.fanout import each

    about = program(ABOUT)

    def ask(number: int) -> int:
        done = here.run_program(about, (str(number),), python=sys.executable, timeout_s=60, stdin=b"x" * 100_000)
        found = json.loads(done.stdout)
        assert len(found["said"]) == 100_000
        assert found["descriptors"] == [0, 1, 2]
        return int(found["words"][0])

    answers = each({str(number): number for number in range(40)}, ask, limit=16)
    assert list(answers.values()) == list(range(40))
