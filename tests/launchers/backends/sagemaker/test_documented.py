"""The pages about SageMaker say what the code does: every row is compared, and the examples are rendered."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from pydantic.fields import FieldInfo

from orc.launchers.backends.sagemaker.estimators import load_estimator
from orc.launchers.backends.sagemaker.settings import ALIASES, CLUSTER_KEYS, ELSEWHERE, JOB_KEYS, REFUSED, read_settings
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(scope="module")
def sections() -> dict[str, list[list[str]]]:
    """The tables of the reference page: the cells of each row, by heading."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in (DOCS / "reference" / "sagemaker-options.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("| `"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def _default(field: FieldInfo) -> str:
    value = field.default
    if value in (None, (), {}):
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(("heading", "known"), [("For clusters", CLUSTER_KEYS), ("For jobs", JOB_KEYS)])
def test_every_key_is_in_the_reference_with_what_becomes_of_it(heading, known, sections) -> None:
    rows = {row[0].strip("`"): row[1:] for row in sections[heading] if len(row) == 4}
    assert list(rows) == list(known)
    for name, (default, becomes, meaning) in rows.items():
        assert (becomes, meaning) == (known[name].json_schema_extra["becomes"], known[name].description), name
        assert default.strip("`") == _default(known[name]), name


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Arguments of estimators that have another place", ELSEWHERE),
        ("Arguments of estimators that cannot be carried", REFUSED),
        ("Other names", {name: f"`{proper}`" for name, proper in ALIASES.items()}),
    ],
)
def test_every_argument_is_in_the_reference_with_its_place_or_reason(heading, known, sections) -> None:
    rows = {row[0].strip("`"): row[1] for row in sections[heading]}
    special = {"compute_environment", "additional_args", "debug"}
    assert {name: text for name, text in rows.items() if name not in special} == known


def blocks(page: str, kind: str) -> list[str]:
    return [part.split("```")[0] for part in (DOCS / page).read_text().split(f"```{kind}\n")[1:]]


def test_the_examples_of_the_how_to_can_be_sent(plan, tmp_path) -> None:
    cluster, job, spot = (yaml.safe_load(block) for block in blocks("how-to/sagemaker.md", "yaml"))
    given = Cluster(name="sagemaker", **cluster["sagemaker"])
    spec = JobSpec.model_validate(job)
    found = read_settings(given, spec)
    assert (found.instance_type, found.role, found.max_run) == ("ml.g5.12xlarge", "training", 12 * 3600)
    options = {"role": None, "instance_type": None, **cluster["sagemaker"]["options"]}
    made = plan(job["resources"]["options"]["sagemaker"], options, args=job["args"], resources={"nodes": 2})
    assert made.commands
    assert plan(spot["additional_args"]).commands
    (inputs,) = (yaml.safe_load(block) for block in blocks("reference/sagemaker-options.md", "yaml"))
    assert plan({**inputs, "subnets": "subnet-1", "security_group_ids": "sg-1"}).commands
    (program,) = (block for block in blocks("how-to/sagemaker.md", "python") if "submit_estimator" in block)
    (call,) = [n for n in ast.walk(ast.parse(program)) if isinstance(n, ast.Call) and n.args and n.keywords]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    arguments = {**ast.literal_eval(call.args[0]), "source_dir": str(tmp_path / "src")}
    channels = ast.literal_eval(next(word.value for word in call.keywords if word.arg == "inputs"))
    loaded = load_estimator(arguments, given, inputs=channels)
    assert read_settings(given, loaded.spec).use_spot_instances
