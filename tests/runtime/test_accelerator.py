"""The Accelerator: preparing, unwrapping, metrics, saving, arguments, several in one process."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    AcceleratorState,
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    extract_model_from_parallel,
    use_context,
)


class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def objects():
    model = MyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(torch.ones(4, 2)), LambdaLR(optimizer, lambda step: 1.0)


def test_prepare_returns_everything_in_order():
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = objects()
    result = accelerator.prepare(scheduler, "text", loader, model, None, optimizer)
    assert isinstance(result[0], AcceleratedScheduler)
    assert result[1] == "text"
    assert result[2] is not loader
    assert result[3] is model
    assert result[4] is None
    assert isinstance(result[5], AcceleratedOptimizer)
    assert accelerator.prepare(model) is model


def test_preparing_again_changes_nothing():
    accelerator = Accelerator()
    first = accelerator.prepare(*objects())
    second = accelerator.prepare(*first)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._dataloaders) == 1


def test_device_placement_is_chosen_per_object(monkeypatch):
    accelerator = Accelerator()
    moved = []
    monkeypatch.setattr(MyModel, "to", lambda self, device: moved.append(device) or self)
    model, optimizer, loader, scheduler = objects()
    accelerator.prepare(model, optimizer, loader, scheduler, device_placement=[True, True, False, False])
    assert moved == [torch.device("cpu")]
    assert accelerator._dataloaders[0].device is None
    accelerator.prepare(MyModel(), DataLoader(torch.ones(2, 2)), device_placement=[False, True])
    assert len(moved) == 1
    assert accelerator._dataloaders[1].device == torch.device("cpu")
    with pytest.raises(ValueError, match="device_placement has 1 elements for 2 objects"):
        accelerator.prepare(model, optimizer, device_placement=[True])


def test_device_placement_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(MyModel, "to", lambda self, device: pytest.fail("moved"))
    accelerator = Accelerator(device_placement=False)
    accelerator.prepare(MyModel())
    assert accelerator.prepare(DataLoader(torch.ones(2, 2))).device is None


@pytest.mark.distributed
def test_a_model_becomes_data_parallel_and_back(run_ranks):
    def body():
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        torch.manual_seed(accelerator.process_index)
        model = accelerator.prepare(MyModel())
        inner = accelerator.unwrap_model(model)
        evaluated = accelerator.prepare_model(MyModel(), evaluation_mode=True)
        frozen = accelerator.prepare(MyModel().requires_grad_(False))
        names = type(model).__name__, type(inner).__name__, type(evaluated).__name__, type(frozen).__name__
        keys = list(accelerator.get_state_dict(model)), list(accelerator.get_state_dict(model, unwrap=False))
        weights = accelerator.gather(inner.layer.weight.detach()[None])
        return names, keys, model.find_unused_parameters, torch.equal(weights[0], weights[1])

    names = ("DistributedDataParallel", "MyModel", "MyModel", "MyModel")
    keys = (["layer.weight", "layer.bias"], ["module.layer.weight", "module.layer.bias"])
    assert run_ranks(2, body) == [(names, keys, True, True)] * 2


@pytest.mark.distributed
def test_strategy_none_keeps_replicas_apart(run_ranks):
    def body():
        return type(Accelerator().prepare(MyModel())).__name__

    assert run_ranks(2, body, env={"ORC_STRATEGY": "none"}) == ["MyModel"] * 2


@pytest.mark.distributed
def test_mixed_precision_and_data_parallel_together(run_ranks):
    def body():
        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer = accelerator.prepare(net := MyModel(), torch.optim.SGD(net.parameters(), lr=0.1))
        seen = []
        net.layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        output = model(torch.full((1, 2), 1.0 + accelerator.process_index))
        accelerator.backward(output.sum())
        grads = accelerator.gather(net.layer.weight.grad[None])
        optimizer.step()
        return seen == [torch.bfloat16], output.dtype == torch.float32, torch.equal(grads[0], grads[1])

    assert run_ranks(2, body) == [(True, True, True)] * 2


@pytest.mark.distributed
def test_metrics_drop_repeated_samples(run_ranks):
    """9 samples, batches of 5, two processes: the documented example."""

    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(9), batch_size=5))
        batch = next(iter(loader))
        result = [len(accelerator.gather_for_metrics(batch)), len(accelerator.gather(batch))]
        for batch in loader:
            rows = accelerator.gather_for_metrics({"x": (batch, [batch.float()]), "loss": torch.tensor(1.0)})
            result += [rows["x"][0].tolist(), len(rows["x"][1][0]), len(rows["loss"])]
            result += [accelerator.gather_for_metrics(batch.tolist())]
            result += [accelerator.gather_for_metrics([t[None] for t in batch], use_gather_object=True)[-1].tolist()]
            result += [accelerator.gather_for_metrics({"rank": accelerator.process_index})]
        return result

    samples = list(range(9))
    expected = [9, 10, samples, 9, 2, samples, [8], [{"rank": 0}, {"rank": 1}]]
    assert run_ranks(2, body) == [expected] * 2


def test_attributes_in_one_process(tmp_path):
    accelerator = Accelerator(project_dir=tmp_path, split_batches=True, rng_types=["torch"])
    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type == "NO"
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert (accelerator.mixed_precision, accelerator.sync_gradients, accelerator.use_distributed) == ("no", True, False)
    assert (accelerator.step, accelerator.optimizer_step_was_skipped) == (0, False)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)
    assert (accelerator.split_batches, accelerator.rng_types, accelerator.scaler) == (True, ["torch"], None)
    assert Accelerator().rng_types == ["generator"]


@pytest.mark.distributed
def test_attributes_over_processes(run_ranks):
    def body():
        accelerator = Accelerator(cpu=True)
        return str(accelerator.distributed_type), accelerator.state.backend, repr(accelerator.state)

    zero, one = run_ranks(2, body)
    assert zero[:2] == one[:2] == ("MULTI_CPU", "gloo")
    assert zero[2].splitlines() == [
        "Distributed environment: MULTI_CPU  Backend: gloo",
        "Num processes: 2",
        "Process index: 0",
        "Local process index: 0",
        "Device: cpu",
        "Mixed precision type: no",
    ]


def test_a_second_accelerator_shares_the_first_ones_state():
    first = Accelerator(mixed_precision="bf16")
    second = Accelerator()
    assert second.mixed_precision == "bf16"
    assert second.ctx is first.ctx
    first.prepare(MyModel())
    assert second._models == []


def test_free_memory_starts_over():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*objects())
    for _ in loader:
        with accelerator.accumulate(model):
            break
    assert accelerator.step == 1
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator.step == 0
    assert accelerator._models == accelerator._optimizers == accelerator._schedulers == accelerator._dataloaders == []
    assert accelerator.sync_gradients
    assert accelerator.gradient_state.active_dataloader is None
    again = Accelerator()
    again.prepare(*objects())
    assert again.clear() == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precison": "no"}, TypeError, "no argument 'mixed_precison', did you mean 'mixed_precision'"),
        ({"kwarg_handlers": []}, TypeError, "did you mean 'kwargs_handlers'"),
        ({"fsdp_plugin": object()}, TypeError, "fsdp_plugin is a object, not a FullyShardedDataParallelPlugin"),
        ({"deepspeed_plugin": object()}, TypeError, "DeepSpeedPlugin"),
        ({"deepspeed_plugins": {"student": object()}}, TypeError, "DeepSpeedPlugin"),
        ({"megatron_lm_plugin": object()}, TypeError, "megatron_lm_plugin is a object, not a MegatronLMPlugin"),
        ({"torch_tp_plugin": object()}, TypeError, "torch_tp_plugin is a object"),
        ({"parallelism_config": object()}, TypeError, "not a ParallelismConfig"),
        ({"downcast_bf16": "perhaps"}, ValueError, "downcast_bf16 = 'perhaps': not a truth value"),
        ({"log_with": "tensorbord"}, ValueError, "unsupported tracker 'tensorbord', did you mean 'tensorboard'"),
        ({"log_with": "tensorboard"}, ValueError, "tensorboard requires a `logging_dir`; give Accelerator project_dir"),
        ({"kwargs_handlers": [3]}, TypeError, "3 is not one of AutocastKwargs"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ValueError, "AutocastKwargs is given twice"),
        ({"rng_types": ["numpy"]}, ValueError, "rng_types: 'numpy'"),
        (
            {"split_batches": True, "dataloader_config": DataLoaderConfiguration()},
            ValueError,
            "split_batches is given twice",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        Accelerator(**arguments)


def test_arguments_of_older_releases_still_work_with_a_warning():
    with pytest.warns(FutureWarning, match="older spelling of DataLoaderConfiguration"):
        assert Accelerator(even_batches=False).even_batches is False
    with pytest.warns(FutureWarning, match="older spelling of step_scheduler_with_optimizer"):
        assert Accelerator(step_with_optimizer=False).step_scheduler_with_optimizer is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(dynamo_backend="no", fsdp_plugin=None)


def test_the_accumulation_plugin_may_come_as_a_handler():
    accelerator = Accelerator(kwargs_handlers=[GradientAccumulationPlugin(num_steps=5)])
    assert accelerator.gradient_accumulation_steps == 5
    accelerator.gradient_accumulation_steps = 2
    assert accelerator.gradient_state.num_steps == 2


def test_the_seed_of_the_configuration_is_set(monkeypatch):
    monkeypatch.setenv("ORC_SEED", "7")
    Accelerator()
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3))


def test_register_for_checkpointing_names_what_cannot_be_saved():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"int \(argument 2\) cannot be saved"):
        accelerator.register_for_checkpointing(MyModel(), 3)
    assert accelerator._custom_objects == []
    accelerator.register_for_checkpointing(model := MyModel())
    assert accelerator._custom_objects == [model]


def test_hooks_can_be_removed():
    accelerator = Accelerator()
    handles = (
        accelerator.register_save_state_pre_hook(lambda models, weights, directory: None),
        accelerator.register_load_state_pre_hook(lambda models, directory: None),
    )
    assert len(accelerator._checkpointing.save_hooks) == len(accelerator._checkpointing.load_hooks) == 1
    for handle in handles:
        handle.remove()
    assert len(accelerator._checkpointing.save_hooks) == len(accelerator._checkpointing.load_hooks) == 0


@pytest.mark.distributed
@pytest.mark.parametrize(("each_node", "writers"), [(False, [0]), (True, [0, 2])])
def test_save_writes_once_or_once_per_machine(run_ranks, tmp_path, each_node, writers):
    def body(folder, each_node):
        accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=each_node))
        accelerator.save({"rank": torch.tensor(accelerator.process_index)}, folder / str(accelerator.process_index))
        accelerator.wait_for_everyone()

    run_ranks(4, body, tmp_path, each_node, nodes=2)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == writers


def test_save_as_safetensors_and_load(tmp_path):
    from orc.runtime import load

    accelerator = Accelerator()
    accelerator.save({"w": torch.arange(6).view(2, 3).t()}, tmp_path / "w.safetensors", safe_serialization=True)
    accelerator.save([1, {"a": torch.ones(2)}], tmp_path / "x.bin")
    assert load(tmp_path / "w.safetensors")["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert load(tmp_path / "x.bin")[1]["a"].tolist() == [1, 1]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        accelerator.save(lambda: 0, tmp_path / "bad")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.safetensors", "x.bin"], "nothing half-written is left"


@pytest.mark.distributed
def test_the_whole_loop_trains_alike_on_one_and_two_processes(run_ranks):
    def body():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(32, 2), torch.randn(32, 2))
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        model = MyModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
        for _ in range(2):
            for x, y in loader:
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(model).layer.weight.detach()

    (alone,) = run_ranks(1, body)
    for weights in run_ranks(2, body):
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.distributed
def test_the_timeout_of_collectives_can_be_set(run_ranks):
    def body():
        import time
        from datetime import timedelta

        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=4))])
        if accelerator.is_main_process:
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                accelerator.gather(torch.ones(1))
            return time.monotonic() - started
        return None  # it never comes, but it stays

    seconds, _ = run_ranks(2, body)
    assert seconds > 3.5


def test_the_documented_signature():
    parameters = inspect.signature(Accelerator).parameters
    assert [name for name in parameters if name != "older"] == [
        "device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu",
        "dataloader_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types",
        "log_with", "project_dir", "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer",
        "kwargs_handlers", "dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config",
    ]  # fmt: skip
    defaults = {name: parameters[name].default for name in ("device_placement", "gradient_accumulation_steps", "cpu")}
    assert defaults == {"device_placement": True, "gradient_accumulation_steps": 1, "cpu": False}
    assert parameters["step_scheduler_with_optimizer"].default is True


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("autocast", {"autocast_handler": None}),
        ("clip_grad_norm_", {"parameters": ..., "max_norm": ..., "norm_type": 2}),
        ("clip_grad_value_", {"parameters": ..., "clip_value": ...}),
        ("gather", {"tensor": ...}),
        ("gather_for_metrics", {"input_data": ..., "use_gather_object": False}),
        ("join_uneven_inputs", {"joinables": ..., "even_batches": None}),
        ("lomo_backward", {"loss": ..., "learning_rate": None}),
        (
            "maybe_context_parallel",
            {"buffers": None, "buffer_seq_dims": None, "no_restore_buffers": None},
        ),
        ("on_local_process", {"function": None, "local_process_index": None}),
        ("on_process", {"function": None, "process_index": None}),
        ("pad_across_processes", {"tensor": ..., "dim": 0, "pad_index": 0, "pad_first": False}),
        ("prepare_data_loader", {"data_loader": ..., "device_placement": None, "slice_fn_for_dispatch": None}),
        ("prepare_model", {"model": ..., "device_placement": None, "evaluation_mode": False}),
        ("prepare_optimizer", {"optimizer": ..., "device_placement": None}),
        ("prepare_scheduler", {"scheduler": ...}),
        ("reduce", {"tensor": ..., "reduction": "sum", "scale": 1.0}),
        ("skip_first_batches", {"dataloader": ..., "num_batches": 0}),
        ("split_between_processes", {"inputs": ..., "apply_padding": False}),
        ("trigger_sync_in_backward", {"model": ...}),
        ("unscale_gradients", {"optimizer": None}),
        ("unwrap_model", {"model": ..., "keep_fp32_wrapper": True, "keep_torch_compile": True}),
        ("verify_device_map", {"model": ...}),
    ],
)
def test_the_documented_arguments_of_methods(method, arguments):
    parameters = dict(inspect.signature(getattr(Accelerator, method)).parameters)
    del parameters["self"]
    found = {name: ... if p.default is inspect.Parameter.empty else p.default for name, p in parameters.items()}
    assert (list(found), found) == (list(arguments), arguments)


def test_what_is_prepared_is_not_prepared_again_from_the_original():
    accelerator = Accelerator()
    model, optimizer, _, scheduler = objects()
    first = accelerator.prepare(model, optimizer, scheduler)
    second = accelerator.prepare(model, optimizer, scheduler)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._schedulers) == 1


@pytest.mark.distributed
def test_a_model_is_wrapped_once(run_ranks):
    def body():
        accelerator = Accelerator()
        inner = MyModel()
        model = accelerator.prepare(inner)
        evaluated = accelerator.prepare_model(inner, evaluation_mode=True)
        return accelerator.prepare(inner) is model, evaluated is inner, len(accelerator._models)

    assert run_ranks(2, body) == [(True, True, 1)] * 2


def test_settings_of_two_contexts_do_not_mix():
    from tests.runtime.core.test_state import a_context

    one, two = a_context(), a_context()
    with use_context(one):
        first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
        model, optimizer, loader, _ = first.prepare(*objects())
    with use_context(two):
        second = Accelerator()
        other, other_optimizer, other_loader, _ = second.prepare(*objects())
    seen = []
    for (x), (y) in zip(loader, other_loader, strict=True):
        with first.accumulate(model), second.accumulate(other):
            first.backward(model(x).sum())
            second.backward(other(y).sum())
            optimizer.step(), other_optimizer.step()
            optimizer.zero_grad(), other_optimizer.zero_grad()
            seen.append((first.sync_gradients, second.sync_gradients))
    assert seen == [(False, True), (False, True), (True, True), (True, True)]
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert (optimizer.steps, other_optimizer.steps) == (2, 4)
    first.set_trigger()
    assert not second.check_trigger()


def test_a_loop_that_was_left_in_a_window_does_not_reach_the_next_accelerator():
    first = Accelerator(gradient_accumulation_steps=4)
    model, _, loader, _ = first.prepare(*objects())
    for x in loader:
        with first.accumulate(model):
            first.backward(model(x).sum())
        assert not Accelerator().sync_gradients, "one made inside the loop changes nothing"
        break
    second = Accelerator()
    other = second.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    other.step()
    assert (second.sync_gradients, other.steps) == (True, 1)


@pytest.mark.distributed
def test_no_sync_covers_several_models_or_all(run_ranks):
    def body():
        accelerator = Accelerator()
        one, two = accelerator.prepare(MyModel(), MyModel())
        states = []
        for models in ((one,), (one, two), ()):
            with accelerator.no_sync(*models):
                states.append((one.require_backward_grad_sync, two.require_backward_grad_sync))
        return states, one.require_backward_grad_sync, two.require_backward_grad_sync

    assert run_ranks(2, body) == [([(False, True), (False, False), (False, False)], True, True)] * 2


def test_lomo_optimizers_update_in_backward():
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss, lr):
            loss.backward()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= lr * parameter.grad

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    with pytest.raises(ValueError, match="no prepared optimizer updates during backward"):
        accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.5)
    accelerator.prepare(Lomo(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="needs the learning_rate"):
        accelerator.lomo_backward(model(torch.ones(1, 1)).sum())
    told = []
    accelerator._engine.events.subscribe("on_backward", lambda loss, normalized: told.append(loss.item()))
    accelerator.lomo_backward(model(torch.ones(1, 1)).sum(), 0.5)
    assert model.weight.item() == pytest.approx(before - 0.25)
    assert told == [pytest.approx(before)]  # the engine makes it, and whoever watches losses sees it


@pytest.mark.distributed
def test_a_model_spread_by_a_device_map_is_not_replicated(run_ranks):
    def body():
        accelerator = Accelerator()
        spread, whole = MyModel(), MyModel()
        spread.hf_device_map, whole.hf_device_map = {"layer": 0, "head": "cpu"}, {"": "cpu"}
        with pytest.raises(ValueError, match="cannot be trained by several processes"):
            accelerator.prepare(spread)
        verified = accelerator.verify_device_map(spread), accelerator.verify_device_map(whole)
        accelerator.prepare(whole)
        return verified, accelerator.prepare_model(spread, evaluation_mode=True) is spread

    assert run_ranks(2, body) == [((True, False), True)] * 2


def test_context_parallel_does_nothing_without_its_conditions():
    accelerator = Accelerator()
    buffer = torch.arange(8)
    with accelerator.maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
        assert len(buffer) == 8


def test_two_ways_to_train_one_model_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    accelerator = Accelerator()
    assert (accelerator.distributed_type, accelerator.state.fsdp_plugin.fsdp_version) == ("FSDP", 2)
    AcceleratorState._reset_state()
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL")
    with pytest.raises(ValueError, match="FSDP_SHARDING_STRATEGY='FULL': expected one of 1 FULL_SHARD"):
        Accelerator()
    monkeypatch.delenv("FSDP_SHARDING_STRATEGY")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true and ACCELERATE_USE_DEEPSPEED=true ask for two ways"):
        Accelerator()


@pytest.mark.distributed
def test_every_documented_option_of_data_parallel_training(run_ranks):
    def body():
        options = {"dim": 0, "broadcast_buffers": False, "bucket_cap_mb": 1, "find_unused_parameters": True,
                   "check_reduction": False, "gradient_as_bucket_view": True, "static_graph": True}  # fmt: skip
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        model = accelerator.prepare(MyModel())
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum())
        return (model.broadcast_buffers, model.bucket_bytes_cap, model.find_unused_parameters,
                model.gradient_as_bucket_view, model.static_graph, accelerator.ddp_handler.static_graph)  # fmt: skip

    assert run_ranks(2, body) == [(False, 1 << 20, True, True, True, True)] * 2


def test_a_refused_accelerator_leaves_nothing_behind(monkeypatch):
    with pytest.raises(ValueError, match="needs mixed_precision='fp8'; it is 'fp16'"):
        Accelerator(mixed_precision="fp16", kwargs_handlers=[AORecipeKwargs()])
    monkeypatch.setenv("ORC_DYNAMO_BACKEND", "inducter")
    with pytest.raises(ValueError, match="inducter"):
        Accelerator(mixed_precision="fp16")
    monkeypatch.delenv("ORC_DYNAMO_BACKEND")
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    with pytest.raises(ValueError, match="mixed_precision is 'bf16' in this process already"):
        Accelerator(mixed_precision="fp16")


def test_a_copy_of_what_holds_an_accelerator_shares_it():
    accelerator = Accelerator()
    assert copy.deepcopy({"accelerator": accelerator})["accelerator"] is accelerator


def test_how_loaders_are_distributed_can_be_changed_for_one_accelerator():
    config = DataLoaderConfiguration(split_batches=True, use_stateful_dataloader=True)
    one, two = Accelerator(dataloader_config=config), Accelerator(dataloader_config=config)
    one.even_batches = False
    assert (one.even_batches, two.even_batches, config.even_batches) == (False, True, True)
    assert (one.dataloader_config.split_batches, one.use_stateful_dataloader) == (True, True)


@pytest.mark.distributed
def test_wrapped_parts_of_a_model_are_extracted_too(run_ranks):
    def body():
        accelerator = Accelerator()
        part = MyModel()
        whole = torch.nn.Sequential(accelerator.prepare(part), torch.nn.DataParallel(MyModel()))
        kept = type(extract_model_from_parallel(whole)[0]).__name__
        bare = extract_model_from_parallel(whole, recursive=True)
        return kept, bare[0] is part, type(bare[1]).__name__

    assert run_ranks(2, body) == [("DistributedDataParallel", True, "MyModel")] * 2
