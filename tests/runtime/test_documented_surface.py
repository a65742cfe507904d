"""Attributes, state after calls and small functions of the documented API that libraries reach for."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import orc.runtime
from orc.runtime import (
    Accelerator,
    AcceleratorState,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GeneralTracker,
    PartialState,
    PrecisionType,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model,
    load_checkpoint_in_model,
    reduce,
    register_tracker_class,
)
from orc.runtime.testing import run_threads


@pytest.mark.parametrize("enum", [DistributedType, DynamoBackend, PrecisionType])
def test_enumerations_list_their_values(enum):
    assert enum.list() == [str(member) for member in enum]
    assert all(type(value) is str for value in enum.list())


@pytest.mark.parametrize("name", sorted(orc.runtime._DOCUMENTED_MODULES))
def test_documented_modules_need_no_import_of_their_own(name):
    assert getattr(orc.runtime, name) is importlib.import_module(f"orc.runtime.{name}")


def test_documented_modules_of_utilities_need_no_import_of_their_own():
    code = (
        "import orc.runtime; u = orc.runtime.utils; print(u.deepspeed.__name__, u.environment.__name__, u.operations)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["orc.runtime.utils.deepspeed", "orc.runtime.utils.environment"]
    assert "module 'orc.runtime.utils.operations'" in done.stdout


def test_attributes_of_a_run_of_one_process():
    accelerator = Accelerator(cpu=True)
    assert accelerator.deepspeed_config is None
    assert (accelerator.is_fsdp2, accelerator.multi_device, accelerator.has_lomo_optimizer) == (False, False, False)
    assert accelerator.should_save_model
    ranks = ("data_parallel_rank", "data_parallel_shard_rank", "tensor_parallel_rank", "context_parallel_rank")
    assert [getattr(accelerator, name) for name in ranks] == [0, 0, 0, 0]


def test_views_of_a_state_that_was_reset_say_so_until_there_is_another():
    Accelerator(cpu=True)
    state, partial = AcceleratorState(), PartialState()
    assert (state.mixed_precision, partial.initialized) == ("no", True)
    AcceleratorState._reset_state(True)
    for view, name in ((state, "mixed_precision"), (partial, "device"), (partial, "num_processes")):
        with pytest.raises(AttributeError, match=rf"no attribute `{name}`.*Make an `Accelerator`"):
            getattr(view, name)
        assert not hasattr(view, name)
    assert not partial.initialized
    Accelerator(cpu=True)
    assert (state.mixed_precision, str(partial.device), partial.initialized) == ("no", "cpu", True)


def test_a_script_switches_the_comparison_of_operands_on():
    state = PartialState(cpu=True)
    assert not state.debug
    state.debug = True
    assert PartialState().debug
    with pytest.raises(AttributeError, match="read-only"):
        state.device = "cuda"


def _extremes():
    accelerator = Accelerator()
    rank = accelerator.process_index
    values = {"a": torch.tensor([rank, -rank]), "b": [torch.tensor(float(rank)), torch.tensor(rank == 1)]}
    return reduce(values, "max"), accelerator.reduce(values, "min")


def test_extremes_over_the_processes_are_reductions():
    for largest, smallest in run_threads(3, _extremes):
        assert (largest["a"].tolist(), smallest["a"].tolist()) == ([2, 0], [0, -2])
        assert [value.item() for value in largest["b"]] == [2.0, True]
        assert [value.item() for value in smallest["b"]] == [0.0, False]
        assert largest["b"][1].dtype == torch.bool


def test_prepared_loaders_say_what_they_are_and_survive_pickling():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2, num_workers=2, drop_last=True))
    assert (loader.iteration, loader.use_stateful_dataloader, loader.drop_last) == (0, False, True)
    assert loader.gradient_state.num_steps == 1
    taken = [batch.tolist() for batch, _ in zip(loader, range(2), strict=False)]
    assert taken == [[0, 1], [2, 3]]
    loader.load_state_dict({**loader.state_dict()})
    twin = pickle.loads(pickle.dumps(loader))
    assert (twin.num_workers, twin.batch_size, len(twin)) == (2, 2, 6)
    assert [batch.tolist() for batch in twin] == [batch.tolist() for batch in loader]
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.device == accelerator.device
    for state in (accelerator.state, accelerator.gradient_state, PartialState()):
        for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert (type(other), repr(other)) == (type(state), repr(state))


def test_units_of_fsdp_2_can_be_asked_for():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [name for name, module in model.named_modules() if policy(module)] == ["0", "1.0"]
    with pytest.raises(ValueError, match="fsdp_version=2"):
        fsdp2_prepare_model(Accelerator(cpu=True), model)


def test_a_registered_tracker_is_named_in_log_with():
    logged = []

    @register_tracker_class
    class Lines(GeneralTracker):
        name = "lines"
        requires_logging_directory = False
        main_process_only = True

        def __init__(self, project, mark=""):
            super().__init__()
            self.project, self.mark = project, mark

        @property
        def tracker(self):
            return logged

        def store_init_configuration(self, values):
            logged.append(values)

        def log(self, values, step=None, **kwargs):
            logged.append((self.project, self.mark, values, step))

    accelerator = Accelerator(cpu=True, log_with="lines")
    accelerator.init_trackers("mine", init_kwargs={"lines": {"mark": "!"}})
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    assert logged == [("mine", "!", {"loss": 1.0}, 3)]
    with pytest.raises(TypeError, match="no subclass of GeneralTracker"):
        register_tracker_class(dict)
    with pytest.raises(ValueError, match="a name of its own"):
        register_tracker_class(type("Copy", (Lines,), {"name": "wandb"}))


def test_a_checkpoint_that_is_not_there_is_a_wrong_value(tmp_path):
    for load in (Accelerator().load_state, lambda place: load_checkpoint_in_model(torch.nn.Linear(1, 1), place)):
        with pytest.raises(ValueError, match="there is no such checkpoint"):
            load(tmp_path / "elsewhere")
