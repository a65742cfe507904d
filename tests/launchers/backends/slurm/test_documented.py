"""The reference page lists every option with its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orc.launchers.backends.slurm.options import SlurmOptions, SlurmSettings, read_options, read_settings
from orc.launchers.backends.slurm.script import components
from orc.launchers.remote.ssh.routes import HostSpec
from orc.launchers.spec import JobSpec

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize(("name", "field"), [*SlurmOptions.model_fields.items(), *SlurmSettings.model_fields.items()])
def test_every_option_is_in_the_reference(name, field) -> None:
    page = (DOCS / "reference" / "slurm-options.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert field.description in row


def test_the_examples_of_the_how_to_are_valid() -> None:
    import yaml

    blocks = (DOCS / "how-to" / "slurm.md").read_text().split("```yaml\n")[1:]
    cluster, laptop, job, longer, sorts = (yaml.safe_load(block.split("```")[0]) for block in blocks)
    read_settings(cluster["hpc"]["options"])
    login = read_settings(laptop["hpc"]["options"]).login
    assert login is not None
    assert login.spec() == HostSpec("login.hpc.example.org", user="me")
    spec = JobSpec.model_validate({"name": "x", "script": "train.py", **job})
    options = read_options(cluster["hpc"]["options"], spec.resources.options["slurm"])
    assert (options.account, options.partition, options.gpu_type) == ("research", "gpu", "a100")
    longer["retry"]["on"] = longer["retry"].pop(True)  # what plain YAML takes `on` for; job files are read otherwise
    long = JobSpec.model_validate({"name": "x", "script": "train.py", **longer})
    assert ("timeout" in long.retry.on, long.resources.time_s) == (True, 86400)
    several = JobSpec.model_validate({"name": "x", "script": "train.py", **sorts})
    found = components(several, read_options({}, several.resources.options["slurm"]))
    assert [(part.resources.nodes, part.resources.nproc, own.partition) for part, own in found] == [
        (1, 2, "cpu"),
        (2, 2, "gpu"),
    ]


def test_the_functions_of_the_how_to_do_what_it_says(orc_home: Path) -> None:
    blocks = [
        part.split("```")[0] for part in (DOCS / "how-to" / "python-functions.md").read_text().split("```python\n")
    ]
    said: list[object] = []
    exec(blocks[1], {"print": said.append, "__name__": "__main__"})
    assert said == [12.0]
    names: dict[str, Any] = {}
    exec(blocks[4], names)
    count = names["Count"]()
    assert count.checkpoint(3).function is count
    assert count(3) == 3
