"""Nothing is unpickled that no rank of the run has signed."""

import mmap

import pytest

from orc.runtime.collectives.objects import TAG, sign, tag_of, verified
from orc.runtime.core.errors import ContextError

KEYS = [{"ORC_TOKEN": "aa" * 32}, {"ORC_TOKEN": "bb" * 32}]


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_what_was_signed_comes_back():
    assert verified(memoryview(sign(b"content", b"key")), b"key") == b"content"
    assert verified(sign(b"", b""), b"") == b""


def test_an_object_of_more_than_two_gigabytes_can_be_signed():
    with mmap.mmap(-1, (1 << 31) + 1) as zeros:  # pages that are only read take no memory
        assert len(tag_of(zeros, b"key")) == TAG


@pytest.mark.parametrize("message", [b"", b"short", sign(b"content", b"other"), sign(b"content", b"key")[:-1] + b"?"])
def test_anything_else_is_refused(message):
    with pytest.raises(ContextError, match="was not signed by one"):
        verified(message, b"key")


@pytest.mark.distributed
@pytest.mark.parametrize("call", ["gather", "broadcast", "dispatch"])
def test_objects_of_somebody_else_are_not_read(run_ranks, tmp_path, call):
    def exchange(path):
        from torch.utils.data import DataLoader

        from orc.runtime import Accelerator, DataLoaderConfiguration, broadcast_object_list, gather_object

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=call == "dispatch"))
        trap = Trap(path)
        try:
            if call == "gather":
                gather_object([trap])
            elif call == "broadcast":
                broadcast_object_list([trap])
            else:
                data = DataLoader([0, 1, 2, 3], batch_size=1, collate_fn=lambda _: {"trap": Trap(path)})
                next(iter(accelerator.prepare(data)))
        except Exception as error:
            return type(error).__name__
        return None

    path = tmp_path / "sprung"
    said = run_ranks(2, exchange, str(path), env=KEYS)
    assert said[1] == "ContextError"
    assert not path.exists()
