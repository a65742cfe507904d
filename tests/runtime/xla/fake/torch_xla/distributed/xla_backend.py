"""``torch_xla.distributed.xla_backend``: importing it makes ``init_method="xla://"`` known."""

import datetime
import os

import torch.distributed as dist

from torch_xla import note, ordinal, world


def _meet(url, timeout=datetime.timedelta(seconds=60), **kwargs):
    note("xla://", "launched by torchrun or orc" if dist.is_torchelastic_launched() else "")
    size = int(os.environ.get("WORLD_SIZE") or world())
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, ordinal() == 0, timeout)
    yield store, ordinal(), size


dist.register_rendezvous_handler("xla", _meet)
