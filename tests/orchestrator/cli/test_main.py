"""The frame around every command: the table, suggestions, errors, exit statuses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest

from orc.launchers.errors import BackendUnreachable, SpecError
from orc.orchestrator.cli import main
from orc.orchestrator.cli.main import COMMANDS, HIDDEN, MODULES, load
from orc.orchestrator.cli.ui import output
from orc.orchestrator.cli.ui.output import wants_json

from .conftest import Run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_and_takes_json(name: str, orc: Run) -> None:
    command = load(name)
    assert isinstance(command, click.Command)
    shown = orc(name, "--help")
    assert shown.code == 0
    # What a person types at, or what another program prints, is passed on as it is.
    below = command.commands if isinstance(command, click.Group) else {}
    takes_json = "--json" in shown.out or any("--json" in orc(name, one, "--help").out for one in below)
    assert takes_json == (name not in ("exec", "ssh"))
    assert command.name == ("launch" if name == "run" else name)


def test_help_lists_every_command_with_its_line(orc: Run) -> None:
    shown = orc("--help")
    assert shown.code == 0
    words = " ".join(shown.out.split())  # a long line is wrapped
    for name, line in COMMANDS.items():
        assert (f"\n  {name} " in shown.out and f" {name} {line}" in words) == (name not in HIDDEN)


def test_no_command_at_all_gets_the_help_and_not_an_error_block(orc: Run) -> None:
    shown = orc()
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == orc("--help").out


@pytest.mark.parametrize("arguments", [("list", "--bogus"), ("cancel",), ("list", "--limit", "many"), ("nope",)])
def test_usage_errors_exit_with_2_as_text_and_as_json(arguments: tuple[str, ...], orc: Run) -> None:
    text = orc(*arguments)
    assert (text.code, text.out) == (2, "")
    assert text.err.startswith("error: ")
    as_json = orc(*arguments, "--json")
    assert as_json.code == 2
    assert as_json.err == ""
    assert as_json.error["what"]


def test_an_error_is_one_block_of_what_where_and_what_to_do(orc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SpecError("first line\nsecond line", where="job.yaml:3:1", hint="write it differently")

    monkeypatch.setattr("orc.orchestrator.engine.job_source.load_jobs_checked", fail)
    result = orc("render", "job.yaml")
    assert result.code == 2
    assert result.err.splitlines() == [
        "error: first line",
        "       second line",
        "  where: job.yaml:3:1",
        "  do:    write it differently",
    ]
    assert orc("render", "job.yaml", "--json").error == {
        "kind": "SpecError",
        "what": "first line\nsecond line",
        "where": "job.yaml:3:1",
        "do": "write it differently",
        "exit_code": 2,
        "problems": [
            {
                "file": "job.yaml",
                "line": 3,
                "column": 1,
                "key": "",
                "message": "first line\nsecond line",
                "hint": "write it differently",
            }
        ],
    }


def test_an_unexpected_error_exits_with_70_and_keeps_a_private_traceback(
    orc: Run, monkeypatch: pytest.MonkeyPatch, orc_home: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("orc.orchestrator.engine.job_source.load_jobs_checked", fail)
    result = orc("render", "job.yaml", "--set", "env.TOKEN=hunter2")
    assert result.code == 70
    assert "RuntimeError: boom" in result.err
    assert "Traceback" not in result.err
    (report,) = (orc_home / "state" / "crashes").iterdir()
    assert str(report) in result.err
    assert "RuntimeError: boom" in report.read_text()
    assert "hunter2" not in report.read_text()
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    monkeypatch.setenv("ORC_DEBUG", "1")
    assert "Traceback" in orc("render", "job.yaml").err


def test_a_crash_without_a_place_for_its_report_still_says_what_happened(
    orc: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORC_STATE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("orc.orchestrator.engine.job_source.load_jobs_checked", fail)
    result = orc("render", "job.yaml")
    assert result.code == 70
    assert "boom" in result.err
    assert "ORC_DEBUG=1" in result.err


def test_errors_are_told_apart_by_exit_status() -> None:
    from orc.orchestrator.client import JobNotFound

    assert output.of_error(SpecError("x")) == 2
    assert output.of_error(JobNotFound("x")) == 4
    assert output.of_error(BackendUnreachable("x")) == 5
    assert output.of_error(ValueError("x")) == 70


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ((), 0),
        (("SUCCEEDED",), 0),
        (("SUCCEEDED", "FAILED", "CANCELLED"), 1),
        (("CANCELLED", "SUCCEEDED"), 3),
        (("RUNNING",), 0),
    ],
)
def test_the_worst_state_decides_the_exit_status(states: tuple[str, ...], code: int) -> None:
    assert output.of_states(states) == code


def test_a_reader_that_goes_away_ends_the_command_quietly(orc_process: Run, place: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orc.orchestrator.cli.main", "init"],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""


_ENDS_SLOWLY = """
import os, signal, sys, time
from orc.orchestrator.cli import main
from orc.orchestrator.cli.commands import init
from orc.orchestrator.cli.ui import output
def starters():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        time.sleep({first})
        os.kill(os.getpid(), signal.SIGINT)
        print("ended in good order", flush=True)
    return {{}}
