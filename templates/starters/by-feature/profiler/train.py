"""Profile a few steps of a training: which operators take the time, and a trace file for each process.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

Open `traces/profile_0.json` in Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Expected: steps recorded = 3
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, ProfileKwargs, set_seed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default="traces", help="a directory for the trace files")
    args = parser.parse_args()

    recorded = []
    options = ProfileKwargs(
        activities=["cpu"],  # leave this out to record all there is, GPUs too
        # The first steps are not typical: skip five, wait for one, warm up for one, record three, and never again.
        schedule_option={"skip_first": 5, "wait": 1, "warmup": 1, "active": 3, "repeat": 1},
        on_trace_ready=lambda profiler: recorded.extend(
            event for event in profiler.events() if event.name.startswith("ProfilerStep")
        ),
        record_shapes=True,
        profile_memory=True,
        output_trace_dir=args.traces,
    )
    accelerator = Accelerator(kwargs_handlers=[options])
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with accelerator.profile() as profiler:  # all processes enter and leave it together
        for images, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()  # the schedule counts these

    table = profiler.key_averages(group_by_input_shape=True).table(sort_by="self_cpu_time_total", row_limit=8)
    accelerator.print(table)
    accelerator.print(f"steps recorded {len(recorded)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
