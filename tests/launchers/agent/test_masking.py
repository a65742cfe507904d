"""Secrets in what a job prints: no part of a value leaves the job's own logs, in whatever form it was written."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest

from orc.launchers.agent.masking import masked
from orc.launchers.agent.records import TAIL_BYTES, log_tail

TOKEN = "hf_Ab'c\"d$e/f+g=h \\i\u00e4"
KEY = (
    "-----BEGIN PRIVATE KEY-----\n"
    + "\n".join(f"MIIEvQ{i:02d}" + "x" * 56 for i in range(30))
    + "\nQmFk\n-----END-----\n"
)


@pytest.mark.parametrize(
    "write",
    [
        str,
        repr,
        ascii,
        lambda value: repr(value.encode()),
        lambda value: repr(f"it's {value}"),
        lambda value: f"{{'token': {value!r}}}",
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: "https://host/?key=" + urllib.parse.quote(value),
        lambda value: "https://host/?key=" + urllib.parse.quote(value, safe=""),
        lambda value: re.sub("%..", lambda match: match[0].lower(), urllib.parse.quote(value, safe="")),
        lambda value: urllib.parse.urlencode({"key": value}),
        shlex.quote,
        lambda value: subprocess.check_output(["bash", "-c", 'printf %q "$1"', "-", value], text=True),
        lambda value: value.replace("\n", "\r\n"),
        lambda value: "\n".join(f"  | {line}" for line in value.splitlines()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [TOKEN, KEY], ids=["token", "key"])
def test_a_value_is_masked_in_every_form(value: str, write: Callable[[str], str]) -> None:
    shown = masked(f"before {write(value)} after", [value])
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert "***" in shown
    for line in value.splitlines():
        assert not any(line[i : i + 6] in shown for i in range(len(line) - 5)), shown


def test_values_that_overlap_leave_no_end_of_each_other() -> None:
    assert masked("xabcdef and abcdefg, ab", ["xabc", "bcdefg", "abcdef", ""]) == "*** and ***, ab"


def test_what_is_not_there_changes_nothing() -> None:
    text = "exit status 1 of 12\n"
    assert masked(text, ["1", "12", "", "\n"]) == text


@pytest.mark.parametrize("offset", [*range(0, 200, 7), 300])
def test_a_tail_is_masked_before_it_is_cut(tmp_path: Path, offset: int) -> None:
    log = tmp_path / "rank-0.log"
    one_line = TOKEN * 6 + "-" * (TAIL_BYTES - offset)
    log.write_text("x" * 900 + one_line)
    tail = log_tail(str(log), 0, [TOKEN])
    assert tail.lstrip("x*-") == ""
    log.write_text(KEY * 5 + "-" * (TAIL_BYTES - offset) + "\nerror\n")
    tail = log_tail(str(log), 0, [KEY])
    assert tail.replace("*", "").replace("-", "") in ("\nerror", "error")


def test_a_failed_setup_line_and_a_stall_are_masked_before_they_are_cut(attempt) -> None:
    lines = ["printf '%s\\n' \"$KEY\" \"$KEY\"; head -c 8100 /dev/zero | tr '\\0' -; exit 3"]
    job = attempt("pass", secrets=["KEY"], setup=lines)
    (job.directory / "secrets.json").write_text(json.dumps({"KEY": KEY}))
    job.run()
    record = (job.directory / "node-0" / "exit.json").read_text()
    assert "setup on node 0 failed" in record
    assert "MIIE" not in record


@pytest.mark.parametrize(
    ("more", "limit"),
    [({"secrets": ["KEY"]}, 1), ({"secrets": ["KEY"], "core_dumps": True}, 4096), ({}, 4096)],
    ids=["secrets", "asked for", "no secrets"],
)
def test_ranks_with_secrets_leave_no_core_file_unless_that_is_asked_for(attempt, more: dict, limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    job = attempt("import resource; print(*resource.getrlimit(resource.RLIMIT_CORE))", **more)
    (job.directory / "secrets.json").write_text(json.dumps({"KEY": "geheim-4711"}))
    resource.setrlimit(resource.RLIMIT_CORE, (4096, before[1]))
    try:
        job.run()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert job.log(0).split()[0] == str(limit)


def test_where_core_files_are_forbidden_already_secrets_can_be_had_without_being_root() -> None:
    source = """import os, resource, sys
from types import SimpleNamespace
from orc.launchers.agent import preparation
from orc.launchers.agent.node import Node
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if not os.geteuid():
    os.setuid(65534)
node = Node.__new__(Node)
node.config, node.private = SimpleNamespace(secrets=["KEY"], core_dumps=False), ""
preparation.read_json = lambda path: {"KEY": "geheim-4711"}
preparation.load_secrets(node)
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "0 0\n", done.stderr


def test_lines_of_a_key_do_not_reach_the_exit_record(attempt) -> None:
    job = attempt("import os; print(repr(os.environ['KEY'])); raise RuntimeError(os.environ['KEY'])", secrets=["KEY"])
    (job.directory / "secrets.json").write_text(json.dumps({"KEY": KEY}))
    job.run()
    (record,) = [path.read_text() for path in job.directory.glob("node-0/exit.json")]
    assert "RuntimeError" in record
    assert "MIIE" not in record
    assert "QmFk" not in record
