"""orc's own commands start training that uses the GPU: in the foreground, and as a job of the local cluster."""

import json
import subprocess
import textwrap

import pytest

TRAIN = """
    import json, sys, torch
    from orc.runtime import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    inputs = torch.randn(64, 8, device=accelerator.device)
    losses = []
    for _ in range(20):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    answer = {"device": str(accelerator.device), "ranks": accelerator.num_processes, "losses": [losses[0], losses[-1]]}
    print("ANSWER " + json.dumps(answer), flush=True)
    accelerator.end_training()
"""


@pytest.fixture
def orc(orc_command, tmp_path):
    """``orc(*arguments)``: the output of that command, run beside a ``train.py``."""
    command, env = orc_command
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text(textwrap.dedent(TRAIN))

    def run(*arguments):
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run


def trained_on(output, device):
    (line,) = [line for line in output.splitlines() if "ANSWER " in line]
    answer = json.loads(line.partition("ANSWER ")[2])
    assert answer["device"] == str(device)
    assert answer["ranks"] == 1
    assert answer["losses"][1] < answer["losses"][0] / 2


def test_orc_launch_trains_on_the_device(orc, device):
    trained_on(orc("launch", "-n", "1", "train.py"), device)


def test_a_job_of_the_local_cluster_trains_on_the_gpu_that_it_asked_for(orc, device, tmp_path):
    pytest.importorskip("alembic", reason="a ledger needs orc's own dependencies")
    gpus = 1 if device.type == "cuda" else 0
    (tmp_path / "work/job.yaml").write_text(
        f"name: gpu\nscript: train.py\nlauncher: python\nresources: {{nodes: 1, gpus_per_node: {gpus}}}\n"
    )
    trained_on(orc("submit", "job.yaml", "--follow"), device)
