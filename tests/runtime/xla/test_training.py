"""Training through torch_xla: what it computes, and when what was traced is run."""

from __future__ import annotations

import torch


def train(settings):
    """Parameters and losses of a short training; the same script with and without torch_xla."""
    import torch
    from torch import nn

    from orc.runtime import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=settings["accumulate"])
    torch.manual_seed(accelerator.process_index)  # what rank 0 has is what counts
    first = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = first.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    data = torch.arange(64.0).reshape(16, 4).sin()
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    # In an odd order: what refers to something else comes first.
    scheduler, optimizer, loader, model = accelerator.prepare(scheduler, optimizer, loader, model)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                output = model(batch)
                if settings["normalize"]:
                    accelerator.backward((output - batch).square().sum(), normalize_by=batch.numel())
                else:
                    accelerator.backward((output - batch).square().mean())
                if settings["clip"] and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather_for_metrics((output - batch).square().mean(1)).mean()))
    inner = accelerator.unwrap_model(model)
    assert inner[0].weight is inner[2].weight
    return inner[0].weight.tolist(), losses


SETTINGS = {
    "plain": {"accumulate": 1, "clip": False, "normalize": False},
    "accumulated and clipped": {"accumulate": 2, "clip": True, "normalize": False},
    "normalized by counts": {"accumulate": 2, "clip": False, "normalize": True},
}


def train_all(settings):
    return {kind: train(one) for kind, one in settings.items()}


def test_two_processes_learn_what_they_learn_without_it(xla_ranks, run_ranks):
    through_xla, plain = xla_ranks(2, train_all, SETTINGS), run_ranks(2, train_all, SETTINGS, timeout=240)
    assert through_xla[0] == through_xla[1]
    for kind in SETTINGS:
        torch.testing.assert_close(through_xla[0][kind], plain[0][kind], rtol=1e-5, atol=1e-6)
    assert len({str(weights) for weights, _ in plain[0].values()}) == len(SETTINGS)


def calls_of_loops(kinds):
    return {kind: calls_of_a_loop(kind) for kind in kinds}


def calls_of_a_loop(kind):
    import torch
    import torch_xla
    from torch import nn

    from orc.runtime import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch_xla.CALLS.clear()

    def step(batch):
        accelerator.backward(model(batch).sum())
        if kind == "clipped":
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if kind == "own batches":
        step(torch.ones(2, 2))
    elif kind == "given up":
        accelerator.backward(model(torch.ones(2, 2)).sum())
        accelerator.clip_grad_value_(model.parameters(), 1.0)
        optimizer.zero_grad()
        step(torch.ones(2, 2))
    elif kind == "closure":
        asked = []

        def closure():
            asked.append(True)
            loss = model(torch.ones(2, 2)).sum()
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        assert asked == [True]
    else:
        for batch in loader:
            step(batch)
            if kind == "left early":
                break
    return " ".join(f"{name}({', '.join(map(str, details))})" for name, *details in torch_xla.CALLS)


def test_what_was_traced_runs_once_per_batch_and_gradients_are_averaged_once(xla_ranks):
    calls = {
        "loader": "optimizer_step(False) reduce_gradients() sync() optimizer_step(False) reduce_gradients() sync()",
        "left early": "optimizer_step(False) reduce_gradients() sync()",
        "own batches": "optimizer_step(True) reduce_gradients() sync()",
        "clipped": "reduce_gradients() sync() reduce_gradients() sync()",
        "given up": "reduce_gradients() optimizer_step(True) reduce_gradients() sync()",
        "closure": "optimizer_step(True) reduce_gradients() sync()",
    }
    assert xla_ranks(1, calls_of_loops, list(calls)) == [calls]


def test_a_dispatching_loader_runs_what_was_traced_too(xla_ranks):
    def loop():
        import torch
        import torch_xla

        from orc.runtime import Accelerator, DataLoaderConfiguration

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4.0), batch_size=1))
        torch_xla.CALLS.clear()
        return [batch.tolist() for batch in loader], torch_xla.CALLS

    assert xla_ranks(2, loop) == [([[0.0], [2.0]], [("sync",)] * 2), ([[1.0], [3.0]], [("sync",)] * 2)]


def precision(mixed_precision, arguments):
    import os

    from orc.runtime import Accelerator

    try:
        accelerator = Accelerator(mixed_precision=mixed_precision, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with accelerator.autocast():
        kind = str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    return os.environ.get("XLA_USE_BF16"), os.environ.get("XLA_DOWNCAST_BF16"), kind


def test_bf16_is_told_to_torch_xla_in_the_documented_variables(xla_ranks):
    assert xla_ranks(1, precision, "bf16", {}) == [("1", "0", "torch.bfloat16")]
    assert xla_ranks(1, precision, "bf16", {"downcast_bf16": True}) == [("0", "1", "torch.bfloat16")]
    assert xla_ranks(1, precision, "bf16", {}, env={"ORC_DOWNCAST_BF16": "yes"})[0][:2] == ("0", "1")
    assert xla_ranks(1, precision, "no", {}) == [(None, None, "torch.float32")]


def test_fp16_is_refused(xla_ranks):
    (text,) = xla_ranks(1, precision, "fp16", {})
    assert text == "LaunchError: mixed_precision=fp16 is not for TPU over torch_xla; choose bf16 or no"


def test_downcasting_means_nothing_elsewhere(run_ranks):
    assert run_ranks(1, precision, "bf16", {"downcast_bf16": True}) == [(None, None, "torch.bfloat16")]
