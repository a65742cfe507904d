"""The reference pages are true: their examples load, their messages are the real ones, and no key is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from orc.launchers.backends.ssh import settings as ssh_settings
from orc.launchers.commands import build_command
from orc.launchers.plugins import COMMANDS
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster, load_clusters
from orc.launchers.spec.grammar import DERIVED_ENV
from orc.launchers.spec.options import keys_of, section_at
from orc.runtime.core.config import JOB_KEYS

_OF_HOSTS = (ssh_settings.Options, ssh_settings.Host, ssh_settings.JobOptions)
REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (REFERENCE / page).read_text(), re.MULTILINE | re.DOTALL)


def keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The dotted names of all keys of a model, sections with their own model included."""
    found = set()
    for key in keys_of(model):
        found.add(prefix + key)
        if section := section_at(model, (key,)):
            found |= keys(section, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("page", ["job-yaml.md", "commands.md"])
def test_every_example_is_a_job(page: str, job_files: Any) -> None:
    examples = blocks(page, "yaml")
    assert len(examples) >= 2
    for example in examples:
        base = "" if "name:" in example.splitlines()[0] else "name: x\nscript: train.py\n"
        job = job_files.load(base + example).spec
        assert job.script == "train.py"
        build_command(job)


def test_the_annotated_example_says_everything(job_files: Any) -> None:
    full = max(blocks("job-yaml.md", "yaml"), key=len)
    job = job_files.load(full, env={"USER": "ada"}).spec
    assert set(keys_of(JobSpec)) == set(re.findall(r"^(?:# )?([a-z_]+):", full, re.MULTILINE))
    assert job.args == ("--lr", "1e-4", "--epochs", "10", "--augment", "--classes", "0", "1", "2")
    assert job.env == {"HF_HOME": "/scratch/ada/hf", "RUN_NAME": "digits-2nodes"}
    assert (job.resources.time_s, job.resources.memory, job.runtime["seed"]) == (5400, "4G", 1)


def test_the_example_of_flags_gives_the_words_it_says(job_files: Any) -> None:
    text = (REFERENCE / "job-yaml.md").read_text()
    (example,) = [block for block in blocks("job-yaml.md", "yaml") if "pattern" in block and "on_log" not in block]
    words = re.search(r"gives `(--lr 1e-4 .*?)`", text)
    assert words
    assert " ".join(job_files.load(f"name: x\nscript: train.py\n{example}").spec.args) == words[1]


def test_the_tables_have_every_key() -> None:
    listed = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", (REFERENCE / "job-yaml.md").read_text(), re.MULTILINE))
    sections = {"resources", "checkpoint", "retry"}
    assert listed == (keys(JobSpec) - sections) | set(JOB_KEYS)
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", (REFERENCE / "clusters-yaml.md").read_text(), re.MULTILINE)
    listed = {key for row in rows for key in re.findall(r"[a-z_]+", row)}
    clusters = set(keys_of(Cluster)) - {"name"}
    hosts = {key for kind in _OF_HOSTS for key in keys_of(kind)}
    assert listed == clusters | hosts
    text = (REFERENCE / "commands.md").read_text()
    assert set(re.findall(r"^## ([a-z]+)$", text, re.MULTILINE)) == set(COMMANDS.kinds())


def test_derived_variables_are_named() -> None:
    text = (REFERENCE / "job-yaml.md").read_text()
    assert all(f"`{name}`" in text for name in DERIVED_ENV if not name.startswith("ORC_"))


def test_the_messages_are_the_real_ones(job_files: Any) -> None:
    (expected,) = blocks("job-yaml.md", "text")
    text = "name: x\nresources:\n  nodez: 1\n  procs_per_node: 0\nscript: train.py\n"
    assert job_files.complaint(text) == expected.rstrip("\n")


def test_the_override_examples_work(job_files: Any) -> None:
    (line,) = blocks("job-yaml.md", "console")
    overrides = [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']*)'|(\S+))", line)]
    job = job_files.load("name: x\nscript: train.py\n", overrides).spec
    assert (job.resources.nodes, job.args, job.retry.on) == (4, ("--lr", "3e-4"), ("crash", "preempted"))


def test_the_clusters_example_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    example, with_accounts = blocks("clusters-yaml.md", "yaml")
    path = tmp_path / "clusters.yaml"
    path.write_text(with_accounts)
    assert load_clusters(path)["lab"].run_as["grace"].user == "hopper"
    path.write_text(example)
    clusters = load_clusters(path)
    assert list(clusters) == ["local", "lab"]
    assert clusters["lab"].root == "/shared/ada/orc"
    assert clusters["local"].env == {"OMP_NUM_THREADS": "2"}
    (expected,) = blocks("clusters-yaml.md", "text")
    (tmp_path / "wrong.yaml").write_text("lab:\n  kind: slrum\n")
    with pytest.raises(Exception, match="unknown kind") as caught:
        load_clusters(tmp_path / "wrong.yaml")
    assert str(caught.value) == f"{tmp_path}/{expected.rstrip()}".replace("clusters.yaml", "wrong.yaml")
