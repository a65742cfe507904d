"""Sweeps, arrays and pipelines become ordinary jobs; what is wrong with them is said at its line."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orc.launchers.errors import SpecError
from orc.launchers.spec import load_job
from orc.launchers.spec.groups import LoadedGroup, cycle, load_jobs


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, *overrides: str, cluster: str | None = None):
        (tmp_path / "job.yaml").write_text("name: digits\ncommand: 'true'\n" + dedent(text))
        return load_jobs(tmp_path / "job.yaml", overrides, cluster=cluster)

    return load


@pytest.fixture
def pipeline(tmp_path: Path):
    def load(text: str, *overrides: str, cluster: str | None = None):
        (tmp_path / "pipeline.yaml").write_text(dedent(text))
        return load_jobs(tmp_path / "pipeline.yaml", overrides, cluster=cluster)

    return load


def parameters(group: LoadedGroup) -> list[dict[str, str]]:
    return [dict(member.parameters) for member in group.members]


def test_a_grid_makes_a_job_for_every_combination(load):
    group = load(
        """
        tags: {run: 'lr ${job.args.lr}'}
        sweep:
          grid:
            args.lr: [1e-4, 0.10]
            resources.nodes: [1, 2]
        max_parallel: 3
        """
    )
    assert (group.kind, group.name, group.max_parallel) == ("sweep", "digits", 3)
    assert [(spec.args, spec.resources.nodes) for spec in group.specs] == [
        (("--lr", "1e-4"), 1),  # as written: nobody wants 0.0001 there
        (("--lr", "1e-4"), 2),
        (("--lr", "0.10"), 1),
        (("--lr", "0.10"), 2),
    ]
    assert group.specs[2].tags == {"run": "lr 0.10", "args.lr": "0.10", "resources.nodes": "1"}
    assert group.specs[3].env["ORC_ARRAY_TASK_ID"] == "3"
    assert all(spec.sweep is None and spec.max_parallel is None for spec in group.specs)


@pytest.mark.parametrize(
    "text",
    [
        "sweep: {list: {args.lr: [1, 2], env.SEED: [007, 8]}}",
        "sweep: {list: [{args.lr: 1, env.SEED: 007}, {args.lr: 2, env.SEED: 8}]}",
    ],
)
def test_a_list_goes_through_its_entries_side_by_side(load, text):
    assert [(spec.args, spec.env["SEED"]) for spec in load(text).specs] == [
        (("--lr", "1"), "007"),
        (("--lr", "2"), "8"),
    ]


RANDOM = """
sweep:
  random:
    count: 50
    seed: {seed}
    parameters:
      args.lr: {{log_uniform: [1.0e-5, 1.0e-2]}}
      args.dropout: {{uniform: [0, 0.5]}}
      args.layers: {{int: [2, 4]}}
      args.optimizer: {{choice: [sgd, adam]}}
"""


def test_a_random_sweep_draws_the_same_values_for_the_same_seed(load):
    first, again, other = (parameters(load(RANDOM.format(seed=seed))) for seed in (7, 7, 8))
    assert first == again != other
    assert first[0] == {
        "args.lr": "9.3648e-05", "args.dropout": "0.0754246", "args.layers": "3", "args.optimizer": "sgd",
    }  # fmt: skip
    assert all(1e-5 <= float(one["args.lr"]) <= 1e-2 and float(one["args.dropout"]) <= 0.5 for one in first)
    assert {one["args.layers"] for one in first} == {"2", "3", "4"}
    assert {one["args.optimizer"] for one in first} == {"sgd", "adam"}


def test_an_array_has_the_variables_that_slurm_people_know(load):
    group = load("array: 1-7:3\nenv: {A: b}")
    assert group.kind == "array"
    assert [member.number for member in group.members] == [1, 4, 7]
    assert group.specs[1].env == {
        "A": "b",
        "ORC_ARRAY_TASK_ID": "4",
        "ORC_ARRAY_TASK_COUNT": "3",
        "ORC_ARRAY_TASK_MIN": "1",
        "ORC_ARRAY_TASK_MAX": "7",
    }
    assert [member.number for member in load("", "array=3").members] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep: {grid: {args.a: [1, 2], args.b: [1, 2]}, limit: 3}", "makes 4 jobs, more than 3"),
        ("sweep: {grid: {cluster: [a, b]}}", "cluster is the same for all members"),
        ("sweep: {grid: {args.lr: []}}", "sweep.grid"),
        ("sweep: {grid: {args.lr: [1]}, random: {count: 1, parameters: {args.x: {int: [1, 2]}}}}", "exactly one of"),
        ("sweep: {list: {args.a: [1], args.b: [1, 2]}}", "of one length: args.a has 1, args.b has 2"),
        ("sweep: {random: {count: 1, parameters: {args.x: {log_uniform: [0, 1]}}}}", "above 0"),
        ("sweep: {random: {count: 1, parameters: {args.x: {uniform: [2, 1]}}}}", "low < high"),
        ("sweep: {grid: {resorces.nodes: [1]}}", "did you mean 'resources'"),
        ("sweep: {grid: {resources.nodes: [0]}}", "resources.nodes"),
        ("sweep: {grid: {args.a: [1]}}\narray: 3", "only one of sweep and array"),
        ("array: 0", "expected 1 to 10000 jobs"),
        ("array: 5-1", "names no indices"),
        ("array: 1,1", "twice"),
        ("depends_on: train-abc:sucess", "did you mean 'success'?"),
        ("depends_on: [a, 'a:any']", "named twice"),
        ("inputs: {model: train}", "write JOB.OUTPUT"),
        ("outputs: {model: ../x}", "below the working directory"),
        ("outputs: {a-b: x, a_b: y}", "ORC_INPUT_A_B"),
    ],
)
def test_what_makes_no_group_is_refused_with_its_place(load, text, said):
    with pytest.raises(SpecError) as caught:
        load(text)
    assert said in caught.value.what
    assert "job.yaml:" in f"{caught.value.where}{caught.value.what}"


PIPELINE = """
name: digits
env: {A: shared, B: shared}
max_parallel: 2
jobs:
  prepare:
    command: make data
    outputs: {data: out/data.txt}
  train:
    command: make train
    env: {B: own}
    inputs: {data: prepare.data}
    outputs: {model: checkpoint.dir}
  report:
    name: the report
    command: make report
    depends_on: [train:any, prepare]
