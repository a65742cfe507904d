"""Train a small GPT on the documentation of Python with DeepSpeed.

Run it with `orc submit job.yaml --follow`, or without a job file:

    orc launch -n 2 --cpu --use-deepspeed --deepspeed-config-file zero3.json train.py

Nothing in here is about DeepSpeed: the settings in zero3.json choose what it does. The same script trains replicas
(`orc launch -n 2 --cpu train.py`), and `python train.py` a single process.
"""

import argparse
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from orc.runtime import Accelerator


class Windows(Dataset):
    """Windows of `context` characters, one after the other, each with the same window moved on by one."""

    def __init__(self, text, context):
        self.text, self.context = text, context

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        window = self.text[index * self.context : (index + 1) * self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each on a normalised copy added back."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Characters in, scores for the next one out; the head is the embedding (tied weights)."""

    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.context = context
        self.letter, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.letter.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.head.weight = self.letter.weight

    def forward(self, letters):
        x = self.letter(letters) + self.place(torch.arange(letters.shape[1], device=letters.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per process and step")
    parser.add_argument("--context", type=int, default=64, help="characters the model looks back")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=120, help="characters to write at the end")
    args = parser.parse_args()

    accelerator = Accelerator(project_dir="runs")
    torch.manual_seed(0)
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    number = {letter: index for index, letter in enumerate(alphabet)}
    letters = torch.tensor([number[letter] for letter in text])
    loader = DataLoader(Windows(letters, args.context), batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = GPT(len(alphabet), args.context, args.width, args.heads, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(f"{accelerator.distributed_type}, {accelerator.num_processes} processes, {len(text)} characters")
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.print(f"ZeRO stage {accelerator.state.deepspeed_plugin.zero_stage}")

    resumed = accelerator.resume()
    step = resumed.step if resumed else 0
    if resumed:
        accelerator.print(f"resumed from {resumed.path} after step {step}")

    while step < args.steps:
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.print(f"step {step:4d}/{args.steps}  loss {mean:.4f}")
            if step >= args.steps:
                break
    accelerator.save_state()
    # The forward of a sharded model is a joint effort: all processes write the same characters.
    written = torch.tensor([[number["\n"]]], device=accelerator.device)
    generator = torch.Generator(device=accelerator.device).manual_seed(0)
    model.eval()
    with torch.no_grad():
        for _ in range(args.sample):
            scores = model(written[:, -args.context :])[:, -1] / 0.8
            written = torch.cat([written, torch.multinomial(scores.softmax(-1), 1, generator=generator)], dim=1)
    accelerator.print("".join(alphabet[index] for index in written[0].tolist()))
    accelerator.save_model(model, "runs/model")  # whole weights, for use elsewhere
    accelerator.end_training()


if __name__ == "__main__":
    main()
