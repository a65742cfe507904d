"""Models whose linear layers are quantized while they are loaded, with bitsandbytes and torchao on the CPU."""

import copy
import logging
import pickle
from pathlib import Path

import bitsandbytes
import pytest
import torch
from torch import nn

from orc.runtime import (
    Accelerator,
    BnbQuantizationConfig,
    TorchAoQuantizationConfig,
    compute_module_sizes,
    init_empty_weights,
    load_and_quantize_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.weights.loading import save_model
from orc.runtime.weights.offload import return_free_memory
from orc.runtime.weights.quantization.load import layers_to_quantize, special_dtypes

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says at each forward that int8 computes in float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


IDS = torch.arange(12) % 16
EIGHT = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
FOUR = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")
NESTED = BnbQuantizationConfig(
    load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
AO_EIGHT, AO_FOUR = TorchAoQuantizationConfig(), TorchAoQuantizationConfig("int4", group_size=32)
SPREAD = {"embed": "cpu", "h.0": "cpu", "h.1": "disk", "head": "cpu"}


@pytest.fixture
def whole() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def folder(whole: Model, tmp_path: Path) -> Path:
    save_model(whole, tmp_path / "weights")
    return tmp_path / "weights"


def empty(tied: bool = False) -> Model:
    with init_empty_weights():
        return Model(tied)


def error(model: nn.Module, whole: nn.Module) -> float:
    with torch.no_grad():
        return float((model(IDS) - whole(IDS)).abs().max())


@pytest.mark.parametrize(
    ("config", "bound", "kind", "stored"),
    [
        (EIGHT, 0.02, bitsandbytes.nn.Linear8bitLt, torch.int8),
        (FOUR, 0.3, bitsandbytes.nn.Linear4bit, torch.uint8),
        (NESTED, 0.3, bitsandbytes.nn.Linear4bit, torch.uint8),
        (AO_EIGHT, 0.05, nn.Linear, torch.bfloat16),
        (AO_FOUR, 0.3, nn.Linear, torch.bfloat16),
    ],
    ids=["8bit", "fp4", "nf4", "torchao-int8", "torchao-int4"],
)
def test_layers_are_quantized_and_compute_nearly_the_same(whole, folder, config, bound, kind, stored):
    model = empty()
    loaded = load_and_quantize_model(model, config, folder)
    assert 0 < error(loaded, whole) < bound
    assert all(value.is_meta for value in model.parameters())  # it can be used again
    assert type(loaded.h[1].up) is kind
    assert loaded.h[1].up.weight.dtype == stored
    assert (type(loaded.head), loaded.head.weight.dtype) == (nn.Linear, config.torch_dtype)
    assert loaded.h[0].norm.weight.dtype == loaded.h[0].up.bias.dtype == config.torch_dtype
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not hasattr(loaded, "hf_device_map")
    again = copy.deepcopy(loaded)
    assert error(again, loaded) == 0


def test_four_bits_take_layers_of_any_size():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 3))
    model = load_and_quantize_model(copy.deepcopy(whole), FOUR)
    x = torch.randn(4, 100)
    assert (model(x) - whole(x)).abs().max() < 0.3


@pytest.mark.parametrize("form", [{"safe_serialization": False}, {"max_shard_size": 30_000}], ids=["bin", "shards"])
def test_weights_come_from_a_state_dict_or_from_shards(whole, folder, tmp_path, form):
    expected = load_and_quantize_model(empty(), EIGHT, folder)
    save_model(whole, tmp_path / "other", **form)
    place = tmp_path / "other" / "pytorch_model.bin" if "safe_serialization" in form else tmp_path / "other"
    assert error(load_and_quantize_model(empty(), EIGHT, place), expected) == 0


def test_a_model_that_has_its_weights_is_quantized_in_place(whole, folder):
    expected = load_and_quantize_model(empty(), EIGHT, folder)
    assert load_and_quantize_model(whole, EIGHT) is whole
    assert error(whole, expected) == 0
    with pytest.raises(ValueError, match="quantized already: 8-bit"):
        load_and_quantize_model(whole, FOUR)


