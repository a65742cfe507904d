"""``--set key.path=VALUE`` and ``--cluster``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OK = "name: digits\nscript: train.py\nresources: {nodes: 2}\n"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("resources.nodes=4", "resources.nodes", 4),
        ("resources.nodes=2:4", "resources.nodes", "2:4"),
        ("resources.time=1:30:00", "resources.time", "1:30:00"),
        ("resources.options.slurm.partition=gpu", "resources.options", {"slurm": {"partition": "gpu"}}),
        ("resources={nodes: 3, gpus_per_node: 2}", "resources.gpus_per_node", 2),
        ("name=007", "name", "007"),
        ("env.X=", "env", {"X": ""}),
        ("env.X=1.10", "env", {"X": "1.10"}),
        ("env.X=a=b", "env", {"X": "a=b"}),
        ("args.lr=1e-4", "args", ("--lr", "1e-4")),
        ("args=[--lr, 0.10]", "args", ("--lr", "0.10")),
        ("args={verbose: true}", "args", ("--verbose",)),
        ("launcher.kind=python", "launcher.kind", "python"),
        ("launcher=python", "launcher.kind", "python"),
        ("retry.on=crash", "retry.on", ("crash",)),
        ("retry.on=[crash, timeout]", "retry.on", ("crash", "timeout")),
        ("runtime.mixed_precision=no", "runtime", {"mixed_precision": "no"}),
        ("runtime.seed=3", "runtime", {"seed": 3}),
        ("resources.nodes=", "resources.nodes", 1),
        ("resources.nodes=null", "resources.nodes", 1),
        ("cluster=", "cluster", "local"),
        ("workdir=", "workdir.path", "."),
        ("checkpoint.dir=", "checkpoint.dir", None),
        ("tags.team=${job.name}", "tags", {"team": "digits"}),
        ("resources.procs_per_node=${env:N}", "resources.procs_per_node", 6),
    ],
)
def test_values_are_read_as_in_the_file(override: str, path: str, value: object, job_files: Any) -> None:
    found = job_files.load(OK, [override], env={"N": "6"}).spec
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_one_program_takes_the_place_of_another(job_files: Any) -> None:
    job = job_files.load(OK, ["script=", "module=my.train"]).spec
    assert (job.script, job.module) == (None, "my.train")


def test_later_overrides_win_and_the_cluster_goes_over_all(job_files: Any) -> None:
    overrides = ["resources.nodes=3", "resources.nodes=5", "cluster=one"]
    job = job_files.load(OK + "cluster: zero\n", overrides, cluster="two").spec
    assert (job.resources.nodes, job.cluster) == (5, "two")


def test_short_forms_in_the_file_become_long_when_a_part_is_set(job_files: Any) -> None:
    (job_files.directory / "src").mkdir()
    (job_files.directory / "src" / "train.py").write_text("")
    job = job_files.load(
        OK + "workdir: src\nlauncher: torchrun\n", ["workdir.exclude=['*.pt']", "launcher.options.role=x"]
    )
    assert (job.spec.workdir.path, job.spec.workdir.exclude) == ("src", ("*.pt",))
    assert (job.spec.launcher.kind, job.spec.launcher.options) == ("torchrun", {"role": "x"})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("resources.nodes=0", "--set resources.nodes=0: resources.nodes: a job needs at least 1 node, not 0"),
        ("resources.nodez=4", "--set resources.nodez=4: resources: unknown key 'nodez', did you mean 'nodes'?"),
        ("nodes=4", "--set nodes=4: unknown key 'nodes', did you mean resources.nodes?"),
        ("resources", "--set resources: expected key.path=VALUE\n  for example --set resources.nodes=4"),
        ("=4", "--set =4: expected key.path=VALUE\n  for example --set resources.nodes=4"),
        (".nodes=4", "--set .nodes=4: expected key.path=VALUE\n  for example --set resources.nodes=4"),
        (
            "resources..nodes=4",
            "--set resources..nodes=4: expected key.path=VALUE\n  for example --set resources.nodes=4",
        ),
        ("name.x=4", "--set name.x=4: name is not a mapping, so name.x cannot be set"),
        ("script=nope.py", "--set script=nope.py: script: there is no file 'nope.py' in {cwd}"),
        ("retry.on=[crash, cash]", "--set retry.on=[crash, cash]: retry.on[1]: expected"),
        ("env.A=[", "--set env.A=[: not valid YAML: while parsing a flow node, did not find"),
        ("env.A=" + "x" * 200 + "\0", "--set env.A=" + "x" * 71 + "...: contains a control character"),
        ("env.A=\udcff", r"'--set env.A=\udcff': the override is not valid UTF-8"),
        ("tags={a: 1, a: 2}", "--set tags={a: 1, a: 2}: duplicate key 'a'"),
    ],
)
def test_complaints_name_the_override(
    override: str, expected: str, job_files: Any, complaint: Callable[..., str]
) -> None:
    assert complaint(OK, [override]).startswith(expected.replace("{cwd}", str(job_files.directory)))


def test_complaints_about_the_file_come_before_those_about_overrides(complaint: Callable[..., str]) -> None:
    lines = complaint(OK + "retry: {max_attempts: 0}\n", ["resources.nodes=0"]).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["job.yaml:4:23", "--set resources.nodes=0"]
