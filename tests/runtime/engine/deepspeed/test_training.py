"""Training with DeepSpeed itself on two processes without accelerators: the same losses as replicas have."""

import functools

import pytest

RANKS_IMPORT = ("deepspeed",)
STEPS, BATCH, WIDTH = 12, 4, 16
# DeepSpeed is slow to import, so that one start of ranks serves several settings.
SETTINGS = {
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2, optimizer on the CPU": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    "zero 3, all on the CPU": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_save_16bit_model": True,
    },
}


def forget():
    """Let the next Accelerator choose anew; the process group stays."""
    import gc

    from orc.runtime import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=False)
    gc.collect()


def objects(steps=STEPS, batch=BATCH):
    """Model, optimizer, schedule and loader, the same on every rank and for every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(2 * steps * batch, WIDTH, generator=generator)
    targets = samples.sum(1, keepdim=True).sin()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, targets), batch_size=batch)
    return model, optimizer, schedule, loader


def loop(accelerator, model, optimizer, schedule, loader, save=None):
    """Train as a script does, with *save* called in the middle; the losses over all ranks, and the norms."""
    import torch

    losses, norms = [], []
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if save is not None and number + 1 == STEPS // 2:
            save()
    return losses, norms


def train_each_way(settings, folder):
    """Losses and norms by name of the setting, replicas first, and what else can be asked of each."""
    import json
    from pathlib import Path

    import torch

    from orc.runtime import Accelerator
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

    results = {}
    for name, chosen in {"replicas": None, **settings}.items():

        def start(chosen=chosen):
            plugin = None if chosen is None else DeepSpeedPlugin(gradient_clipping=0.5, **chosen)
            accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
            return plugin, accelerator, accelerator.prepare(*objects())

        plugin, accelerator, prepared = start()
        where = Path(folder, name.replace(" ", "-"))
        save = functools.partial(accelerator.save_state, where, block=name != "zero 1")
        losses, norms = loop(accelerator, *prepared, save=save)
        accelerator.wait_for_checkpoint()
        model, optimizer, schedule, _ = prepared
        weights = accelerator.get_state_dict(model)
        results[name] = {
            "losses": losses,
            "norms": norms,
            "lr": schedule.get_last_lr(),
            "steps": optimizer.steps,
            "weights": {key: value.double().sum().item() for key, value in weights.items()},
            "type": str(accelerator.distributed_type),
            "unwrapped": type(accelerator.unwrap_model(model)) is torch.nn.Sequential,
            "batch": plugin
            and (plugin.get_value("train_micro_batch_size_per_gpu"), plugin.get_value("train_batch_size")),
        }
        forget()
        if chosen is not None:
            _, accelerator, prepared = start()
            accelerator.load_state(where)
            results[name]["resumed"] = loop(accelerator, *prepared)[0]
            accelerator.free_memory(*prepared)
            with pytest.raises(ValueError, match="nothing is prepared for training"):
                accelerator.backward(torch.zeros(1))
            results[name]["files"] = sorted(json.loads((where / "manifest.json").read_text())["files"])
            forget()
    results["experts"] = train_experts()
    results["refused"] = [
        refused("fp16"),
        refused("no", zero_quantized_weights=True),
        refused("no", offload_optimizer={"device": "nvme", "nvme_path": folder}),
        refused("no", early=True),
    ]
    return results


def train_experts():
    """Losses where each rank goes through an expert of its own, with a second copy of parameters within the node."""
    import torch
    from torch import nn

    from orc.runtime import Accelerator
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            return x + self.each[accelerator.process_index](x)

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, transformer_moe_cls_names="Experts")
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x, losses = torch.ones(BATCH, WIDTH), []
    for _ in range(4):
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    forget()
    return losses


def refused(precision, early=False, **zero):
    """The error where DeepSpeed needs a GPU, a library that it shall not find, or what the optimizer (*early*) has."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    from orc.runtime import Accelerator
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": 8, "zero_optimization": {"stage": 3, **zero}})
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)  # some CPUs compute in it
        model, optimizer, *_ = objects()
        if early:
            model[2] = type(model[2])(32, 1)
        with pytest.raises(ValueError, match="AdamW trains 2 parameters" if early else "DeepSpeed") as found:
            accelerator.prepare(model, optimizer)
    forget()
    return str(found.value)


@pytest.fixture(scope="module")
def trained(run_ranks, tmp_path_factory):
    return run_ranks(2, train_each_way, SETTINGS, str(tmp_path_factory.mktemp("checkpoints")), timeout=240)


@pytest.mark.parametrize("name", SETTINGS)
def test_zero_trains_as_replicas_do(trained, name):
    for rank, results in enumerate(trained):
        expected, got = results["replicas"], results[name]
        assert got["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert (got["lr"], got["steps"]) == (expected["lr"], expected["steps"])
        assert (got["type"], got["unwrapped"]) == ("DEEPSPEED", True)
        assert got["batch"] == (BATCH, BATCH * 2 * 2)
        if rank == 0:
            assert got["weights"] == pytest.approx(expected["weights"], abs=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_exactly_where_a_checkpoint_was_saved(trained, name):
    for results in trained:
        assert results[name]["resumed"] == results[name]["losses"][STEPS // 2 :]
        files = results[name]["files"]
        shards = [file for file in files if file.endswith("optim_states.pt")]
        assert len(shards) == (0 if name == "zero 0" else 2)
        assert {"latest", "scheduler.bin", "sampler.bin", "random_states_1.pkl"} < set(files)
        assert not {"optimizer.bin", "model.safetensors"} & set(files)


def test_ranks_go_through_different_experts_of_a_layer_that_is_gathered_as_a_whole(trained):
    for results in trained:
        assert min(results["experts"]) < results["experts"][0] / 2
    assert trained[0]["experts"] != trained[1]["experts"]


def test_what_deepspeed_cannot_do_here_is_one_error_on_every_rank(trained):
    for results in trained:
        half, quantized, on_disk, early = results["refused"]
        assert "fp16 is not supported on your device" in half
        assert "zero_quantized_weights: DeepSpeed quantizes on GPUs alone" in quantized
        assert "offload_optimizer to nvme: DeepSpeed cannot build its async_io here" in on_disk
        assert "gone, of 4: no prepared model has them, and no optimizer trains 2.weight, 2.bias. " in early