"""


def test_the_jobs_of_a_pipeline_share_what_stands_beside_them(pipeline):
    group = pipeline(PIPELINE)
    assert (group.kind, group.name, group.max_parallel) == ("pipeline", "digits", 2)
    assert [(member.stage, member.loaded.spec.name) for member in group.members] == [
        ("prepare", "digits-prepare"), ("train", "digits-train"), ("report", "the report"),
    ]  # fmt: skip
    prepare, train, report = group.specs
    assert train.env == {"A": "shared", "B": "own"}
    assert prepare.env == {"A": "shared", "B": "shared"}
    assert prepare.outputs == {"data": "out/data.txt"}
    assert report.depends_on == ("train:any", "prepare:success")


def test_an_option_for_the_cluster_goes_over_all_jobs_of_a_pipeline(pipeline):
    text = PIPELINE.replace("command: make data", "command: make data\n    cluster: elsewhere")
    assert [spec.cluster for spec in pipeline(text, cluster="here").specs] == ["here"] * 3
    assert pipeline(text, "jobs.train.env.B=9").specs[1].env["B"] == "9"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("prepare.data}", "prepare.dat}"), "prepare has no output 'dat', did you mean 'data'?"),
        (("prepare.data}", "prepar.data}"), "no job 'prepar' in this pipeline, did you mean 'prepare'?"),
        (("[train:any, prepare]", "[trian]"), "no job 'trian' in this pipeline, did you mean 'train'?"),
        (("[train:any, prepare]", "report"), "depends on itself"),
        (("command: make data", "command: make data\n    depends_on: report"), "prepare -> report -> "),
        (("command: make data", "comand: make data"), "unknown key 'comand', did you mean 'command'?"),
        (("command: make data", "command: make data\n    array: 3"), "is one job"),
        (("max_parallel: 2", "max_parallel: two"), "a whole number"),
        (("  report:", "  -x:"), "is no name of a job"),
        (("max_parallel: 2", "sweep: {grid: {args.x: [1]}}"), "sweep"),
    ],
)
def test_what_makes_no_pipeline_is_refused_with_its_place(pipeline, change, said):
    with pytest.raises(SpecError) as caught:
        pipeline(PIPELINE.replace(*change))
    assert said in caught.value.what
    assert "pipeline.yaml:" in f"{caught.value.where}{caught.value.what}"


def test_a_pipeline_is_no_job(pipeline, tmp_path):
    pipeline(PIPELINE)
    with pytest.raises(SpecError, match="is a pipeline of several jobs"):
        load_job(tmp_path / "pipeline.yaml")


NAMES = st.sampled_from("abcdefg")


@given(st.dictionaries(NAMES, st.lists(NAMES, max_size=3), max_size=7))
def test_a_circle_is_found_exactly_where_no_order_exists(before):
    circle = cycle(before)
    if circle:
        assert all(following in before[job] for job, following in zip(circle, [*circle[1:], circle[0]], strict=True))
    else:
        known = {job: {other for other in waits if other in before} for job, waits in before.items()}
        assert set(TopologicalSorter(known).static_order()) == set(before)  # raises where there is a circle