def test_modules_are_skipped_or_kept_in_float32(folder, caplog):
    config = BnbQuantizationConfig(
        load_in_8bit=True, skip_modules=["up", "h.0", "hed"], keep_in_fp32_modules=["h.1.norm"]
    )
    model = load_and_quantize_model(empty(), config, folder)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == "Linear8bitLt"} == {"h.1.down", "head"}
    assert model.h[1].norm.weight.dtype == torch.float32
    assert model.h[0].norm.weight.dtype == model.h[1].up.weight.dtype == torch.float16
    assert "no module hed" in caplog.text
    assert "is it head?" in caplog.text


def test_shared_weights_stay_shared_by_default_and_part_when_they_are_quantized(tmp_path):
    torch.manual_seed(0)
    whole = Model(tied=True).eval()
    save_model(whole, tmp_path)
    model = load_and_quantize_model(empty(tied=True), EIGHT, tmp_path)
    assert model.head.weight is model.embed.weight
    parted = load_and_quantize_model(
        empty(tied=True), BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32", skip_modules=[]), tmp_path
    )
    assert parted.head.weight.dtype == torch.int8
    assert torch.equal(parted.embed.weight, whole.embed.weight)
    assert error(parted, whole) < 0.5  # of outputs around 10


@pytest.mark.parametrize("config", [EIGHT, FOUR, AO_EIGHT], ids=["8bit", "4bit", "torchao"])
def test_offloaded_layers_are_quantized_where_they_are_in_eight_bits(whole, folder, tmp_path, config):
    away = tmp_path / "away"
    model = load_and_quantize_model(empty(), config, folder, device_map=SPREAD, offload_folder=away)
    assert model.hf_device_map == SPREAD
    for _ in range(2):
        assert error(model, whole) < 0.3
        assert model.h[1].up.weight.is_meta
    if config is EIGHT:
        assert model.h[1].up.weight.dtype == torch.int8
        assert (away / "h.1.up.weight.dat").stat().st_size == 64 * 128
        assert error(model, load_and_quantize_model(empty(), config, folder)) == 0
        assert error(pickle.loads(pickle.dumps(model)), model) == 0
    else:
        assert (type(model.h[1].up), model.h[1].up.weight.dtype) == (nn.Linear, config.torch_dtype)
    with pytest.raises(RuntimeError, match="offloaded"):
        model.to("cpu")


def test_a_strategy_counts_with_the_quantized_size(folder):
    config, scheme = EIGHT, EIGHT.scheme()
    special = special_dtypes(empty(), layers_to_quantize(empty(), config, scheme), config, scheme)
    sizes = compute_module_sizes(empty(), torch.float32, special)
    assert sizes["h.0.up.weight"] == 64 * 128
    assert sizes["head.weight"] == 4 * 64 * 16
    model = load_and_quantize_model(
        empty(), config, folder, device_map="auto", max_memory={"cpu": sizes[""] + 100}, no_split_module_classes="Block"
    )
    assert set(model.hf_device_map.values()) == {"cpu"}


# ---- saving


def test_eight_bits_are_saved_and_loaded_as_they_are(whole, folder, tmp_path):
    quantized = load_and_quantize_model(empty(), EIGHT, folder)
    for round_ in range(2):  # before the first forward and after it the scales are in different places
        Accelerator().save_model(quantized, tmp_path / f"{round_}", max_shard_size=20_000)
        again = load_and_quantize_model(empty(), EIGHT, tmp_path / f"{round_}", device_map=SPREAD)
        assert error(again, quantized) == 0
    Accelerator().save_model(again, tmp_path / "from-disk")
    assert error(load_and_quantize_model(empty(), EIGHT, tmp_path / "from-disk"), quantized) == 0
    for load in (load_checkpoint_in_model, lambda *args: load_checkpoint_and_dispatch(*args, device_map={"": "cpu"})):
        with pytest.raises(CheckpointError, match="load_and_quantize_model"):
            load(empty(), tmp_path / "from-disk")
    with pytest.raises(CheckpointError, match="quantized weights"):
        load_and_quantize_model(empty(), FOUR, tmp_path / "from-disk")


