"""How much memory saving and loading need beyond the state itself."""

import subprocess
import sys

SCRIPT = """
import sys, threading, time
import torch
from orc.runtime import Accelerator

import numpy, safetensors.torch  # whose memory is not that of a state

def resident():  # bytes of memory, mapped files included
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

class Peak:
    def __enter__(self):
        self.before = self.peak = resident()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.001):
            self.peak = max(self.peak, resident())
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

class Copy:  # an exponential moving average, say: large, and unknown to the runtime
    def __init__(self): self.weights = torch.zeros(size)
    def state_dict(self): return {"weights": self.weights}
    def load_state_dict(self, state): self.weights = state["weights"]

size = 4_000_000
accelerator = Accelerator()
model = torch.nn.Linear(size // 1000, 1000, bias=False)
optimizer = torch.optim.Adam(model.parameters())
copy = Copy()
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(copy)
if sys.argv[1] != "fresh":
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(sys.argv[2])
with Peak() as peak:
    (accelerator.save_state if sys.argv[1] == "save" else accelerator.load_state)(sys.argv[2])
print((peak.peak - peak.before) / (4 * 4 * size))
"""


def extra(action, directory):
    """Memory at the peak of *action* over that before, in units of the state (model, Adam's moments, a copy)."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, action, str(directory)], capture_output=True, text=True, timeout=120, check=True
    )
    return float(done.stdout)


def test_saving_and_loading_need_little_more_than_the_state(tmp_path):
    assert extra("save", tmp_path / "s") < 0.2
    # The copy of the script's own object is new before the old one goes: a quarter of this state.
    assert extra("load", tmp_path / "s") < 0.25 + 0.2
    # In a new process the optimizer's moments come into being: half of it.
    assert extra("fresh", tmp_path / "s") < 0.75 + 0.2
