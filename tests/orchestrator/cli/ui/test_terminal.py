"""What a person sees: on a real (pseudo) terminal, and in a log file."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orc.orchestrator.cli.ui import display as displays
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.display import Display, describe, display, waiting
from orc.orchestrator.cli.ui.jobtext import headline, situation
from orc.orchestrator.cli.ui.tail import writer
from orc.orchestrator.views import AttemptView, JobView

from ..conftest import Run

JobFile = Callable[..., str]

WAITS = "name: slow\ncommand: echo first; while [ ! -e {go} ]; do sleep 0.05; done; echo last\nlauncher: python\n"


def _on_a_terminal(*arguments: str, once_said: str = "", go: Path | None = None) -> tuple[int, str]:
    """`orc ARGS` with stdout and stderr on one terminal; its exit status and everything it wrote.

    The file *go* is made when it has written *once_said*.
    """
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "orc.orchestrator.cli.main", *arguments]
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    written = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            break
        if not data:
            break
        written += data
        if go is not None and once_said.encode() in written:
            go.touch()
    os.close(leader)
    return process.wait(timeout=60), written.decode()


def test_following_shows_the_state_in_a_line_that_comes_and_goes(job_file: JobFile, place: Path) -> None:
    go = place / "go"
    code, written = _on_a_terminal("submit", job_file(WAITS.format(go=go)), "--follow", once_said="RUNNING", go=go)
    assert code == 0
    assert "\x1b[2K" in written or "\r" in written
    # The lines of the job stand alone: nothing of the live line is left on them.
    lines = [line.rpartition("\x1b[2K")[2].strip() for line in written.split("\n")]
    assert "first" in lines
    assert "last" in lines
    assert "\x1b[32mSUCCEEDED" in written


def test_errors_are_coloured_on_a_terminal_only(job_file: JobFile) -> None:
    assert "\x1b[31m" in _on_a_terminal("status", "nothing")[1]


def test_without_a_terminal_each_step_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as shown:
        assert type(shown) is Display
        for detail in ("10%", "50%"):
            shown.show("uploading", detail)
        shown.show("submitting")
    assert capsys.readouterr().err == "uploading\nsubmitting\n"


def test_a_list_on_a_narrow_terminal_shows_the_exception_of_a_failed_job(orc: Run, job_file: JobFile) -> None:
    orc("submit", job_file("name: bad\ncommand: [python3, -c, 'raise ValueError(1)']\nlauncher: python\n"), "--follow")
    assert "  ValueError: 1" in _on_a_terminal("list")[1]


def test_a_command_that_names_a_failed_job_adds_its_exception(orc: Run, job_file: JobFile) -> None:
    job = job_file("name: bad\ncommand: [python3, -c, 'raise ValueError(1)']\nlauncher: python\n")
    followed = orc("submit", job, "--follow").err
    told = {
        words: orc(*words.split()) for words in ("list", "status @last", "events @last", "wait @last", "cancel @last")
    }
    told |= {words: orc(*words.split()) for words in ("stacks @last", "metrics @last")}
    said = {"submit": followed, **{words: done.out + done.err for words, done in told.items()}}
    assert [words for words, text in said.items() if "ValueError: 1 (rank 0 on " not in text] == []


class Due(threading.Timer):
    """A timer whose time has come as soon as it starts: the command has been silent for long enough."""

    def start(self) -> None:
        self.function()


def test_a_long_silence_ends_with_what_is_waited_for_and_since_when(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting("asking lab"):
        pass  # it is over before anything was due
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(displays.threading, "Timer", Due)
    with waiting("asking lab"):
        assert re.fullmatch(r"asking lab, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", capsys.readouterr().err)


def test_every_command_that_may_wait_says_for_what(
    orc: Run, job_file: JobFile, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(displays.threading, "Timer", Due)
    job = job_file(WAITS.format(go=place / "go"))

    def said(*arguments: str) -> list[str]:
        lines = orc(*arguments).err.splitlines()
        return [line.partition(", since ")[0] for line in lines if ", since " in line]

    assert said("render", job) == ["reading the files of the job"]
    assert said("submit", job)[-1].startswith("handing the job to the cluster")
    assert said("sync", job) == ["reading the files of the job", "uploading to local"]
    assert said("status") == ["asking the clusters about 1 job"]
    assert said("metrics", "@last")[0].startswith("reading the measurements of slow-")
    assert said("logs", "@last")[0].startswith("looking for the logs of slow-")
    assert said("exec", "@last", "--rank", "9", "--", "true") == ["looking for the nodes of @last"]
    assert said("cancel", "@last") == ["telling the clusters to stop 1 job"]
    assert said("gc") == ["looking for what no job needs, here"]
    assert said("clusters", "check", "local") == ["asking local"]
    assert said("doctor") == ["checking this machine and the clusters"]
    assert said("status", "@last", "--json") == []


def test_json_is_accompanied_by_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with display(silent=True) as shown:
        shown.show("uploading")
    assert capsys.readouterr() == ("", "")


def test_steps_of_a_submission_are_described() -> None:
    assert describe("snapshot", {"done": 500_000, "bytes": 2_000_000}) == (
        "storing the snapshot",
        "500.0 kB of 2.0 MB (25%)",
    )
    assert describe("scan", {"files": 3, "bytes": 10}) == ("reading the files of the job", "3 files, 10 B")
    assert describe("stage", {}) == ("uploading", "")


# Sets the title, writes to the clipboard, rings, hides what follows, goes up a line, turns the text round.
HOSTILE = ("\x1b]0;owned\x07", "\x1b]52;c;ZWNobw==\x07", "\x1b[8m", "\x1b[A", "\x9b31m", "\u202e")
HOSTILE_JOB = f"""\
name: hostile
command: [/bin/sh, -c, "cat hostile >&2; exit 3"]
launcher: python
tags: {{note: {json.dumps("".join(HOSTILE))}}}
"""


def test_no_command_passes_on_what_would_act_on_a_terminal(job_file: JobFile, place: Path) -> None:
    job = job_file(HOSTILE_JOB)
    Path(job).with_name("hostile").write_text("".join(HOSTILE) + "end\n")
    written = {"submit": _on_a_terminal("submit", job, "--follow")[1]}
    for arguments in ("status", "logs", "logs --json", "logs --raw", "events", "list", "status --json", "wait"):
        job_argument = [] if arguments == "list" else ["@last"]
        written[arguments] = _on_a_terminal(*arguments.split(), *job_argument)[1]
    written["error"] = _on_a_terminal("status", "".join(HOSTILE))[1]
    written["log file"] = written.pop("logs --raw")
    passed = {name: [code for code in HOSTILE if code in text] for name, text in written.items()}
    assert passed.pop("log file") == list(HOSTILE)
    assert {name: codes for name, codes in passed.items() if codes} == {}
    assert all(r"\x1b]52;c;ZWNobw==\x07" in written[name] for name in ("submit", "status", "logs"))


def test_logs_are_byte_for_byte_where_no_terminal_is(orc_process: Run, job_file: JobFile) -> None:
    job = job_file(HOSTILE_JOB)
    Path(job).with_name("hostile").write_text("".join(HOSTILE) + "end\n")
    assert orc_process("submit", job, "--follow").out == "".join(HOSTILE) + "end\n"
    assert orc_process("logs", "@last").out == "".join(HOSTILE) + "end\n"


def test_a_log_on_a_terminal_keeps_its_progress_bars_and_its_letters() -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    shown = writer(out)
    for piece in (b"10%\r20%\r\xc3", b"\xa4\x1b[2J\xff\n"):  # a letter in two pieces, and a byte that is none
        shown.write(piece)
    assert out.getvalue().decode() == "10%\r20%\r\u00e4\\x1b[2J\\xff\n"


def test_styles_of_orc_itself_are_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "coloured", lambda err=False: True)
    styled = output.rendered(output.style("\x1b[8mname", fg="red") + "\x1b[0m")
    assert styled == "\x1b[31m\\x1b[8mname\x1b[0m\\x1b[0m"
    lines = output.rendered(output.table(["A", "B"], [[output.style("x\ny", fg="red"), "z"]])).splitlines()
    assert lines == ["\x1b[1mA     B\x1b[0m", "\x1b[31mx\\ny\x1b[0m  z"]


# What besides `output` may have to do with stdout and stderr: bytes of logs, or text that was escaped before.
_PRINTING = r"\bprint\(|\.(?:s?echo|echo_via_pager|print_exc)\(|\b(?:Console|Live)\(|\bsys\.std(?:out|err)\.\w+"
_ASKING = {"sys.stdout.isatty", "sys.stderr.isatty", "sys.stdout.encoding", "sys.stdout.flush", "sys.stderr.flush"}
_WRITERS = {
    "cli/ui/display.py": {"Console(", ".echo("},  # is given what `output.rendered` has made; the bell alone
    "cli/ui/output.py": {".echo("},
    "cli/commands/submit.py": {"sys.stdout.buffer", "sys.stderr.buffer"},  # for the sinks of `tail`
    "cli/ui/tail.py": {"sys.stdout.buffer"},
    "cli/commands/env.py": {"print("},  # in a process of its own, read as JSON
    "cli/commands/jobs.py": {"Live("},  # is given what `output.rendered` has made
    "cli/commands/nodes.py": {"Live(", "sys.stdout.buffer"},  # cells that are escaped; `tail.writer`
    "engine/log_rules.py": {"print("},  # in a process of its own, read as JSON
    "functions/node.py": {".print_exc("},  # into the log of the rank
}


def test_nothing_prints_past_the_escaping() -> None:
    room = Path(output.__file__).parents[2]
    used = {
        str(path.relative_to(room)): set(re.findall(_PRINTING, path.read_text())) - _ASKING
        for path in room.rglob("*.py")
    }
    assert {name: found for name, found in used.items() if found} == _WRITERS


def test_tables_are_cut_to_the_terminal_and_never_in_their_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [("digits-abcdef-123456", "RUNNING", "x" * 80), ("b", "FAILED", "short")]
    cut = output.table(("JOB", "STATE", "REASON"), rows).splitlines()
    assert max(map(len, cut)) == 50
    assert cut[1].startswith("digits-abcdef-123456  RUNNING  xxx")
    assert cut[1].endswith("x…")
    assert cut[2] == "b                     FAILED   short"
    assert "x" * 80 in output.table(("JOB", "STATE", "REASON"), rows, fit=False)
    monkeypatch.setenv("COLUMNS", "10")
    assert output.table(("JOB", "STATE", "REASON"), rows).splitlines()[1] == "digits-abcdef-123456  RUNNING  xxxxxxx…"


ATTEMPT = AttemptView(1, "orc-d-a1", "PREPARED", None, "", None, (), None, None, None, 0, {}, None)
VIEW = JobView("d", "d", "lab", "ssh", "PREPARED", "", 0.0, 0.0, None, None, None, {}, {}, {}, "", (ATTEMPT,))


@pytest.mark.parametrize(
    ("state", "reason", "attempt", "said"),
    [
        ("PREPARED", "", {}, "about to be sent to lab"),
        ("PREPARED", "waiting for n1: no answer", {}, "waiting for n1: no answer"),
        ("SUBMITTING", "", {"state": "SUBMITTING", "submitted_at": 0.0}, "being sent to lab"),
        ("SUBMITTING", "", {"state": "SUBMITTING", "submitted_at": 86400.0}, "being sent to lab since 1970-01-0"),
        ("SUBMITTING", "", {"state": "AMBIGUOUS"}, "being looked for on lab: its submission was cut off"),
        ("PENDING", "", {}, "lab has it and has not started it yet"),
        ("PENDING", "", {"reason": "Priority"}, "Priority"),
        ("RUNNING", "", {"progress": {"step": 3}}, "step 3"),
        ("RUNNING", "cannot reach lab: no answer", {}, "cannot reach lab: no answer"),
    ],
)
def test_a_job_that_has_not_ended_says_what_it_waits_for(state, reason, attempt, said):
    job = replace(VIEW, state=state, reason=reason, attempts=(replace(ATTEMPT, **attempt),))
    assert situation(job).startswith(said)
    assert headline(job).startswith(f"d  {state}  {said}")


def test_a_retry_says_when_it_runs_again_and_a_headline_which_attempt_it_is():
    job = replace(VIEW, state="QUEUED", reason="waiting to run again after boom", next_attempt_at=86400.0)
    assert situation(job).startswith("waiting to run again after boom, at 1970-01-0")
    assert headline(replace(job, attempts=(ATTEMPT, replace(ATTEMPT, number=2)))).startswith("d  QUEUED  attempt 2  ")
