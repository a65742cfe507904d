"""Self-test of a machine or a cluster: ``python -m orc.runtime.self_test`` on every rank; `orc test` starts it.

Each check runs on all ranks and holds when it holds on each. Rank 0 prints a line for each; with ``--result FILE`` it
writes them as JSON, with ``--print-result`` it prints that after the word `RESULT`. The exit status is 1 when a check
has failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from orc.runtime import Accelerator, PartialState, broadcast_object_list, gather_object, set_seed

RESULT = "orc-test-result "
SAMPLES, BATCH, STEPS = 37, 4, 6


def check_state(accelerator: Accelerator) -> str:
    """Ranks are counted as they were started, each on a device of its own."""
    state = PartialState()
    mine = (state.process_index, state.local_process_index, str(state.device), accelerator.state.ctx.node_rank)
    places = gather_object([mine])
    _equal([rank for rank, *_ in places], list(range(state.num_processes)), "ranks")
    if "WORLD_SIZE" in os.environ:
        _equal(state.num_processes, int(os.environ["WORLD_SIZE"]), "processes")
    devices = {(node, device) for _, _, device, node in places}
    if state.device.type == "cuda":
        _equal(len(devices), len(places), "devices in use")
    nodes = len({node for *_, node in places})
    backend = accelerator.state.ctx.backend or "no process group"
    return f"{_count(len(places), 'process', 'es')} on {_count(nodes, 'node')}, {state.device.type}, {backend}"


def check_data(accelerator: Accelerator) -> str:
    """Every sample reaches exactly one rank, in the order of one process."""
    samples: Any = torch.arange(SAMPLES)  # anything with a length and items
    loader = accelerator.prepare(torch.utils.data.DataLoader(samples, batch_size=BATCH))
    seen = [accelerator.gather_for_metrics(batch) for batch in loader]
    _equal(torch.cat(seen).tolist(), list(range(SAMPLES)), "samples")
    return f"{SAMPLES} samples in {len(seen)} steps, each once"


def check_collectives(accelerator: Accelerator) -> str:
    """Tensors and objects travel as they should."""
    count, rank = accelerator.num_processes, accelerator.process_index
    one = torch.full((2,), float(rank), device=accelerator.device)
    _equal(accelerator.gather(one).tolist(), [float(r) for r in range(count) for _ in range(2)], "gather")
    _equal(accelerator.reduce(one, "sum").tolist(), [count * (count - 1) / 2] * 2, "reduce")
    _equal(accelerator.reduce(one, "mean").tolist(), [(count - 1) / 2] * 2, "mean")
    uneven = torch.ones(rank + 1, device=accelerator.device)
    _equal(accelerator.pad_across_processes(uneven).shape[0], count, "pad_across_processes")
    _equal(gather_object([{"rank": rank}]), [{"rank": r} for r in range(count)], "gather_object")
    words = ["from the main process"] if rank == 0 else [""]
    _equal(broadcast_object_list(words)[0], "from the main process", "broadcast_object_list")
    accelerator.wait_for_everyone()
    return "gather, reduce, mean, pad, objects, barrier"


def check_training(accelerator: Accelerator) -> str:
    """Training on all ranks gives the weights that one process gets from the whole batches."""
    generator = torch.Generator().manual_seed(7)
    per_step = BATCH * accelerator.num_processes
    inputs = torch.randn(STEPS * per_step, 8, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    reference, trained = _model(), _model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for begin in range(0, len(inputs), per_step):
        inputs_of, targets_of = data[begin : begin + per_step]
        torch.nn.functional.mse_loss(reference(inputs_of), targets_of).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, own, loader = accelerator.prepare(
        trained, torch.optim.SGD(trained.parameters(), lr=0.05), torch.utils.data.DataLoader(data, batch_size=BATCH)
    )
    loss = torch.zeros(())
    for batch, targets in loader:
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        own.step()
        own.zero_grad()
    got = accelerator.unwrap_model(model).state_dict()
    apart = max((got[name].cpu() - value).abs().max().item() for name, value in reference.state_dict().items())
    if not apart < 1e-4:
        raise AssertionError(f"weights differ from those of one process by {apart:g}")
    return f"{STEPS} steps, loss {loss.item():.3f}, weights as in one process (within {apart:.0e})"


def check_saving(accelerator: Accelerator) -> str:
    """Check that load_state restores on every rank what save_state has written."""
    folder = os.environ.get("ORC_CHECKPOINT_DIR") or (tempfile.mkdtemp() if accelerator.is_main_process else "")
    place = Path(broadcast_object_list([folder])[0], "orc-test")
    source = _model()
    model, optimizer = accelerator.prepare(source, torch.optim.AdamW(source.parameters()))
    model(torch.ones(1, 8, device=accelerator.device)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    accelerator.save_state(str(place))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(place))
    for name, value in accelerator.unwrap_model(model).state_dict().items():
        if not torch.equal(value, before[name]):
            raise AssertionError(f"{name} came back changed from {place}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        import shutil

        shutil.rmtree(place, ignore_errors=True)
        if not os.environ.get("ORC_CHECKPOINT_DIR"):
            shutil.rmtree(folder, ignore_errors=True)
    return f"model and optimizer, in {place.parent}"


CHECKS: dict[str, Callable[[Accelerator], str]] = {
    "state": check_state,
    "data": check_data,
    "collectives": check_collectives,
    "training": check_training,
    "save and load": check_saving,
}


def main() -> int:
    """Run all checks and return the exit status."""
    began = time.monotonic()
    accelerator = Accelerator(mixed_precision="no")
    results = [_result("start", began, [f"torch {torch.__version__}, Python {sys.version.split()[0]}"], [])]
    _tell(accelerator, results[-1])
    for name, check in CHECKS.items():
        set_seed(0)
        began = time.monotonic()
        said, errors = "", ""
        try:
            said = check(accelerator)
        except Exception as error:  # noqa: BLE001 (reported with the rank)
            errors = f"rank {accelerator.process_index}: {type(error).__name__}: {error}"
        accelerator.free_memory()
        results.append(_result(name, began, [said], [text for text in gather_object([errors]) if text]))
        _tell(accelerator, results[-1])
    ok = all(result["ok"] for result in results)
    if accelerator.is_main_process:
        told = {"ok": ok, "processes": accelerator.num_processes, "checks": results}
        if "--result" in sys.argv:  # and a file
            Path(sys.argv[sys.argv.index("--result") + 1]).write_text(json.dumps(told))
        elif "--print-result" in sys.argv:
            print(RESULT + json.dumps(told), flush=True)  # noqa: T201
    accelerator.end_training()
    return 0 if ok else 1


def _result(name: str, began: float, said: list[str], errors: list[str]) -> dict[str, Any]:
    seconds = round(time.monotonic() - began, 3)
    return {"check": name, "ok": not errors, "seconds": seconds, "what": "; ".join(errors or said)}


def _tell(accelerator: Accelerator, result: dict[str, Any]) -> None:
    if accelerator.is_main_process:
        word = "ok" if result["ok"] else "FAILED"
        print(f"{word:6} {result['check']:14} {result['seconds']:7.3f} s  {result['what']}", flush=True)  # noqa: T201


def _model() -> torch.nn.Module:
    set_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural * (number != 1)}"


def _equal(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found}, not {wanted}")


if __name__ == "__main__":
    sys.exit(main())