@pytest.mark.parametrize("config", [NESTED, AO_EIGHT], ids=["4bit", "torchao"])
def test_what_cannot_be_loaded_again_is_not_saved(folder, tmp_path, config):
    model = load_and_quantize_model(empty(), config, folder)
    with pytest.raises(CheckpointError, match=r"4-bit \(bitsandbytes\)|8-bit \(torchao\)"):
        Accelerator().save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ---- training


@pytest.mark.parametrize("config", [EIGHT, FOUR, NESTED], ids=["8bit", "fp4", "nf4"])
def test_adapters_learn_on_quantized_weights_and_go_on_from_a_checkpoint(folder, tmp_path, config):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    base = load_and_quantize_model(empty(), config, folder)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["up", "down"])).train()
    assert "bnb" in type(model.base_model.model.h[0].up).__module__
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> float:
        loss = nn.functional.cross_entropy(model(IDS).float(), (3 * IDS) % 16)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(8)]
    assert losses[-1] < losses[0] / 2
    accelerator.save_state(tmp_path / "state")
    following = [step(), step()]
    accelerator.load_state(tmp_path / "state")
    assert [step(), step()] == following
    model.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(load_and_quantize_model(empty(), config, folder), tmp_path / "adapters")
    assert error(again, model.eval()) == 0


def test_quantized_weights_alone_do_not_learn(folder, tmp_path):
    model = load_and_quantize_model(empty(), EIGHT, folder)
    with pytest.raises(ValueError, match="adapters"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert Accelerator(cpu=True).prepare(model) is model  # for inference
    with pytest.raises(ValueError, match="adapters"):
        Accelerator(cpu=True).prepare(model.train())
    spread = load_and_quantize_model(empty(), EIGHT, folder, device_map=SPREAD, offload_folder=tmp_path / "away")
    spread.head.weight.requires_grad_()
    with pytest.raises(ValueError, match="without device_map"):
        Accelerator(cpu=True).prepare(spread)


# ---- bad input


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({}, ["neither"]),
        ({"load_in_8bit": True, "load_in_4bit": True}, ["not both"]),
        (
            {"load_in_4bit": 1, "bnb_4bit_quant_type": "np4", "bnb_4bit_compute_dtype": "fp17", "torch_dtype": "int8",
             "llm_int8_threshold": "6", "skip_modules": "head", "keep_in_fp32_modules": [1]},
            ["load_in_4bit=1", "'np4'", "'fp17'", "'int8'", "llm_int8_threshold='6'", "skip_modules='head'", "[1]"],
        ),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_configuration_is_said_at_once(values, messages):
    with pytest.raises(ValueError, match="BnbQuantizationConfig: ") as raised:
        BnbQuantizationConfig(**values)
    assert all(message in str(raised.value) for message in messages)


def test_documented_defaults():
    eight, four = BnbQuantizationConfig(load_in_8bit=True), BnbQuantizationConfig(load_in_4bit=True)
    assert (eight.llm_int8_threshold, eight.torch_dtype) == (6.0, torch.float16)
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == ("fp4", False)
    assert four.bnb_4bit_compute_dtype == four.torch_dtype == torch.float16
    with pytest.raises(ValueError, match=r"'int3'.*group_size=5"):
        TorchAoQuantizationConfig("int3", group_size=5)


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
def test_a_library_that_is_not_there_is_named(name, folder, monkeypatch):
    for available in ("is_8bit_bnb_available", "is_torchao_available"):
        monkeypatch.setattr(f"orc.runtime.weights.quantization.config.{available}", lambda: False)
    config = EIGHT if name == "bitsandbytes" else AO_EIGHT
    with pytest.raises(ImportError, match=f"pip install {name}"):
        load_and_quantize_model(empty(), config, folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_location": None}, "weights_location"),
        ({"device_map": "autp"}, "did you mean 'auto'"),
        ({"device_map": {"embed": "cpu", "h": "cpu"}}, "head.weight"),
        ({"device_map": {"": "cpu", "hed": "cpu"}}, "did you mean 'head'"),
        ({"device_map": {"": 99}}, "does not have"),
        ({"device_map": SPREAD}, "offload_folder"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "valid format"),
    ],
)
def test_what_does_not_fit_is_refused(folder, options, message):
    model = empty()
    with pytest.raises(ValueError, match=message):
        load_and_quantize_model(model, EIGHT, **{"weights_location": folder, **options})
    assert all(value.is_meta for value in model.parameters())


