"""Every wrong job file gets one report: where, which key, what about it, what to do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from orc.launchers.errors import SpecError
from orc.launchers.spec import SpecProblems, load_job
from orc.launchers.spec.source import MAX_BYTES

OK = "name: digits\nscript: train.py\n"

# (what is behind the two good lines, the whole complaint)
WRONG = {
    "unknown key": (
        "resorces: {nodes: 2}",
        "job.yaml:3:1: unknown key 'resorces', did you mean 'resources'?",
    ),
    "unknown key in a section": (
        "resources:\n  nodes: 2\n  nodez: 3",
        "job.yaml:5:3: resources: unknown key 'nodez', did you mean 'nodes'?",
    ),
    "letters in the wrong order": (
        "agrs: [a]",
        "job.yaml:3:1: unknown key 'agrs', did you mean 'args'?",
    ),
    "a kind where there is none": (
        "environment: {kind: venv}",
        "job.yaml:3:15: environment: unknown key 'kind'; known are venv, conda, copy, container, none",
    ),
    "abbreviated key of another section": (
        "gpus: 2",
        "job.yaml:3:1: unknown key 'gpus', did you mean 'resources.gpus_per_node'?",
    ),
    "top-level key in a section": (
        "resources: {env: {A: 1}}",
        "job.yaml:3:13: resources: unknown key 'env', did you mean env, at the top of the file?",
    ),
    "key like no other": (
        "checkpoint: {xyzzy: 1}",
        "job.yaml:3:14: checkpoint: unknown key 'xyzzy'; known are dir, every, keep, resume",
    ),
    "a grid of nothing": ("sweep: {grid: {}}", "job.yaml:3:15: sweep.grid: must not be empty"),
    "zero nodes": ("resources:\n  nodes: 0", "job.yaml:4:10: resources.nodes: a job needs at least 1 node, not 0"),
    "inverted node range": (
        "resources:\n  nodes: 4:2",
        "job.yaml:4:10: resources.nodes: the smallest number of nodes, 4, exceeds the largest, 2",
    ),
    "nodes in words": (
        "resources:\n  nodes: two",
        "job.yaml:4:10: resources.nodes: 'two' is not a number of nodes; write for example 2, or 2:4 for a range",
    ),
    "zero processes": (
        "resources:\n  procs_per_node: 0",
        "job.yaml:4:19: resources.procs_per_node: must be at least 1, not 0",
    ),
    "fraction of a process": (
        "resources:\n  procs_per_node: 1.5",
        "job.yaml:4:19: resources.procs_per_node: expected a whole number, not 1.5",
    ),
    "truth for a number": (
        "resources:\n  procs_per_node: true",
        "job.yaml:4:19: resources.procs_per_node: expected a whole number, not true",
    ),
    "more processes than any machine has": (
        "resources:\n  procs_per_node: 1000000",
        "job.yaml:4:19: resources.procs_per_node: must be at most 4096, not 1000000",
    ),
    "negative GPUs": (
        "resources:\n  gpus_per_node: -1",
        "job.yaml:4:18: resources.gpus_per_node: must be at least 0, not -1",
    ),
    "memory without unit": (
        "resources: {memory: 16}",
        "job.yaml:3:21: resources.memory: 16 has no unit; write for example 16G or 512M",
    ),
    "ambiguous time": (
        "resources: {time: 1:30}",
        "job.yaml:3:19: resources.time: '1:30' may mean hours:minutes or minutes:seconds; write 1:30:00 or use units"
        " such as 90m",
    ),
    "no time": ("resources: {time: 0}", "job.yaml:3:19: resources.time: a time limit is at least one second"),
    "time in words": (
        "resources: {time: soon}",
        "job.yaml:3:19: resources.time: 'soon' is not a duration; write seconds, units such as 90m, 2h, 1h30m, or"
        " H:MM:SS",
    ),
    "unknown kind of backend": (
        "resources:\n  options:\n    slrum: {partition: gpu}",
        "job.yaml:5:5: resources.options: unknown kind of backend 'slrum', did you mean 'slurm'?",
    ),
    "section that is a text": (
        "resources: many",
        "job.yaml:3:12: resources: expected a mapping of keys and values, not 'many'",
    ),
    "list in the environment": ("env:\n  A: [1, 2]", "job.yaml:4:6: env.A: expected one value, not a list"),
    "empty environment value": (
        "env:\n  A:",
        'job.yaml:4:5: env.A: has no value; write "" for an empty text',
    ),
    "environment is a list": ("env: [A=1]", "job.yaml:3:6: env: expected a mapping, not a list"),
    "bad name in the environment": (
        "env:\n  2X: 1",
        "job.yaml:4:3: env.2X: '2X' is not a name of an environment variable (letters, digits and _, no digit first)",
    ),
    "derived name in the environment": (
        "env:\n  RANK: 1",
        "job.yaml:4:3: env.RANK: RANK is set by orc on every node and cannot be set here",
    ),
    "secret that is in the environment too": (
        "env: {TOKEN: x}\nsecrets: [TOKEN]",
        "job.yaml:3:14: env.TOKEN: is also listed in secrets",
    ),
    "secret listed twice": ("secrets: [A, B, A]", "job.yaml:3:17: secrets[2]: A is listed twice"),
    "secret with a value": (
        "secrets: {TOKEN: x}",
        "job.yaml:3:10: secrets: expected a list, not a mapping",
    ),
    "nested argument in a list": ("args: [--lr, [1]]", "job.yaml:3:14: args[1]: expected one value, not a list"),
    "arguments as one text": (
        "args: --lr 0.1",
        "job.yaml:3:7: args: expected a list of words such as [--lr, 0.1], or a mapping such as {lr: 0.1}",
    ),
    "unknown launcher": (
        "launcher: torchrum",
        "job.yaml:3:11: launcher: unknown launcher 'torchrum', did you mean 'torchrun'?",
    ),
    "unknown launcher in the long form": (
        "launcher:\n  kind: pithon",
        "job.yaml:4:9: launcher.kind: unknown launcher 'pithon', did you mean 'python'?",
    ),
    "wrong runtime value": (
        "runtime:\n  mixed_precision: fp64",
        "job.yaml:4:20: runtime.mixed_precision: mixed_precision = 'fp64': expected one of no, fp16, bf16, fp8, "
        "did you mean 'fp16'?",
    ),
    "a layout that the processes do not make": (
        "resources: {nodes: 2, procs_per_node: 2}\nruntime:\n  parallelism: {dp_shard_size: 2, tp_size: 4}",
        "job.yaml:5:16: runtime.parallelism: dp_shard_size 2 x tp_size 4 makes 8 processes, and there are 4: change "
        "the sizes so that their product is 4, or start 8",
    ),
    "a layout of a number of nodes that is not fixed": (
        "resources: {nodes: '1:2', procs_per_node: 2}\nruntime:\n  parallelism: {tp_size: 2}",
        "job.yaml:3:20: resources.nodes: runtime.parallelism lays out a fixed number of processes: give one number",
    ),
    "a kind of parallelism that there is not": (
        "runtime:\n  parallelism: {tp_sise: 2}",
        "job.yaml:4:16: runtime.parallelism: parallelism: unknown key 'tp_sise', did you mean 'tp_size'?",
    ),
    "settings of two back ends of fp8": (
        "runtime:\n  mixed_precision: fp8\n  fp8: {backend: te, opt_level: O1}",
        "job.yaml:5:8: runtime.fp8: fp8: opt_level belongs to the back end msamp, and te is chosen",
    ),
    "a variable that the runtime would refuse in every rank": (
        "env:\n  ORC_MIXED_PRECISION: fp4",
        "job.yaml:4:24: env.ORC_MIXED_PRECISION: expected one of no, fp16, bf16, fp8, did you mean 'fp8'?",
    ),
    "unknown runtime key": (
        "runtime:\n  mixed_precison: bf16",
        "job.yaml:4:3: runtime: unknown key 'mixed_precison', did you mean 'mixed_precision'?",
    ),
    "runtime key that has a section of its own": (
        "runtime:\n  resume: never",
        "job.yaml:4:3: runtime: unknown key 'resume', did you mean checkpoint.resume?",
    ),
    "unknown cause to retry on": (
        "retry: {on: [crash, preemption]}",
        "job.yaml:3:21: retry.on[1]: expected 'crash', 'node_failure', 'preempted' or 'timeout', not 'preemption', did"
        " you mean 'preempted'?",
    ),
    "negative grace": ("grace: -1", "job.yaml:3:8: grace: expected a duration between 0 and 10 years"),
    "missing workdir": ("workdir: src", "job.yaml:3:10: workdir: {cwd}/src does not exist"),
    "workdir that is a file": (
        "workdir: {path: train.py}",
        "job.yaml:3:17: workdir.path: {cwd}/train.py is not a directory",
    ),
    "empty cluster": ('cluster: ""', "job.yaml:3:10: cluster: must not be empty"),
    "empty workdir": (
        'workdir: ""',
        "job.yaml:3:10: workdir.path: must not be empty; the directory of the job file is .",
    ),
    "mapping of setup lines": ("setup: {a: 1}", "job.yaml:3:8: setup: expected shell lines: one text or a list"),
    "too many attempts": (
        "retry: {max_attempts: 1001}",
        "job.yaml:3:23: retry.max_attempts: must be at most 1000, not 1001",
    ),
    "truth for a choice": (
        "checkpoint: {resume: true}",
        "job.yaml:3:22: checkpoint.resume: expected 'auto' or 'never', not true",
    ),
    "nothing for a number": (
        "resources: {gpus_per_node: ~}",
        "job.yaml:3:28: resources.gpus_per_node: expected a whole number, not empty (null)",
    ),
    "two programs": (
        "module: train",
        "job.yaml:3:9: module: only one of script, module, command can be given; script is given too",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_place_key_and_remedy(case: str, job_files, complaint: Callable[..., str]) -> None:
    text, expected = WRONG[case]
    assert complaint(OK + text + "\n") == expected.replace("{cwd}", str(job_files.directory))


# (the whole file, the whole complaint)
WRONG_PROGRAM = {
    "no name": ("script: train.py", "job.yaml:1:1: the key 'name' is required"),
    "name without a letter": (
        "name: '***'\nscript: train.py",
        "job.yaml:1:7: name: '***' needs at least one letter a-z or digit: job ids are made from it",
    ),
    "name over two lines": (
        'name: "a\\nb"\nscript: train.py',
        "job.yaml:1:7: name: a name is one printable line of at most 128 characters",
    ),
    "nothing to run": ("name: x", "job.yaml:1:1: nothing to run; give one of script, module, command"),
    "no such script": (
        "name: x\nscript: trian.py",
        "job.yaml:2:9: script: there is no file 'trian.py' in {cwd}, did you mean 'train.py'?",
    ),
    "script that is a directory": (
        "name: x\nscript: .",
        "job.yaml:2:9: script: '.' is a directory, not a file",
    ),
    "absolute script": (
        "name: x\nscript: /opt/train.py",
        "job.yaml:2:9: script: '/opt/train.py' must be relative to the workdir: only the workdir travels to the nodes",
    ),
    "script above the workdir": (
        "name: x\nscript: a/../../train.py",
        "job.yaml:2:9: script: 'a/../../train.py' lies outside the workdir: only the workdir travels to the nodes",
    ),
    "file as module": (
        "name: x\nmodule: train.py/x",
        "job.yaml:2:9: module: 'train.py/x' is not the name of a Python module; for a file use `script:`",
    ),
    "launcher as command": (
        "name: x\ncommand: torchrun",
        "job.yaml:2:10: command: is the program of one rank; to start the ranks with torchrun, write"
        " `launcher: torchrun`",
    ),
    "torchrun in torchrun": (
        "name: x\ncommand: /usr/bin/torchrun --nnodes 1 train.py",
        "job.yaml:2:10: command: starts torchrun inside torchrun, which starts the ranks already; give `script`, or"
        " `launcher: python`",
    ),
    "blank command": ("name: x\ncommand: ' '", "job.yaml:2:10: command: must not be empty"),
    "empty command": ("name: x\ncommand: []", "job.yaml:2:10: command: expected a program and its arguments"),
    "list in a command": ("name: x\ncommand: [a, [b]]", "job.yaml:2:14: command[1]: expected one value, not a list"),
    "number as command": (
        "name: x\ncommand: {a: 1}",
        "job.yaml:2:10: command: expected a shell command, or a list of a program and its arguments",
    ),
}


@pytest.mark.parametrize("case", WRONG_PROGRAM)
def test_says_what_is_wrong_with_the_program(case: str, job_files, complaint: Callable[..., str]) -> None:
    text, expected = WRONG_PROGRAM[case]
    assert complaint(text) == expected.replace("{cwd}", str(job_files.directory))


# (the bytes of the file, the whole complaint)
NO_YAML = {
    "empty": (b"", "job.yaml: the file is empty\n  a mapping of keys and values is expected"),
    "a list": (b"\n- a\n", "job.yaml:2:1: expected a mapping of keys and values at the top of the file"),
    "open bracket": (
        b"name: x\nargs: [1, 2\nscript: y\n",
        "job.yaml:3:7: not valid YAML: while parsing a flow sequence, did not find expected ',' or ']'",
    ),
    "wrong indentation": (
        b"name: x\n  script: y\n",
        "job.yaml:2:9: not valid YAML: mapping values are not allowed in this context\n"
        "  check the indentation, or quote a value that contains a colon",
    ),
    "tab": (
        b"env:\n\tA: 1\n",
        "job.yaml:2:1: not valid YAML: while scanning for the next token, found character that cannot start any token\n"
        "  indent with spaces, not tabs",
    ),
    "a backslash in double quotes": (
        b'name: x\nscript: "a\\p.py"\n',
        "job.yaml:2:11: not valid YAML: while parsing a quoted scalar, found unknown escape character\n"
        "  inside \"...\" a backslash is written twice; inside '...' it stands for itself",
    ),
    "reference without quotes in a flow mapping": (
        b"resources: {nodes: ${env:N}}\n",
        "job.yaml:1:21: not valid YAML: while parsing a flow mapping, did not find expected ',' or '}'\n"
        "  quote a text with ${...} inside {} or []",
    ),
    "two documents": (
        b"name: x\n---\nname: y\n",
        "job.yaml:2:1: not valid YAML: expected a single document in the stream, but found another document",
    ),
    "unknown alias": (b"name: *x\n", "job.yaml:1:7: not valid YAML: found undefined alias"),
    "alias that contains itself": (
        b"env: &e\n  A: *e\n",
        "job.yaml:1:6: an alias refers to a value that contains it",
    ),
    "duplicate key": (
        b"name: x\nscript: a\nname: y\n",
        "job.yaml:3:1: duplicate key 'name'\n  it is first given at job.yaml:1:1",
    ),
    "duplicate key in a section": (
        b"env:\n  A: 1\n  A: 2\n",
        "job.yaml:3:3: duplicate key 'A'\n  it is first given at job.yaml:2:3",
    ),
    "list as key": (b"? [a]\n: b\n", "job.yaml:1:3: a key must be a plain text"),
    "merge of a text": (b"<<: a\n", "job.yaml:1:5: << merges mappings only"),
    "python tag": (
        b"name: !!python/object/apply:os.system [ls]\n",
        "job.yaml:1:7: the tag !!python/object/apply:os.system is not supported",
    ),
    "wrong tag": (b"grace: !!int soon\n", "job.yaml:1:8: 'soon' is not a value of type int"),
    "endless number": (b"grace: " + b"9" * 5000, "job.yaml:1:8: '" + "9" * 40 + "' is not a value of type int"),
    "binary": (b"\x7fELF\x00\x01", "job.yaml: this is a binary file, not a job file"),
    "latin-1": ("name: x\nenv: {A: Köln}\n".encode("latin-1"), "job.yaml:2:11: the file is not UTF-8 text"),
    "control character": (b"name: x\nscript: a\x01b\n", "job.yaml:2:10: contains a control character"),
    "too large": (b"#" * (MAX_BYTES + 1), "job.yaml: the file is larger than 1 MiB; that is no job file"),
    "too deep": (b"args: " + b"[" * 200_000, "job.yaml:1:70: nests deeper than 64 levels"),
}


@pytest.mark.parametrize("case", NO_YAML)
def test_refuses_what_is_no_yaml_mapping(case: str, complaint: Callable[..., str]) -> None:
    text, expected = NO_YAML[case]
    assert complaint(text) == expected


def test_aliases_that_expand_without_end_are_refused(complaint: Callable[..., str]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    text = complaint("\n".join(lines))
    assert "expands to more than 50000 values" in text
    assert "check the aliases" in text


def test_merges_that_expand_without_end_are_refused(complaint: Callable[..., str]) -> None:
    lines = ["a0: &a0 {}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    assert "expands to more than 50000 values" in complaint("\n".join(lines))


def test_all_problems_come_in_one_report_sorted_by_line(job_files, complaint: Callable[..., str]) -> None:
    text = dedent(
        """\
        nam: digits
        script: train.py
        retry:
          max_attempts: 0
        resources: {procs_per_node: -1, nodez: 1}
        env:
          A: [1]
        """
    )
    assert complaint(text).splitlines() == [
        "job.yaml:1:1: the key 'name' is required",
        "job.yaml:1:1: unknown key 'nam', did you mean 'name'?",
        "job.yaml:4:17: retry.max_attempts: must be at least 1, not 0",
        "job.yaml:5:29: resources.procs_per_node: must be at least 1, not -1",
        "job.yaml:5:33: resources: unknown key 'nodez', did you mean 'nodes'?",
        "job.yaml:7:6: env.A: expected one value, not a list",
    ]
    with pytest.raises(SpecProblems) as caught:
        job_files.load(text)
    assert [problem.where for problem in caught.value.problems][-1] == "job.yaml:7:6"


def test_long_values_are_cut_in_messages(complaint: Callable[..., str]) -> None:
    text = complaint(OK + f"checkpoint: {{every: {'x' * 500}}}")
    assert text == f"job.yaml:3:21: checkpoint.every: expected a whole number, not '{'x' * 56}..."


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "jobs.yaml")
    assert str(caught.value) == f"{tmp_path}/jobs.yaml: there is no such job file"


def test_directory_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a directory, not a job file"):
        load_job(tmp_path)


def test_a_script_stands_for_a_job_file_with_the_code_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import torch\n")
    for here, given, script, workdir in (
        (tmp_path, "src/train.py", "src/train.py", tmp_path),
        (tmp_path / "src", "train.py", "train.py", tmp_path / "src"),
        (tmp_path / "src", "../src/train.py", "train.py", tmp_path / "src"),
        (Path("/"), str(tmp_path / "src" / "train.py"), str(tmp_path / "src" / "train.py")[1:], Path("/")),
        (Path("/proc"), str(tmp_path / "src" / "train.py"), "train.py", tmp_path / "src"),
    ):
        monkeypatch.chdir(here)
        loaded = load_job(given)
        assert (loaded.spec.name, loaded.spec.script, loaded.workdir.resolve()) == ("train", script, workdir.resolve())


def test_script_that_links_out_of_the_workdir_is_refused(job_files, complaint: Callable[..., str]) -> None:
    outside = job_files.directory.parent / "outside.py"
    outside.write_text("")
    (job_files.directory / "link.py").symlink_to(outside)
    assert complaint("name: x\nscript: link.py") == (
        "job.yaml:2:9: script: 'link.py' is a link to a file outside the workdir: only the workdir travels to the nodes"
    )


@pytest.fixture
def private_parts() -> Iterator[Path]:
    """A job file that can be read, with a workdir and a second job file that cannot, for any user but root."""
    import orc.launchers.spec.problems  # noqa: F401 - imported before the change of user

    directory = Path(tempfile.mkdtemp(prefix="orc-test-"))
    directory.chmod(0o755)
    (directory / "job.yaml").write_text("name: x\nworkdir: src\nscript: train.py\n")
    (directory / "closed.yaml").write_text("name: x\n")
    (directory / "src").mkdir()
    (directory / "src" / "train.py").write_text("")
    (directory / "src").chmod(0)
    (directory / "closed.yaml").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield directory
    finally:
        if root:
            os.seteuid(0)
        (directory / "src").chmod(0o700)
        shutil.rmtree(directory)


def test_unreadable_workdir_is_named(private_parts: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(private_parts / "job.yaml")
    assert str(caught.value) == (
        f"{private_parts}/job.yaml:2:10: workdir: {private_parts}/src cannot be read: Permission denied"
    )


def test_workdir_that_cannot_be_entered_is_named(private_parts: Path) -> None:
    if os.geteuid() == 65534:
        os.seteuid(0)
        (private_parts / "src").chmod(0o444)
        os.seteuid(65534)
    else:
        (private_parts / "src").chmod(0o444)
    with pytest.raises(SpecError) as caught:
        load_job(private_parts / "job.yaml")
    assert (
        str(caught.value) == f"{private_parts}/job.yaml:3:9: script: 'train.py' cannot be looked up: Permission denied"
    )


def test_unreadable_job_file_is_named(private_parts: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(private_parts / "closed.yaml")
    assert str(caught.value) == f"{private_parts}/closed.yaml: the job file cannot be read: Permission denied"
