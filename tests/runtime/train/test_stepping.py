"""Optimizers, schedulers and mixed precision: what a step does, and when it is skipped."""

import copy
import json
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader

from orc.runtime import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    AutocastKwargs,
    ContextError,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)


def one_weight(accelerator, lr=1.0, schedule=lambda step: 1.0 / (1 + step)):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return accelerator.prepare(model, optimizer, LambdaLR(optimizer, schedule))


def test_an_overflow_skips_the_step_and_the_schedule():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer, scheduler = one_weight(accelerator)
    seen = []
    for value in (float("inf"), 1.0):
        accelerator.backward(model(torch.tensor([[1.0]])).sum() * value)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, model.weight.item(), scheduler.get_last_lr()[0]))
    assert seen == [(True, 1.0, 1.0), (False, 0.0, 0.5)]
    assert accelerator.scaler.get_scale() == 512.0, "the scale shrank once"


def test_steps_that_overflowed_do_not_count(tmp_path):
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer, _ = one_weight(accelerator)
    counted = []
    for value in (1.0, float("inf"), float("inf"), 1.0):
        accelerator.backward(model(torch.tensor([[1.0]])).sum() * value)
        optimizer.step()
        optimizer.zero_grad()
        counted.append(optimizer.steps)
    assert counted == [1, 1, 1, 2]
    accelerator.save_state(tmp_path / "state")
    assert json.loads((tmp_path / "state" / "manifest.json").read_text())["step"] == 2


def test_values_are_clipped_without_the_loss_scale():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    accelerator.clip_grad_value_(model.parameters(), 3.5)
    assert model.weight.grad.tolist() == [[3.0, 3.5]]
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_a_fused_style_optimizer_reports_its_own_skip():
    """Optimizers that know the scale are always called and skip inside."""

    class Knowing(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            if not self.found_inf.item():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.sub_(parameter.grad / self.grad_scale)

    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, Knowing(model.parameters(), lr=1.0))
    seen = []
    for value in (float("inf"), 1.0):
        accelerator.backward(model(torch.tensor([[1.0]])).sum() * value)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, model.weight.item()))
    assert seen == [(True, 1.0), (False, 0.0)]


def test_a_veto_is_of_one_update_also_when_its_watcher_has_gone():
    accelerator = Accelerator()
    model, optimizer, scheduler = one_weight(accelerator)
    veto = lambda optimizer: True  # noqa: E731
    accelerator.events.subscribe("before_step", veto)
    seen = []
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step(), scheduler.step()
        seen.append((optimizer.step_was_skipped, optimizer.skips, scheduler.scheduler.last_epoch))
        accelerator.events.unsubscribe("before_step", veto)
    assert seen == [(True, 1, 0), (False, 1, 1)]


def test_a_skip_that_the_device_alone_knows_of_holds_the_schedule_back():
    accelerator = Accelerator()
    model, optimizer, scheduler = one_weight(accelerator)
    told = [torch.tensor(1.0), torch.tensor(0.0)]
    accelerator.events.subscribe("before_step", lambda optimizer: optimizer.skips_on_device(told.pop(0)))
    seen = []
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step(), scheduler.step()
        seen.append((optimizer.step_was_skipped, scheduler.scheduler.last_epoch))
    assert seen == [(True, 0), (False, 1)]


def test_clipping_sees_unscaled_gradients():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    assert model.weight.grad.tolist() == [[768.0, 1024.0]]
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(5.0)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, abs=1e-4)
    assert accelerator.clip_grad_norm_(model.parameters(), 9.0).item() == pytest.approx(1.0, abs=1e-4), "unscaled once"
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model.weight.grad.max().item() == 0.5
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_clipping_while_accumulating_in_fp16_leaves_scaled_gradients_alone():
    accelerator = Accelerator(
        gradient_accumulation_steps=2, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0)]
    )
    model, optimizer, _ = one_weight(accelerator)
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[8.0]])).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            accelerator.clip_grad_value_(model.parameters(), 100.0)
            optimizer.step()
            if not accelerator.sync_gradients:
                assert model.weight.item() == 1.0
    assert norms == [4.0, 8.0]
    assert model.weight.item() == 1.0 - 8.0