def test_layers_that_cannot_be_cut_into_groups_are_listed(folder):
    with pytest.raises(ValueError, match=r"2 layers .*h\.0\.up: group_size=128 .* 64 columns; h\.1\.up"):
        load_and_quantize_model(empty(), TorchAoQuantizationConfig("int4"), folder)


def test_a_checkpoint_of_another_model_or_a_cut_one_is_refused(whole, folder, tmp_path):
    state = whole.state_dict()
    state["h.0.upp.weight"] = state.pop("h.0.up.weight")
    torch.save(state, tmp_path / "other.bin")
    with pytest.raises(CheckpointError, match=r"h\.0\.up\.weight \(is it h\.0\.upp\.weight\?\)"):
        load_and_quantize_model(empty(), EIGHT, tmp_path / "other.bin")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_and_quantize_model(empty(), EIGHT, folder)


# ---- memory


def _memory(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("config", [EIGHT, NESTED, AO_EIGHT], ids=["8bit", "4bit", "torchao"])
def test_loading_takes_little_more_than_the_quantized_model(tmp_path, config):
    def layers():
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(25)))

    save_model(layers(), tmp_path)
    with init_empty_weights():
        model = layers()
    # Libraries are loaded, and their threads started, once.
    load_and_quantize_model(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1)), config)
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
    before = _memory("VmRSS")
    loaded = load_and_quantize_model(model, config, tmp_path)
    peak = _memory("VmHWM") - before
    whole, quantized = 25 * 4 * 2**20, 24 * config.scheme().bits * 2**17 + 4 * 2**20
    assert quantized < whole / 3
    assert peak < 0.7 * whole, f"{peak >> 20} MiB for {quantized >> 20}"  # whole and quantized would be more than 1.1
    assert loaded[3].weight.shape.numel() in (2**20, 2**19)


def test_the_documented_example_needs_about_the_documented_memory():
    """GPT2-1.5B: 6 GB, 1.6 GB with 8-bit modules and 1.2 GB with 4-bit modules, in units of 2**30 bytes."""

    class Gpt(nn.Module):
        def __init__(self, width: int = 1600, depth: int = 48) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(50257, width), nn.Embedding(1024, width)
            self.h = nn.ModuleList(
                nn.ModuleDict(
                    {
                        "c_attn": nn.Linear(width, 3 * width),
                        "c_proj": nn.Linear(width, width),
                        "c_fc": nn.Linear(width, 4 * width),
                        "down": nn.Linear(4 * width, width),
                        "ln": nn.LayerNorm(width),
                    }
                )
                for _ in range(depth)
            )
            self.lm_head = nn.Linear(width, 50257, bias=False)

    with init_empty_weights():
        model = Gpt()
    found = [compute_module_sizes(model)[""]]
    for config in (EIGHT, NESTED):
        names = layers_to_quantize(model, config, config.scheme())
        assert len(names) == 48 * 4
        special = special_dtypes(model, names, config, config.scheme())
        found.append(compute_module_sizes(model, torch.float16, special)[""])
    assert [size / 2**30 for size in found] == pytest.approx([6.0, 1.6, 1.2], abs=0.25)
