"""Libraries that train in torch's place, on one GPU, where they are installed: DeepSpeed and Megatron-LM."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    MegatronLMPlugin,
)

OFFLOAD = {"device": "cpu", "pin_memory": True}
# Documented templates. torch's optimizer: DeepSpeed's own would be compiled here, by a CUDA toolkit.
TEMPLATES = {
    "zero 2": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True},
    "zero 3, all in host memory": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": OFFLOAD,
        "offload_param": OFFLOAD,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


@pytest.fixture(scope="module", autouse=True)
def closed():
    """No process group is left; DeepSpeed keeps the one it found, so that its tests share it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", TEMPLATES)
def test_deepspeeds_templates_learn_in_fp16_and_go_on_after_a_checkpoint(device, name, tmp_path):
    pytest.importorskip("deepspeed", reason="needs deepspeed", exc_type=ImportError)
    AcceleratorState._reset_state(reset_partial_state=False)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 8},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": TEMPLATES[name],
        "zero_force_ds_cpu_optimizer": False,
    }
    accelerator = Accelerator(
        mixed_precision="fp16" if device.type == "cuda" else "bf16",  # DeepSpeed has fp16 on few CPUs
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    inputs = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    optimizer = DummyOptim(model.parameters(), lr=1e-2)
    schedule = DummyScheduler(optimizer, warmup_num_steps=2)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    def epoch():
        losses = []
        for x, y in loader:
            assert x.device == device
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = epoch()
    for _ in range(8):
        last = epoch()
    assert sum(last) < sum(first) / 2
    assert optimizer.steps > 30, "few steps overflow"
    accelerator.save_state(tmp_path / "c")
    wanted = epoch()
    accelerator.load_state(tmp_path / "c")
    assert epoch() == pytest.approx(wanted, rel=1e-3)
    weights = accelerator.get_state_dict(model)
    assert {name: list(value.shape) for name, value in weights.items()} == {
        "0.weight": [32, 8],
        "0.bias": [32],
        "2.weight": [1, 32],
        "2.bias": [1],
    }
    accelerator.end_training()


def test_megatron_lm_gives_the_losses_of_the_model_of_transformers(device):
    pytest.importorskip("megatron.core", reason="needs megatron-core", exc_type=ImportError)
    transformers = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    tokens = torch.randint(0, 100, (12, 12), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "labels": row.clone()} for row in tokens]

    def losses(plugin):
        AcceleratorState._reset_state(reset_partial_state=False)
        accelerator = Accelerator(megatron_lm_plugin=plugin)
        torch.manual_seed(0)
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 100}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=4))
        found = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert next(model.parameters()).device == device
        accelerator.end_training()
        return found

    expected = losses(None)
    assert losses(MegatronLMPlugin()) == pytest.approx(expected, rel=1e-3)
    assert losses(MegatronLMPlugin(use_distributed_optimizer=True)) == pytest.approx(expected, rel=1e-3)
