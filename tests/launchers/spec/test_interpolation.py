"""References in job files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OK = "name: digits\nscript: train.py\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${env:USER}", "ada"),
        ("${env:USER:-bob}", "ada"),
        ("${env:NOBODY:-bob}", "bob"),
        ("${env:EMPTY:-bob}", "bob"),
        ("${env:EMPTY}", ""),
        ("${env:NOBODY:-}", ""),
        ("${env:NOBODY:-a:-b}", "a:-b"),
        ("${job.name}-${job.cluster}", "digits-local"),
        ("${job.resources.nodes}x${job.resources.gpus_per_node}", "1x0"),
        ("${job.args.lr}", "1e-4"),
        ("${job.env.OTHER}!", "digits!"),
        ("${job.setup.1}", "second"),
        ("${job.runtime.debug_mode}", "true"),
        ("$HOME ${HOME} ${HOME:-x} $(date) $$", "$HOME ${HOME} ${HOME:-x} $(date) $$"),
        ("$${env:USER} $${job.name} $${HOME}", "${env:USER} ${job.name} ${HOME}"),
        ("${env.USER} ${jobs.name}", "${env.USER} ${jobs.name}"),
        ("${env:MONEY}", "${env:USER} $5"),
    ],
)
def test_references_are_replaced_and_shell_variables_are_not(text: str, value: str, job_files: Any) -> None:
    job = job_files.load(
        OK
        + f"env:\n  OTHER: ${{job.name}}\n  X: {text}\n"
        + "args: {lr: 1e-4}\nsetup: [first, second]\nruntime: {debug_mode: true}\n",
        env={"USER": "ada", "EMPTY": "", "MONEY": "${env:USER} $5"},
    ).spec
    assert job.env["X"] == value


def test_every_text_of_the_job_can_hold_references(job_files: Any) -> None:
    (job_files.directory / "ada.py").write_text("")
    job = job_files.load(
        """
name: ${env:WHO}-run
script: ${env:WHO}.py
args: ["${env:WHO}", {}]
""".replace(", {}", "")
        + """
setup: echo ${env:WHO}
cluster: ${env:WHO}
checkpoint: {dir: "/scratch/${env:WHO}/${job.name}"}
tags: {who: "${env:WHO}"}
resources: {options: {slurm: {account: "${env:WHO}"}}}
""",
        env={"WHO": "ada"},
    ).spec
    assert (job.name, job.script, job.args, job.setup, job.cluster) == (
        "ada-run",
        "ada.py",
        ("ada",),
        ("echo ada",),
        "ada",
    )
    assert (job.checkpoint.dir, job.tags) == ("/scratch/ada/ada-run", {"who": "ada"})
    assert job.resources.options == {"slurm": {"account": "ada"}}


def test_references_expand_to_a_bounded_size(complaint: Callable[..., str]) -> None:
    levels = "".join(f"  A{level}: '{f'${{job.env.A{level - 1}}}' * 10}'\n" for level in range(1, 12))
    said = complaint(f"{OK}env:\n  A0: '0123456789'\n{levels}")
    assert "job.yaml:9:7: the references of the file expand to more than 1 MiB" in said


def test_keys_are_not_touched(complaint: Callable[..., str]) -> None:
    assert "'${env:A}' is not a name" in complaint(OK + 'env:\n  "${env:A}": 1', env={"A": "B"})


@pytest.mark.parametrize("written", ["${env:N}", "'${env:N}'", '"${env:N}"', "${env:M:-4}"])
def test_a_reference_in_a_place_for_numbers_is_a_number(written: str, job_files: Any) -> None:
    job = job_files.load(OK + f"resources:\n  procs_per_node: {written}\n", env={"N": "4"}).spec
    assert job.resources.procs_per_node == 4


def test_flags_decided_by_the_environment(job_files: Any) -> None:
    text = OK + "args:\n  verbose: ${env:V}\n  lr: ${env:LR}\n"
    assert job_files.load(text, env={"V": "true", "LR": "0.10"}).spec.args == ("--verbose", "--lr", "0.10")
    assert job_files.load(text, env={"V": "false", "LR": "0.10"}).spec.args == ("--lr", "0.10")


WRONG = {
    "unset variable": (
        "env:\n  A: x${env:NOPE}",
        "job.yaml:4:6: env.A: the environment variable NOPE is not set; set it, or write ${env:NOPE:-default}",
    ),
    "no name": ("env:\n  A: ${env:}", "job.yaml:4:6: env.A: ${env:} names no environment variable"),
    "bad name": ("env:\n  A: ${env:a-b}", "job.yaml:4:6: env.A: ${env:a-b} names no environment variable"),
    "no brace": ("env:\n  A: ${env:USER", "job.yaml:4:6: env.A: '${env:USER' has no closing brace"),
    "secret": (
        "secrets: [TOKEN]\nenv:\n  A: Bearer ${env:TOKEN}",
        "job.yaml:5:6: env.A: ${env:TOKEN} would copy a secret into the job; a rank reads it as $TOKEN",
    ),
    "unknown key": (
        "env:\n  A: ${job.nam}",
        "job.yaml:4:6: env.A: ${job.nam}: the job has no such key, did you mean 'name'?",
    ),
    "unknown key of a section": (
        "env:\n  A: ${job.resources.node}",
        "job.yaml:4:6: env.A: ${job.resources.node}: the job has no such key, did you mean 'nodes'?",
    ),
    "section": ("env:\n  A: ${job.resources}", "job.yaml:4:6: env.A: ${job.resources} is not one value"),
    "list": ("setup: [a]\nenv:\n  A: ${job.setup}", "job.yaml:5:6: env.A: ${job.setup} is not one value"),
    "key without a value": (
        "env:\n  A: ${job.resources.memory}",
        "job.yaml:4:6: env.A: ${job.resources.memory} has no value",
    ),
    "itself": ("env:\n  A: ${job.env.A}", "job.yaml:4:6: env.A: refers to itself: env.A -> env.A"),
    "circle": (
        "env:\n  A: ${job.env.B}\n  B: ${job.env.A}",
        "job.yaml:4:6: env.A: refers to itself: env.A -> env.B -> env.A\n"
        "job.yaml:5:6: env.B: refers to itself: env.B -> env.A -> env.B",
    ),
    "not a number": (
        "resources:\n  procs_per_node: ${env:USER}",
        "job.yaml:4:19: resources.procs_per_node: expected a whole number, not 'ada'",
    ),
    "bytes that are no text": (
        "env:\n  A: ${env:BYTES}",
        "job.yaml:4:6: env.A: the value of the environment variable BYTES is not valid UTF-8",
    ),
    "endless number": (
        "resources:\n  procs_per_node: ${env:LONG}",
        "job.yaml:4:19: resources.procs_per_node: '" + "9" * 40 + "' is not a number that can be read",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_references_that_lead_nowhere_are_reported(case: str, complaint: Callable[..., str]) -> None:
    text, expected = WRONG[case]
    assert (
        complaint(OK + text, env={"USER": "ada", "TOKEN": "s3cr3t", "LONG": "9" * 5000, "BYTES": "\udcff"}) == expected
    )


def test_long_chains_of_references_are_followed(job_files: Any) -> None:
    lines = [f"  V{n}: ${{job.env.V{n + 1}}}" for n in range(60)]
    assert job_files.load(OK + "env:\n" + "\n".join(lines) + "\n  V60: end\n").spec.env["V0"] == "end"