init.starters = starters
main.REPEAT_S = {repeat}
sys.argv = ["orc", "init"]
main.main()
"""


@pytest.mark.parametrize(
    ("pause", "repeat", "out", "err"),
    [(0, 60, "ended in good order\n", "error: interrupted\n"), (0.02, 0.01, "", "")],
    ids=["at once", "later"],
)
def test_a_second_ctrl_c_is_no_traceback(pause: float, repeat: float, out: str, err: str) -> None:
    code = _ENDS_SLOWLY.format(first=pause, repeat=repeat)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, out, err)


def test_ctrl_c_while_an_error_is_printed_is_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "from orc.orchestrator.cli import main\n"
        "from orc.orchestrator.cli.ui import output\n"
        "output.report = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['orc', 'nonsense']\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_json_is_recognised_among_our_own_words_only() -> None:
    assert wants_json(["list", "--json"])
    assert wants_json(["render", "--format", "json", "job.yaml"])
    assert wants_json(["launch", "--json", "train.py"])
    assert wants_json(["launch", "-n", "2", "--json", "train.py"])
    assert not wants_json(["launch", "-n", "2", "train.py", "--json"])
    assert not wants_json(["launch", "--no-python", "--nproc=2", "--env", "A=1", "echo", "--json"])
    assert not wants_json(["launch", "-n", "2", "--", "tool", "--json"])


def test_version_is_printed_as_option_and_as_command(orc: Run) -> None:
    assert orc("--version").out.startswith("orc ")
    assert set(orc("version", "--json").json) == {"orc", "python", "torch"}


def test_colours_need_a_terminal_and_honour_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.style("x", fg="red") == "x"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert output.rendered(output.style("x", fg="red")) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.style("x", fg="red") == "x"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "0.0s"),
        (8.24, "8.2s"),
        (59.9, "60s"),
        (59.96, "1m00s"),
        (185, "3m05s"),
        (7620, "2h07m"),
        (273600, "3d04h"),
    ],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert output.duration(seconds) == text


def test_tables_line_up_and_have_no_trailing_blanks() -> None:
    assert output.table(("A", "LONG"), [("xxx", "y"), ("", "")]) == "A    LONG\nxxx  y\n"


def test_the_group_completes_names_without_importing_commands(place: Path) -> None:
    code = (
        "import os, sys\n"
        "from orc.orchestrator.cli.main import main\n"
        "code = main([])\n"
        "print([m for m in sys.modules if m.startswith('orc.orchestrator.cli.') and not m.endswith('main')])\n"
        "sys.exit(code)\n"
    )
    env = {**os.environ, "_ORC_COMPLETE": "bash_complete", "COMP_WORDS": "orc re", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "plain,render\nplain,resubmit\n[]\n"


@pytest.mark.parametrize("command", ["version", "--help", "list --json"])
def test_an_output_that_takes_nothing_is_one_error(command: str, orc_home: Path) -> None:
    orc = f"{sys.executable} -m orc.orchestrator.cli.main"
    done = subprocess.run(["/bin/sh", "-c", f"{orc} {command} >/dev/full"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_no_harm(closed: str, orc_home: Path) -> None:
    orc = f"{sys.executable} -m orc.orchestrator.cli.main"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{orc} list {closed}; {orc} list"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.endswith("no jobs\n") or done.stderr.endswith("no jobs\n")
    assert "internal" not in done.stderr
    status = subprocess.run(["/bin/sh", "-c", f"{orc} list {closed}"], capture_output=True, check=False)
    assert status.returncode == 0


def test_each_file_of_commands_has_one_of_the_table() -> None:
    files = {path.stem for path in (Path(main.__file__).parent / "commands").glob("[a-z]*.py")}
    shared = {name: module for module, names in MODULES.items() for name in names.split()}
    assert shared.keys() <= COMMANDS.keys()
    assert files == {shared.get(name, name) for name in COMMANDS}
