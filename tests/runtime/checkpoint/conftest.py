"""A small training run to save and load."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, ProjectConfiguration
from orc.runtime.core.context import reset_default


class Run:
    """A model, an optimizer, a schedule and a shuffled loader, prepared; ``train`` yields after each step."""

    def __init__(self, project_dir=None, seed=0, batch_size=4, samples=24, **options):
        fixed = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(samples, 4, generator=fixed), torch.randn(samples, 1, generator=fixed))
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        project = ProjectConfiguration(project_dir, automatic_checkpoint_naming=project_dir is not None, **options)
        self.accelerator = Accelerator(project_config=project)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.steps = 0

    def train(self, epochs=1):
        for _ in range(epochs):
            for x, y in self.loader:
                loss = (self.model(x) - y).pow(2).mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.steps += 1
                yield self.steps

    def run(self, epochs=1):
        for _ in self.train(epochs):
            pass
        return self

    def state(self):
        """Everything that training consists of, as comparable values."""
        return (
            [parameter.tolist() for parameter in self.model.parameters()],
            [{k: v.tolist() for k, v in state.items()} for state in self.optimizer.state_dict()["state"].values()],
            self.schedule.get_last_lr(),
            torch.get_rng_state().tolist(),
        )


@pytest.fixture
def make_run(monkeypatch):
    """Makes `Run`s in this process, outside of any launch."""
    for name in ("RANK", "WORLD_SIZE", "ORC_CHECKPOINT_DIR", "ORC_CHECKPOINT_EVERY", "ORC_CHECKPOINT_KEEP"):
        monkeypatch.delenv(name, raising=False)
    reset_default()
    yield Run
    reset_default()
