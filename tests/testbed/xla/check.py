"""`orc.runtime` over a real torch_xla on the CPU; run by ``up.sh``. Exits with 1 when something is not as it should be.

One process trains with and without torch_xla: the same losses. What torch_xla cannot do on the CPU is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__)
REFUSED = {
    "two processes of torchrun": "2 processes were launched with PJRT_DEVICE=CPU",
    "SPMD": "SPMD mode of torch_xla is on",
}


def train() -> None:
    """Everything that one process does, in the device that the environment says; the results as JSON."""
    import torch
    from safetensors.torch import load_file
    from torch import nn

    from orc.runtime import Accelerator, set_seed

    set_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=os.environ.get("PRECISION"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)  # before the model moves
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    data = torch.arange(256.0).reshape(32, 8).sin()
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer, scheduler, loader, model = accelerator.prepare(optimizer, scheduler, loader, model)
    losses = []
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
        if epoch == 1:
            accelerator.save_state(os.environ["STATE"])
            kept = accelerator.reduce(model[0].weight.detach().clone()).cpu()
    accelerator.save(model.state_dict(), os.environ["STATE"] + ".bin")
    accelerator.save_model(model, os.environ["STATE"] + "-model")
    final = accelerator.unwrap_model(model)[0].weight.detach().cpu()
    written = torch.load(os.environ["STATE"] + ".bin")["0.weight"]
    exported = load_file(os.environ["STATE"] + "-model/model.safetensors")
    accelerator.load_state(os.environ["STATE"])
    print(
        json.dumps(
            {
                "device": str(accelerator.device),
                "type": str(accelerator.distributed_type),
                "tied": model[0].weight is model[2].weight,
                "restored": bool(torch.equal(model[0].weight.detach().cpu(), kept)),
                "saved": [str(written.device), bool(torch.equal(written, final))],
                "exported": bool(torch.equal(exported["0.weight"], final))
                and sorted(exported) == ["0.weight", "2.weight"],
                "losses": losses,
            }
        )
    )


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program with this Python, and these variables besides."""
    with tempfile.TemporaryDirectory() as directory:
        return subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "STATE": f"{directory}/state", **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def result(**env: str) -> dict[str, object]:
    """What `train` prints."""
    done = run(str(HERE), "train", **env)
    if done.returncode:
        sys.exit(f"training with {env} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """All comparisons."""
    failures = []

    def expect(what: str, good: bool, seen: object) -> None:
        print(f"{'ok  ' if good else 'FAIL'} {what}: {seen}")
        if not good:
            failures.append(what)

    through, plain = result(PJRT_DEVICE="CPU"), result(ORC_USE_CPU="1")
    expect("device", (through["device"], through["type"]) == ("xla:0", "XLA"), (through["device"], through["type"]))
    gap = max(abs(one - other) for one, other in zip(through["losses"], plain["losses"], strict=True))  # type: ignore[call-overload]
    expect(f"largest difference of {len(plain['losses'])} losses", gap < 1e-5, gap)  # type: ignore[arg-type]
    expect("tied weights stay tied", bool(through["tied"]), through["tied"])
    expect("load_state brings back what save_state saw", bool(through["restored"]), through["restored"])
    expect("save writes the weights from the CPU", through["saved"] == ["cpu", True], through["saved"])
    expect("save_model writes all weights", bool(through["exported"]), through["exported"])
    half = result(PJRT_DEVICE="CPU", PRECISION="bf16")["losses"]
    gap = max(abs(one - other) for one, other in zip(half, plain["losses"], strict=True))  # type: ignore[call-overload]
    expect("bf16 is another precision, and trains", 0 < gap < 0.2, gap)
    commands = {
        "two processes of torchrun": run(
            *("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29617"), str(HERE), "train",
            PJRT_DEVICE="CPU",
        ),
        "SPMD": run(str(HERE), "train", PJRT_DEVICE="CPU", XLA_USE_SPMD="1"),
    }  # fmt: skip
    for what, done in commands.items():
        line = next((line for line in done.stderr.splitlines() if "LaunchError: " in line), done.stderr[-500:])
        expect(f"{what} refused", done.returncode != 0 and REFUSED[what] in line, line)
    if failures:
        sys.exit(f"{len(failures)} of the checks failed")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
