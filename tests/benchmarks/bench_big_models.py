"""Loading and running a model that is larger than its device, against Accelerate and against plain mapped weights.

    python tests/benchmarks/bench_big_models.py [GIBIBYTES]

``load``: an empty model gets its weights from a safetensors file, for the CPU; ``half``: half of the layers are for
the disk; ``forward``: a pass with all layers on the disk. The files are in the page cache. Mapped weights are read by
whoever uses them first, so ``load and run`` has the first pass in it too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Row, compare, report, seconds
from safetensors.torch import load_file, save_file
from torch import nn

import orc.runtime as ours

TURNS = 5
LAYERS = 16


def empty(width: int) -> nn.Module:
    """A model of linear layers on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def main() -> None:
    """Measure and print."""
    gibibytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    width = int((gibibytes * 2**30 / 4 / LAYERS) ** 0.5)
    torch.set_grad_enabled(False)
    names = [str(layer) for layer in range(LAYERS)]
    half = {name: "cpu" if int(name) < LAYERS // 2 else "disk" for name in names}
    disk = dict.fromkeys(names, "disk") | {"0": "cpu"}  # the peer loads nothing that is for the disk alone
    x = torch.randn(1, width)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"  # the peer takes text only
        save_file({f"{name}.weight": torch.randn(width, width) / width**0.5 for name in names}, file, {"format": "pt"})

        def load(package: Any, places: dict[str, str], run: bool = False) -> nn.Module:
            more = {} if package is ours else {"offload_folder": f"{folder}/away"}
            model: nn.Module = package.load_checkpoint_and_dispatch(empty(width), file, device_map=places, **more)
            if run:
                model(x)
            return model

        def timed(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
            return lambda: seconds(partial(function, *args))

        rows: list[Row] = []
        mine = load(ours, disk)
        try:
            import accelerate as peer
        except ImportError:
            pass
        else:
            name = "Accelerate"
            theirs = load(peer, disk)
            whole = {"": "cpu"}
            rows += [
                compare(
                    "load to the CPU",
                    name,
                    timed(load, ours, whole),
                    timed(load, peer, whole),
                    budget=0.15,
                    turns=TURNS,
                ),
                compare(
                    "load, half for the disk",
                    name,
                    timed(load, ours, half),
                    timed(load, peer, half),
                    budget=0.03,
                    turns=TURNS,
                ),
                compare(
                    "load and run, half on the disk",
                    name,
                    timed(load, ours, half, True),
                    timed(load, peer, half, True),
                    budget=None,
                    turns=TURNS,
                ),
                compare(
                    "forward, nearly all on the disk", name, timed(mine, x), timed(theirs, x), budget=0.1, turns=TURNS
                ),
            ]
        mapped = empty(width)
        mapped.load_state_dict(load_file(file), assign=True)
        rows.append(
            compare(
                "forward, all on the disk", "mapped weights", timed(mine, x), timed(mapped, x), budget=1.1, turns=11
            )
        )
        report(rows)


if __name__ == "__main__":
    main()
