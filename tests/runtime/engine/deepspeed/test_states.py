"""States of DeepSpeed's checkpoints: what their files may not do."""

import pytest
import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.engine.deepspeed.states import restore


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_file_of_a_universal_checkpoint_runs_nothing(tmp_path):
    class Universal:
        """DeepSpeed's engine, as far as it matters: it reads these files past its checkpoint engine."""

        checkpoint_engine = None

        def load_universal_checkpoint(self):
            return True

        def load_checkpoint(self, directory, **options):
            return directory, torch.load(f"{directory}/fp32.pt", weights_only=False)

    torch.save({"param": Trap(str(tmp_path / "sprung"))}, tmp_path / "fp32.pt")
    with pytest.raises(CheckpointError, match="cannot be loaded by DeepSpeed"):
        restore(Universal(), tmp_path)
    assert not (tmp_path / "sprung").exists()
