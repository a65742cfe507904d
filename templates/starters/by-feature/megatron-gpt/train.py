"""Train a small GPT-2 on the documentation of Python with Megatron-LM, save it for Transformers, and let it write.

Run it with `orc submit job.yaml --follow`, or without a job file:

    orc launch -n 2 --cpu --use-megatron-lm --megatron-lm-tp-degree 2 --megatron-lm-num-micro-batches 2 train.py

The settings say how the model is split. The loop below is the usual one; what Megatron-LM wants otherwise is its own
schedule, a loader whose batch size is that of one micro batch, and losses that need no gathering.

Expected: loss at the end <= 3.2
"""

import argparse
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from orc.runtime import Accelerator, MegatronLMDummyScheduler


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4, help="windows in a micro batch")
    parser.add_argument("--context", type=int, default=64, help="characters the model looks back")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=40, help="characters to write at the end")
    args = parser.parse_args()

    accelerator = Accelerator(project_dir="runs")
    torch.manual_seed(0)
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    number = {letter: index for index, letter in enumerate(alphabet)}
    letters = torch.tensor([number[letter] for letter in text])
    windows = letters[: len(letters) // args.context * args.context].view(-1, args.context)
    samples = [{"input_ids": window, "labels": window} for window in windows]
    loader = DataLoader(samples, batch_size=args.batch_size, shuffle=True, drop_last=True)

    shape = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 2 * args.context, "vocab_size": len(alphabet)}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = MegatronLMDummyScheduler(
        optimizer, total_num_steps=args.steps, warmup_num_steps=min(5, args.steps // 2)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    plugin = accelerator.state.megatron_lm_plugin
    accelerator.print(
        f"{accelerator.distributed_type}: matrices over {plugin.tp_degree}, layers over {plugin.pp_degree} processes, "
        f"{plugin.data_parallel_size} copies, {plugin.global_batch_size} windows per step"
    )

    step, losses = 0, []
    while step < args.steps:
        for batch in loader:
            loss = model(**batch).loss  # forward and backward of all micro batches
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))  # averaged over micro batches and copies already
            step += 1
            if step % 20 == 0:
                accelerator.print(f"step {step:4d}/{args.steps}  loss {sum(losses[-10:]) / 10:.4f}")
            if step >= args.steps:
                break
    accelerator.print(f"loss at the end {sum(losses[-10:]) / len(losses[-10:]):.4f}")
    accelerator.save_model(model, "runs/model")  # whole, under the names of Transformers

    if plugin.data_parallel_size == 1:
        prompt = torch.tensor([[number[letter] for letter in "The "]])
        written = model.megatron_generate(prompt, max_new_tokens=args.sample, top_k=5, random_seed=0)
        accelerator.print("".join(alphabet[index] for index in written[0].tolist()).replace("\n", " "))
    accelerator.end_training()


if __name__ == "__main__":
    main()