def test_two_optimizers_share_one_scale_per_iteration():
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0, growth_interval=1)]
    )
    (one, first, _), (two, second, _) = one_weight(accelerator), one_weight(accelerator)
    accelerator.backward((one(torch.ones(1, 1)) + two(torch.ones(1, 1))).sum())
    first.step()
    second.step()
    assert (one.weight.item(), two.weight.item()) == (0.0, 0.0), "both used the scale the loss was made with"
    assert accelerator.scaler.get_scale() == 16.0


def test_an_optimizer_without_gradients_may_be_prepared_beside():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    (used, first, _), (idle, second, _) = one_weight(accelerator), one_weight(accelerator)
    accelerator.backward(used(torch.ones(1, 1)).sum())
    accelerator.clip_grad_norm_(used.parameters(), 10.0)
    first.step()
    accelerator.backward(idle(torch.ones(1, 1)).sum())
    accelerator.clip_grad_norm_(idle.parameters(), 10.0)
    second.step()
    assert (used.weight.item(), idle.weight.item()) == (0.0, 0.0)


def test_clip_grad_norm_documented_value():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert accelerator.clip_grad_norm_(model.parameters(), 2.0).item() == 5.0
    assert model.weight.grad.norm().item() == pytest.approx(2.0, abs=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize(("split", "expected"), [(False, 6), (True, 3)])
def test_a_schedule_advances_with_the_samples(run_ranks, split, expected):
    def body(split):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        lr = 1e-3 * accelerator.num_processes
        model, optimizer, scheduler = one_weight(accelerator, lr=lr, schedule=lambda step: 1.0)
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
        return scheduler.scheduler.last_epoch, optimizer.param_groups[0]["lr"]

    assert run_ranks(2, body, split) == [(expected, 2e-3)] * 2


@pytest.mark.distributed
def test_a_schedule_with_an_end_is_not_overrun(run_ranks):
    def body():
        accelerator = Accelerator()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for _ in range(4):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            schedule.step()
        return schedule.scheduler.last_epoch

    assert run_ranks(2, body) == [5, 5]


def test_a_scheduler_stepped_by_the_script_ignores_the_optimizer():
    accelerator = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    _, optimizer, scheduler = one_weight(accelerator, schedule=lambda step: 1.0)
    optimizer.step()
    accelerator.sync_gradients = False
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1


def test_plateau_schedulers_get_their_metric():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer, plateau = accelerator.prepare(optimizer, ReduceLROnPlateau(optimizer, patience=0))
    for metric in (1.0, 2.0):
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_scheduler_may_come_before_its_optimizer():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler, prepared = accelerator.prepare(LambdaLR(optimizer, lambda s: 1.0), optimizer)
    assert list(scheduler.optimizers) == [prepared]
    later = accelerator.prepare(LambdaLR(prepared, lambda s: 1.0))
    assert list(later.optimizers) == [prepared]
    assert other not in later.optimizers


def test_step_and_zero_grad_wait_for_synchronisation():
    accelerator = Accelerator()
    model, optimizer, _ = one_weight(accelerator)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.sync_gradients = False
    assert optimizer.step() is None
    optimizer.zero_grad()
    assert (model.weight.item(), model.weight.grad.item()) == (1.0, 1.0)
    accelerator.sync_gradients = True
    assert optimizer.step(lambda: 7.0) == 7.0
    optimizer.zero_grad()
    assert (model.weight.item(), model.weight.grad) == (0.0, None)


def test_the_prepared_optimizer_is_an_optimizer():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    raw = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = accelerator.prepare(raw)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is raw.param_groups
    assert optimizer.defaults["lr"] == 0.5
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1})
    assert [g["lr"] for g in raw.param_groups] == [0.5, 0.1]
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(optimizer.state) == len(raw.state) == 2
    restored = pickle.loads(pickle.dumps(optimizer))
    assert restored.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_copies_of_optimizer_and_scheduler_follow_the_run(run_ranks, precision, ranks):
    def body():
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        weight = torch.nn.Parameter(torch.ones(1))
        loader = accelerator.prepare(DataLoader(range(8)))
        optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
        # torch puts a counter around the step of the optimizer that a scheduler is made with
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        next(iter(loader))
        pairs = [copy.deepcopy((optimizer, scheduler))]
        if precision == "no":  # what is unpickled has a loss scale of its own
            pairs.append(pickle.loads(pickle.dumps((optimizer, scheduler))))
        with accelerator.accumulate():
            for copied, rates in pairs:
                accelerator.backward(0 * copied.param_groups[0]["params"][0].sum())
                copied.step()
                rates.step()
        seen = []
        with accelerator.accumulate():
            for copied, rates in pairs:
                mine = copied.param_groups[0]["params"][0]
                accelerator.backward(2 * mine.sum())
                copied.step()
                rates.step()
                seen.append((mine.item(), rates.get_last_lr(), copied.step_was_skipped))
        return seen, weight.item(), scheduler.get_last_lr()

    for seen, original, rate in run_ranks(ranks, body):
        assert seen == [(0.0, [0.5**ranks], False)] * (2 if precision == "no" else 1)
        assert (original, rate) == (1.0, [1.0]), "the original is another"


