"""The tutorial on training runs as it stands, in order, on one process and on two."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/tutorials/train-a-model.md"


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 4)])
def test_the_tutorial_runs(run_ranks, tmp_path, world, accumulate):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5

    def script(directory):
        namespace = {"__name__": "tutorial"}
        printed = io.StringIO()
        with contextlib.chdir(directory), contextlib.redirect_stdout(printed):
            for block in blocks:
                exec(compile(block, PAGE.name, "exec"), namespace)
        return printed.getvalue()

    env = {"ORC_GRADIENT_ACCUMULATION_STEPS": str(accumulate)}
    first, *others = run_ranks(world, script, str(tmp_path), env=env)
    assert others == [""] * (world - 1)
    lines = first.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["epoch 0", "epoch 1", "epoch 2"]
    assert float(lines[-1].split()[-1]) > 0.8
    assert sorted(path.name for path in (tmp_path / "points/checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert (tmp_path / "points/model/model.safetensors").is_file()
