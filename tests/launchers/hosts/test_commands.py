"""One command on many hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from orc.launchers.errors import BackendUnreachable
from orc.launchers.hosts.commands import UNREACHABLE, CommandResult, Script, run_on_hosts, worst_status
from orc.launchers.remote.transport import LocalTransport, Process


class Named(LocalTransport):
    """This machine as one of several: commands see its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> Any:
        return super().stream(("env", f"WORKER={self.name}", *argv), timeout_s=timeout_s)


class Away(LocalTransport):
    def stream(self, argv: Sequence[str], *, timeout_s: float) -> Process:
        raise BackendUnreachable("no route to host", hint="Is it up?")


def run(*lines: str, names: Sequence[str] = ("a",), silence_s: float = 60.0, **options: Any) -> Any:
    said: list[tuple[str, str]] = []
    script = Script(lines, **options)
    results = run_on_hosts(
        {name: Named(name) for name in names}, script, lambda *line: said.append(line), silence_s=silence_s
    )
    return results, said


def test_every_machine_runs_it_and_its_lines_are_told_by_name() -> None:
    results, said = run("echo I am $WORKER", "echo aside >&2", "printf end", names=("a", "b", "c"))
    assert results == {name: CommandResult(0) for name in "abc"}
    for name in "abc":
        assert [line for who, line in said if who == name] == [f"I am {name}", "aside", "end"]


def test_a_machine_stops_at_the_first_line_that_fails_and_the_others_go_on() -> None:
    results, said = run("test $WORKER != b || exit 7", "echo after", names=("a", "b", "c"))
    assert [result.status for result in results.values()] == [0, 7, 0]
    assert [who for who, line in said if line == "after"] in (["a", "c"], ["c", "a"])
    assert worst_status(results) == 7


def test_a_signal_is_told_as_shells_do() -> None:
    results, _ = run("kill -9 $$")
    assert results["a"] == CommandResult(137)


def test_variables_are_set_before_the_first_line_whatever_they_hold() -> None:
    _, said = run('printf "%s\\n" "$NASTY"', env={"NASTY": 'it\'s $HOME\\n"x"'})
    assert said == [("a", 'it\'s $HOME\\n"x"')]


def test_nobody_can_type_an_answer() -> None:
    results, said = run("read answer || echo nobody")
    assert (results["a"].status, said) == (0, [("a", "nobody")])


def test_a_machine_that_does_not_answer_is_told_of_and_the_others_go_on() -> None:
    said: list[tuple[str, str]] = []
    machines = {"a": Away(), "b": Named("b")}
    results = run_on_hosts(machines, Script(("echo here",)), lambda *line: said.append(line), silence_s=60)
    assert results == {"a": CommandResult(UNREACHABLE, "no route to host Is it up?"), "b": CommandResult(0)}
    assert said == [("b", "here")]


def test_a_machine_that_is_silent_for_too_long_is_given_up() -> None:
    results, _ = run("while :; do sleep 0.1; done", silence_s=0.5)
    assert results["a"].status == UNREACHABLE
    assert "said nothing for 0.5 s" in results["a"].problem


@pytest.mark.parametrize(("sudo", "before"), [(False, ()), (True, ("sudo", "-n"))])
def test_as_root_it_runs_below_a_sudo_that_does_not_ask(sudo: bool, before: tuple[str, ...]) -> None:
    argv = Script(("id",), sudo=sudo).argv()
    assert argv == (*before, "/bin/sh", "-e", "-c", 'eval "$(cat)"')


def test_what_is_run_and_set_stands_on_no_command_line() -> None:
    script = Script(("tr '\\0' ' ' </proc/$$/cmdline", 'echo "; $TOKEN"'), {"TOKEN": "s3cret"})
    results = {name: [] for name in ("a",)}
    run_on_hosts({"a": LocalTransport()}, script, lambda name, line: results[name].append(line), silence_s=10)
    command, shown = results["a"][-1].split("; ")
    assert (shown, "s3cret" in command) == ("s3cret", False)


def test_no_machines_are_no_failure() -> None:
    assert worst_status(run_on_hosts({}, Script(("id",)), lambda *_: None, silence_s=1)) == 0