def test_train_and_eval_reach_schedule_free_optimizers():
    class ScheduleFree(torch.optim.SGD):
        mode = None

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = accelerator.prepare(ScheduleFree(model.parameters(), lr=1.0))
    optimizer.eval()
    assert optimizer.mode == "eval"
    optimizer.train()
    assert optimizer.mode == "train"
    plain = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    plain.train()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_prepared_model_computes_in_half_precision_and_returns_float32(precision, dtype):
    inside = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x, depth=0):
            hidden = self.layer(x)
            inside.append(hidden.dtype)
            if depth:
                self(x, depth - 1)  # a forward inside a forward
                inside.append(self.layer(x).dtype)
            return {"logits": hidden, "count": 3}

    accelerator = Accelerator(mixed_precision=precision)
    model = accelerator.prepare(Net())
    output = model(torch.ones(1, 2), depth=1)
    assert set(inside) == {dtype}
    assert (output["logits"].dtype, output["count"]) == (torch.float32, 3)
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32, "nothing leaks out of forward"
    with accelerator.autocast():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == dtype
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert unwrapped(torch.ones(1, 2))["logits"].dtype == torch.float32
    assert inside[-1] == torch.float32


def test_an_error_in_forward_leaves_autocast():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = Accelerator(mixed_precision="bf16").prepare(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        model(torch.ones(1))
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32


def test_a_model_in_mixed_precision_can_be_pickled_and_copied():
    model = Accelerator(mixed_precision="bf16").prepare(torch.nn.Linear(2, 2))
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.weight.zero_(), clone.bias.zero_()
    assert clone(torch.ones(1, 2)).tolist() == [[0.0, 0.0]], "the copy computes with its own weights"
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(restored(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_precision_comes_from_the_environment_and_is_fixed(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator().mixed_precision == "bf16"
    assert Accelerator().state.mixed_precision == "bf16"
    with pytest.raises(ContextError, match=r"mixed_precision is 'bf16' in this process already \(from ACCELERATE"):
        Accelerator(mixed_precision="no")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="mixed_precision = 'fp4': expected one of no, fp16, bf16, fp8"):
        Accelerator(mixed_precision="fp4")


def test_the_building_blocks_of_mixed_precision():
    from orc.runtime.parallel.precision import is_bf16_available, precision_for
    from orc.runtime.parallel.precision.forward import convert_outputs_to_fp32

    cpu = torch.device("cpu")
    assert is_bf16_available()
    assert precision_for("bf16").scaler(cpu) is None
    assert precision_for("fp16").scaler(cpu, GradScalerKwargs(init_scale=8.0)).get_scale() == 8.0
    with precision_for("bf16").autocast(cpu):
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16
    with precision_for("no").autocast(cpu):
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32

    @convert_outputs_to_fp32
    def forward(x):
        return {"half": x.half(), "whole": x.int()}

    output = forward(torch.ones(1))
    assert (output["half"].dtype, output["whole"].dtype) == (torch.float32, torch.int32)


def test_option_objects_pass_on_only_what_was_changed():
    assert GradScalerKwargs(growth_interval=7).to_kwargs() == {"growth_interval": 7}
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(enabled=False).to_dict() == {"enabled": False, "cache_enabled": None}


@pytest.mark.parametrize(("adjust", "counted"), [(True, 1 + 5), (False, 1 + 3)])
def test_calls_between_updates_are_counted_unless_the_schedule_was_adjusted(adjust, counted):
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer, scheduler = one_weight(accelerator, schedule=lambda step: 1.0)
    for batch in accelerator.prepare(DataLoader(torch.ones(5, 1), batch_size=1)):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert (scheduler.scheduler.last_epoch, scheduler.scheduler._step_count) == (3, counted)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: ReduceLROnPlateau(o),
        lambda o: ChainedScheduler([StepLR(o, 1), StepLR(o, 2)]),
        lambda o: SequentialLR(o, [StepLR(o, 1), StepLR(o, 2)], [1]),
    ],
)
def test_every_kind_of_schedule_may_accumulate(make):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make(optimizer))
    metrics = (1.0,) if isinstance(scheduler.scheduler, ReduceLROnPlateau) else ()
    rate = optimizer.param_groups[0]["lr"]
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step(*metrics)
    assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.distributed
