"""The state classes: views of one context per process."""

import pytest
import torch

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    ContextError,
    DataLoaderConfiguration,
    GradientState,
    PartialState,
    RunContext,
    current_context,
    use_context,
)
from orc.runtime.core.environment import LaunchEnvironment


def a_context(**changes):
    fields = {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "device": torch.device("cpu"),
        "backend": None,
        "env": LaunchEnvironment("test"),
    }
    return RunContext(**(fields | changes))


def test_all_views_show_one_context():
    first = PartialState()
    assert first.ctx is PartialState().ctx is AcceleratorState().ctx is Accelerator().ctx is current_context()
    assert GradientState().ctx is first.ctx


def test_states_are_read_only():
    for state in (PartialState(), AcceleratorState(), GradientState()):
        with pytest.raises(AttributeError, match="read-only"):
            state.device = "cuda"


def test_reset_makes_a_new_context():
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    AcceleratorState._reset_state()
    second = Accelerator(mixed_precision="no")
    assert second.ctx is not first.ctx
    assert (second.mixed_precision, second.gradient_accumulation_steps) == ("no", 1)


def test_reset_without_the_process_part_frees_the_settings():
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    AcceleratorState._reset_state(False)
    second = Accelerator(mixed_precision="no")
    assert second.ctx is first.ctx
    assert (second.mixed_precision, second.gradient_accumulation_steps) == ("no", 1)


def test_gradient_state_reset():
    Accelerator(gradient_accumulation_steps=4).sync_gradients = False
    GradientState._reset_state()
    state = GradientState()
    assert (state.num_steps, state.sync_gradients, state.remainder, state.in_dataloader) == (1, True, -1, False)


def test_a_context_can_take_the_place_of_the_default():
    default = current_context()
    with use_context(a_context(rank=2, world_size=3, local_rank=2, local_world_size=3)) as context:
        assert current_context() is context
        assert (Accelerator().process_index, PartialState().is_last_process) == (2, True)
    assert current_context() is default


def test_settings_belong_to_accelerator_state():
    PartialState()
    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"
    assert Accelerator().mixed_precision == "bf16"
    with pytest.raises(ContextError, match="cannot become 'fp16'"):
        AcceleratorState(mixed_precision="fp16")


def test_cpu_contradicting_the_device_is_refused():
    with (
        use_context(a_context(device=torch.device("cuda", 0))),
        pytest.raises(ContextError, match="already computes on cuda:0"),
    ):
        Accelerator(cpu=True)


def test_a_collective_without_a_group_is_refused():
    with (
        use_context(a_context(world_size=2, local_world_size=2)),
        pytest.raises(ContextError, match="needs the process group of 2 processes"),
    ):
        Accelerator().wait_for_everyone()


def test_the_printed_state_of_one_process():
    assert str(AcceleratorState()).splitlines() == [
        "Distributed environment: NO",
        "Num processes: 1",
        "Process index: 0",
        "Local process index: 0",
        "Device: cpu",
        "Mixed precision type: no",
    ]
    assert "Gradient accumulation steps: 1" in str(GradientState())


@pytest.mark.distributed
def test_a_group_that_the_script_opened_is_used_and_left_open(run_ranks):
    def body():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        accelerator = Accelerator()
        gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        accelerator.end_training()
        return gathered, dist.is_initialized()

    assert run_ranks(2, body) == [([0, 1], True)] * 2


@pytest.mark.distributed
def test_the_context_survives_a_reset_with_its_group(run_ranks):
    def body():
        Accelerator(mixed_precision="bf16")
        AcceleratorState._reset_state()
        accelerator = Accelerator()
        return accelerator.mixed_precision, accelerator.gather(torch.tensor([accelerator.process_index])).tolist()

    assert run_ranks(2, body) == [("no", [0, 1])] * 2


@pytest.mark.distributed
def test_the_context_holds_group_store_and_place(run_ranks):
    def body():
        ctx = current_context()
        if ctx.is_main:
            ctx.store.set("greeting", "hello")
        return ctx.store.get("greeting"), ctx.backend, str(ctx.control_device), ctx.node_rank, ctx.env.platform

    assert run_ranks(4, body, nodes=2) == [
        (b"hello", "gloo", "cpu", 0, "torchrun"),
        (b"hello", "gloo", "cpu", 0, "torchrun"),
        (b"hello", "gloo", "cpu", 1, "torchrun"),
        (b"hello", "gloo", "cpu", 1, "torchrun"),
    ]


@pytest.mark.distributed
def test_end_training_closes_the_group_that_the_runtime_opened(run_ranks):
    def body():
        import torch.distributed as dist

        from orc.runtime import wait_for_everyone

        accelerator = Accelerator()
        wait_for_everyone()
        accelerator.end_training()
        accelerator.end_training()
        closed = not dist.is_initialized()
        gathered = []
        for precision in ("bf16", "no"):  # one script may train more than once
            AcceleratorState._reset_state()
            again = Accelerator(mixed_precision=precision)
            gathered.append(again.gather(torch.tensor([again.process_index])).tolist())
            again.end_training()
        return closed, gathered

    assert run_ranks(2, body) == [(True, [[0, 1], [0, 1]])] * 2


def test_plug_ins_of_later_engines_are_absent_and_asking_for_one_is_an_error():
    state = AcceleratorState()
    assert (state.deepspeed_plugin, state.fsdp_plugin, state.megatron_lm_plugin) == (None, None, None)
    for method in (state.get_deepspeed_plugin, state.select_deepspeed_plugin):
        with pytest.raises(ContextError, match="no DeepSpeed plug-in 'student'"):
            method("student")


def test_the_shared_state_tells_libraries_whether_the_process_is_set_up():
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == AcceleratorState._shared_state == GradientState._shared_state == {}
    PartialState()
    assert PartialState._shared_state["num_processes"] == 1
    assert AcceleratorState._shared_state == {}
    accelerator = Accelerator(mixed_precision="bf16")
    assert AcceleratorState._shared_state["mixed_precision"] == "bf16"
    accelerator.gradient_state._set_sync_gradients(False)
    assert (accelerator.sync_gradients, GradientState().sync_gradients) == (False, False)
    assert PartialState().default_device.type in ("cpu", "cuda", "mps", "xpu")


def test_the_options_of_loaders_can_be_set_before_preparing():
    accelerator = Accelerator()
    accelerator.dataloader_config.dispatch_batches = False
    accelerator.use_seedable_sampler = True
    assert (accelerator.dispatch_batches, accelerator.dataloader_config.use_seedable_sampler) == (False, True)
    accelerator.dataloader_config = DataLoaderConfiguration(data_seed=4)
    assert (accelerator.dispatch_batches, accelerator.dataloader_config.data_seed) == (None, 4)
    assert accelerator.parallelism_config is None
