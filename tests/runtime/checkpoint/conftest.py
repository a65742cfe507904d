"""A small training run to save and load."""

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, ProjectConfiguration
from orc.runtime.checkpoint.storage import s3
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


@pytest.fixture(scope="module")
def s3_server():
    """The address of a server that speaks the protocol of S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3_store(s3_server, monkeypatch):
    """S3 with an empty bucket called bucket."""
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    for name, value in (("ENDPOINT_URL", s3_server), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3._client.cache_clear()
    system, _ = s3.open_url("s3://bucket")
    system._client.create_bucket(Bucket="bucket")
    yield system
    s3._client.cache_clear()


@pytest.fixture
def memory_store():
    """The empty memory file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
