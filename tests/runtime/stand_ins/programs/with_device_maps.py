"""Transformers and peft with a model that lies on the CPU and on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import get_balanced_memory
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.layers.3": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
IDS = torch.arange(1, 13).view(2, 6)


def _saved(folder: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    model.save_pretrained(folder)
    return model


def _places(model: torch.nn.Module) -> dict[str, str]:
    return {name: str(place) for name, place in getattr(model, "hf_device_map", {}).items()}


def _run(model: Any, device: str = "cpu") -> dict[str, Any]:
    ids = IDS.to(device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    words = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    return {"logits": logits.sum().item(), "first": logits[0, -1, :4].tolist(), "words": words.tolist()}


def from_pretrained(place: str) -> dict[str, Any]:
    """Load with a device map, generate, save again."""
    folder = Path(place) / "from_pretrained"
    whole = _saved(folder / "model")
    spread = LlamaForCausalLM.from_pretrained(
        folder / "model", device_map=dict(PLACES), offload_folder=folder / "away", dtype="float32"
    ).eval()
    found = {"whole": _run(whole), "spread": _run(spread), "places": _places(spread)}
    found["meta"] = sorted(name for name, value in spread.named_parameters() if value.is_meta)
    spread.save_pretrained(folder / "again")
    again = LlamaForCausalLM.from_pretrained(folder / "again", device_map="auto", dtype="float32").eval()
    found |= {"again": _run(again), "auto": _places(again)}
    on_disk = LlamaForCausalLM.from_pretrained(
        folder / "model", device_map={"": "disk"}, offload_folder=folder / "all", dtype="float32"
    )
    _run(on_disk)
    on_disk.save_pretrained(folder / "from_disk")  # its tied weights too are on the disk
    limited = LlamaForCausalLM.from_pretrained(
        folder / "model", device_map="auto", max_memory={"cpu": "60KB"}, offload_folder=folder / "rest", dtype="float32"
    )
    found |= {"limited": _run(limited), "limited places": _places(limited)}
    found["from disk"] = _run(LlamaForCausalLM.from_pretrained(folder / "from_disk", dtype="float32").eval())
    try:
        spread.to("cpu")
        found["moved"] = True
    except RuntimeError:
        found["moved"] = False
    return found


def lora(place: str) -> dict[str, Any]:
    """Add an adapter to a spread model, run it, save it, load it into another one."""
    folder = Path(place) / "lora"
    _saved(folder / "model")
    places = {**PLACES, "model.layers.1": "cpu", "model.layers.2": "cpu"}
    base = LlamaForCausalLM.from_pretrained(folder / "model", device_map=places, dtype="float32")
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    first = _run(model)
    model.save_pretrained(folder / "adapter")
    spread = LlamaForCausalLM.from_pretrained(
        folder / "model", device_map=dict(PLACES), offload_folder=folder / "away", dtype="float32"
    )
    other = PeftModel.from_pretrained(
        spread,
        folder / "adapter",
        device_map={f"base_model.model.{module}": place for module, place in PLACES.items()},
        offload_folder=str(folder / "away"),
    ).eval()
    return {"first": first, "other": _run(other)}


def by_hand(place: str) -> dict[str, Any]:
    """Spread a model with the documented functions alone."""
    folder = Path(place) / "by_hand"
    whole = _saved(folder / "model")
    with init_empty_weights():
        empty = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    empty.tie_weights()
    limits = get_balanced_memory(empty, {"cpu": 60_000}, ["LlamaDecoderLayer"])
    places = infer_auto_device_map(empty, limits, ["LlamaDecoderLayer"], dtype=torch.float32)
    loaded = load_checkpoint_and_dispatch(
        empty, folder / "model", device_map=places, offload_folder=folder / "away", offload_buffers=False,
        no_split_module_classes=["LlamaDecoderLayer"], skip_keys="past_key_values",
    )  # fmt: skip
    spread = dispatch_model(whole, dict(PLACES), offload_dir=folder / "other", skip_keys="past_key_values")
    return {
        "places": _places(loaded),
        "loaded": _run(loaded),
        "spread": _run(spread),
        "files": len(list((folder / "other").glob("*.dat"))),
    }


def on_gpu(place: str) -> dict[str, Any]:
    """Spread a model over the GPU, the CPU and the disk, with an adapter, and generate; the same all on the GPU."""
    folder = Path(place) / "on_gpu"
    _saved(folder / "model")
    places = {name: 0 if where == "cpu" else where for name, where in PLACES.items()}
    places |= {"model.layers.1": "cpu"}
    torch.manual_seed(1)
    spread = LlamaForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "away", dtype="float32"
    ).eval()
    found = {"spread": _run(spread, "cuda"), "places": _places(spread)}
    automatic = LlamaForCausalLM.from_pretrained(folder / "model", device_map="auto", dtype="float32").eval()
    found |= {"auto": _places(automatic), "whole": _run(automatic, "cuda")}
    model = get_peft_model(automatic, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    return {**found, "adapted": _run(model, "cuda")}
