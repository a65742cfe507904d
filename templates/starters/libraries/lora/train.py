"""Fine-tune a language model with LoRA (peft): a few thousand new weights learn, all others stay as they are.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu --stand-in accelerate train.py

The program is written for `accelerate` and runs unchanged: job.yaml says `stand_in: [accelerate]`. So that nothing has
to be downloaded, the base model is a tiny one that learns one part of Python's reference first; LoRA then fits it to
another. With a model of yours that is `AutoModelForCausalLM.from_pretrained(...)` instead of `base_model`.

Expected: loss after LoRA <= 2.95
"""

import argparse
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64


def windows(*names):
    """Cut chapters of the reference into windows of CONTEXT characters (numbers below 128)."""
    text = "".join(letter for name in names for letter in topics[name] if letter.isascii())
    letters = torch.tensor([ord(letter) for letter in text])
    return letters[: len(letters) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def train(accelerator, model, optimizer, loader, epochs):
    """Train *model*, which is prepared, and return its mean loss in each epoch over all processes."""
    model.train()
    means = []
    for _ in range(epochs):
        losses = []
        for letters in loader:
            loss = model(input_ids=letters, labels=letters).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        means.append(accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item())
    return means


def base_model(accelerator, epochs):
    """Return a small GPT-2 that has read the chapters on statements and strings."""
    sizes = {"vocab_size": 128, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(windows("compound", "string-methods", "formatstrings"), batch_size=16, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = train(accelerator, prepared, optimizer, loader, epochs)
    accelerator.print(f"loss of the base model {losses[-1]:.4f} on what it was trained on")
    model = accelerator.unwrap_model(prepared)
    accelerator.free_memory()
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-epochs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8, help="of the matrices that LoRA adds")
    parser.add_argument("--output-dir", default="adapter")
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    base = base_model(accelerator, args.base_epochs)
    frozen = base.transformer.h[0].attn.c_attn.weight.detach().clone()

    lora = LoraConfig(r=args.rank, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"{learning} of {total} weights learn")
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
    loader = DataLoader(windows("debugger"), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = train(accelerator, model, optimizer, loader, args.epochs)

    adapted = accelerator.unwrap_model(model)
    same = torch.equal(adapted.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight, frozen)
    accelerator.print(f"base weights untouched: {same}")
    accelerator.print(f"loss in the first epoch of LoRA {losses[0]:.4f}")
    accelerator.print(f"loss after LoRA {losses[-1]:.4f}")
    if accelerator.is_main_process:
        adapted.save_pretrained(args.output_dir)  # the adapter alone: some tens of kB
        print(f"{len(get_peft_model_state_dict(adapted))} tensors in {args.output_dir}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