def test_an_overflow_on_one_process_skips_the_step_on_all(run_ranks):
    def body():
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)])
        model, optimizer, scheduler = one_weight(accelerator)
        seen = []
        for value in (float("inf") if accelerator.process_index else 1.0, 1.0):
            accelerator.backward(model(torch.ones(1, 1)).sum() * value)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.append((accelerator.optimizer_step_was_skipped, scheduler.scheduler.last_epoch))
        return seen, accelerator.scaler.get_scale(), round(accelerator.unwrap_model(model).weight.item(), 3)

    assert run_ranks(2, body) == [([(True, 0), (False, 2)], 8.0, 0.0)] * 2


def test_a_loss_scale_is_configured_by_its_documented_options():
    options = {"init_scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2, "enabled": True}
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])
    scaler = accelerator.scaler
    found = (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    assert found == (4.0, 3.0, 0.25, 2)
    model, optimizer, _ = one_weight(accelerator)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 12.0


def test_autocast_options_reach_torch():
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
    assert accelerator.autocast_handler.cache_enabled is False
    inside = []

    class Net(torch.nn.Linear):
        def forward(self, x):
            inside.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
            return super().forward(x)

    accelerator.prepare(Net(1, 1))(torch.ones(1, 1))
    with accelerator.autocast():
        inside.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    with accelerator.autocast(AutocastKwargs(cache_enabled=True)):
        inside.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    assert inside == [(True, False), (True, False), (True, True)]


def test_gradients_can_be_unscaled_by_hand_for_one_optimizer_or_all():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    (one, first, _), (two, second, _) = one_weight(accelerator), one_weight(accelerator)
    accelerator.backward((one(torch.ones(1, 1)) + two(torch.ones(1, 1))).sum())
    accelerator.unscale_gradients(first)
    assert (one.weight.grad.item(), two.weight.grad.item()) == (1.0, 8.0)
    accelerator.unscale_gradients([second.optimizer])
    accelerator.unscale_gradients()
    assert (one.weight.grad.item(), two.weight.grad.item()) == (1.0, 1.0)
    first.step(), second.step()
    assert (one.weight.item(), two.weight.item()) == (0.0, 0.0)


def test_an_optimizer_and_a_scheduler_can_be_wrapped_without_an_accelerator():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = AcceleratedScheduler(StepLR(optimizer.optimizer, 1, 0.5), optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert (model.weight.item(), scheduler.get_last_lr(), optimizer.step_was_skipped) == (0.0, [0.5], False)
    assert (optimizer.device_placement, optimizer.scaler) == (True, None)
    assert (scheduler.step_with_optimizer, scheduler.split_batches) == (True, False)
    saved = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(saved)
    assert scheduler.last_epoch == 1


def test_a_loaded_count_of_steps_stays_on_the_cpu_and_moments_go_to_their_parameters():
    """On a device the count would be waited for twice for each parameter at every step."""
    there = torch.nn.Linear(2, 1)
    trained = torch.optim.AdamW(there.parameters(), foreach=True)
    there(torch.ones(1, 2)).sum().backward()
    trained.step()
    model = torch.nn.Linear(2, 1, device="meta")
    adam = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer = AcceleratedOptimizer(adam, device=torch.device("meta"))
    optimizer.load_state_dict(trained.state_dict())
    for values in optimizer.state_dict()["state"].values():
        assert (values["step"].device.type, values["step"].item()) == ("cpu", 1.0)
        assert values["exp_avg"].device.type == values["exp_avg_sq"].device.type == "meta"


def test_a_step_that_the_script_leaves_out_after_clipping_does_not_spoil_the_next():
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model, optimizer, _ = one_weight(accelerator, lr=0.25)
    norms = []
    for wanted in (False, True):
        accelerator.backward(model(torch.tensor([[2.0]])).sum())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
        if wanted:
            optimizer.step()
        optimizer.zero_grad()
    assert norms == [2.0, 2.0]
    assert model.weight.item() == 0.5
