"""Named clusters, and complaints about the file that names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_plans import SNAPSHOT

from orc.launchers.backends import open_backend
from orc.launchers.errors import SpecError
from orc.launchers.ids import AttemptId
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster, get_cluster, load_clusters

GOOD = """\
slurm:
  kind: slurm
  root: /scratch/${env:WHO}/orc
  python: /opt/python/bin/python
  env: {HF_HOME: /scratch/hf, VERSION: 1.10}
  setup: [module load cuda, "true"]
  options: {partition: gpu, gres: {gpu: 4}}
lab: {kind: local, root: ~/orc}
"""


@pytest.fixture
def clusters_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a clusters file that is used by default; the test writes it."""
    path = tmp_path / "clusters.yaml"
    monkeypatch.setenv("ORC_CLUSTERS", str(path))
    return path


def test_this_machine_needs_no_configuration(orc_home: Path) -> None:
    assert load_clusters() == {"local": Cluster(name="local", kind="local")}
    assert open_backend(get_cluster("local")).root == str(orc_home / "state")
    assert not (orc_home / "state").exists()


def test_clusters_are_read_in_order(clusters_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "ada")
    monkeypatch.setenv("HOME", "/home/ada")
    clusters_yaml.write_text(GOOD)
    clusters = load_clusters()
    assert list(clusters) == ["local", "slurm", "lab"]
    assert clusters["slurm"] == Cluster(
        name="slurm",
        kind="slurm",
        root="/scratch/ada/orc",
        python="/opt/python/bin/python",
        env={"HF_HOME": "/scratch/hf", "VERSION": "1.10"},
        setup=("module load cuda", "true"),
        options={"partition": "gpu", "gres": {"gpu": 4}},
    )
    assert open_backend(clusters["lab"]).root == "/home/ada/orc"


def test_local_can_be_adjusted(clusters_yaml: Path, orc_home: Path) -> None:
    clusters_yaml.write_text("local: {env: {OMP_NUM_THREADS: 2}, options: {max_procs: 8}}\n")
    local = get_cluster("local")
    assert (local.kind, local.env, local.root) == ("local", {"OMP_NUM_THREADS": "2"}, None)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_names_no_clusters(text: str, clusters_yaml: Path) -> None:
    clusters_yaml.write_text(text)
    assert list(load_clusters()) == ["local"]


def test_the_file_in_the_configuration_directory_is_used(orc_home: Path) -> None:
    (orc_home / "config").mkdir(parents=True)
    (orc_home / "config" / "clusters.yaml").write_text("lab: {kind: local}\n")
    assert get_cluster("lab").kind == "local"


def test_unknown_cluster_names_the_known_and_the_nearest(clusters_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "ada")
    clusters_yaml.write_text(GOOD)
    with pytest.raises(SpecError) as caught:
        get_cluster("slrum")
    assert str(caught.value) == (
        f"unknown cluster 'slrum', did you mean 'slurm'?\n"
        f"  known clusters: lab, local, slurm; define others in {clusters_yaml}"
    )


def test_a_file_that_was_asked_for_must_exist(clusters_yaml: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such clusters file"):
        load_clusters()
    with pytest.raises(SpecError, match="there is no such clusters file"):
        load_clusters(tmp_path / "other.yaml")


WRONG = {
    "no kind": ("lab: {root: /x}", "{file}:1:6: lab: the key 'kind' is required"),
    "unknown kind": ("lab:\n  kind: slrum", "{file}:2:9: lab.kind: unknown kind 'slrum', did you mean 'slurm'?"),
    "unknown key": ("lab:\n  kind: local\n  rot: /x", "{file}:3:3: lab: unknown key 'rot', did you mean 'root'?"),
    "relative root": ("lab: {kind: local, root: x}", "{file}:1:26: lab.root: 'x' is not an absolute path"),
    "list in env": ("lab: {kind: local, env: {A: [1]}}", "{file}:1:29: lab.env.A: expected one value, not a list"),
    "no mapping": ("lab: local", "{file}:1:1: lab: expected a mapping such as {{kind: slurm, root: /shared/orc}}"),
    "bad name": (
        "a/b: {kind: local}",
        "{file}:1:1: a/b: a cluster's name is made of letters, digits, dots, dashes and underscores, 63 at most",
    ),
    "another's account": (
        "lab: {kind: ssh, run_as: grace}",
        "{file}:1:26: lab.run_as: expected `service` or a mapping of users to their accounts, not 'grace'",
    ),
    "no login name": (
        "lab: {kind: ssh, run_as: {ada: '-x y', bob: {usr: b}}}",
        "{file}:1:32: lab.run_as.ada.user: '-x y' is not the name of a user\n"
        "{file}:1:45: lab.run_as.bob.user: field required\n"
        "{file}:1:51: lab.run_as.bob.usr: an account has user, root and options",
    ),
    "name inside": ("lab: {kind: local, name: x}", "{file}:1:1: lab: a cluster's name is its key; remove `name`"),
    "other local": (
        "local: {kind: slurm}",
        "{file}:1:1: local: the cluster local is built in and stays of kind local; choose another name",
    ),
    "unset variable": (
        "a: {kind: local, root: '/x/${env:NO_SUCH_VARIABLE}'}",
        "{file}:1:24: a.root: the environment variable NO_SUCH_VARIABLE is not set; set it, or write"
        " ${{env:NO_SUCH_VARIABLE:-default}}",
    ),
    "job reference": (
        "a: {kind: local, root: '/x/${job.name}'}",
        "{file}:1:24: a.root: ${{job.name}} has a meaning in job files only",
    ),
    "unknown key in a section": (
        "lab:\n  kind: ssh\n  environment: {kind: venv}",
        "{file}:3:17: lab.environment: unknown key 'kind'; known are venv, conda, copy, container, none",
    ),
    "several": (
        "a: {kind: local, rot: 1}\nb: {}",
        "{file}:1:18: a: unknown key 'rot', did you mean 'root'?\n{file}:2:4: b: the key 'kind' is required",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_complaints_name_the_place(case: str, clusters_yaml: Path) -> None:
    text, expected = WRONG[case]
    clusters_yaml.write_text(text + "\n")
    with pytest.raises(SpecError) as caught:
        load_clusters()
    assert str(caught.value) == expected.format(file=clusters_yaml)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("slurm", "partitoin: gpu", "clusters.yaml:4:5: unknown key 'partitoin', did you mean 'partition'?"),
        ("slurm", "query_timeout: soon", "clusters.yaml:4:20: query_timeout: "),
        (
            "ssh",
            "hosts: [{name: a, slotz: 1}]",
            "clusters.yaml:4:23: hosts[0]: unknown key 'slotz', did you mean 'slots'?",
        ),
    ],
)
def test_mistakes_in_the_options_of_a_kind_are_named_with_their_place(
    clusters_yaml: Path, kind: str, options: str, said: str
) -> None:
    clusters_yaml.write_text(f"lab:\n  kind: {kind}\n  options:\n    {options}\n")

    def render() -> None:
        open_backend(get_cluster("lab")).render(JobSpec(name="x", script="x"), SNAPSHOT, AttemptId("x-000000", 1))

    with pytest.raises(SpecError) as caught:
        render()
    assert said in str(caught.value)
