"""Train a small GPT on Shakespeare, letter by letter, and let it write at the end.

Run it with `orc submit job.yaml --follow`, with `orc launch -n 2 train.py`, or plainly with `python train.py`.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from orc.runtime import Accelerator

TEXT = Path(__file__).with_name("shakespeare.txt")


class Windows(Dataset):
    """Windows of `context` letters, every `stride` letters, each with the same window moved on by one letter."""

    def __init__(self, letters, context, stride):
        self.letters, self.context, self.stride = letters, context, stride

    def __len__(self):
        return (len(self.letters) - self.context - 1) // self.stride + 1

    def __getitem__(self, index):
        window = self.letters[index * self.stride : index * self.stride + self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each on a normalised copy added back."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Letters in, scores for the next letter out: (batch, length) -> (batch, length, vocabulary)."""

    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.context = context
        self.letter, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.letter.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, letters):
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letter(letters) + self.position(places))))

    @torch.no_grad()
    def write(self, start, count, generator):
        """Continue `start`, a (1, length) tensor, by `count` letters."""
        self.eval()
        text = start
        for _ in range(count):
            scores = self(text[:, -self.context :])[:, -1] / 0.8
            text = torch.cat([text, torch.multinomial(scores.softmax(-1), 1, generator=generator)], dim=1)
        self.train()
        return text[0]


@torch.no_grad()
def validation_loss(accelerator, model, loader):
    """Mean loss per letter over the held-out text, over all processes."""
    model.eval()
    losses = []
    for letters, following in loader:
        each = F.cross_entropy(model(letters).transpose(1, 2), following, reduction="none").mean(dim=1)
        losses.append(accelerator.gather_for_metrics(each))
    model.train()
    return torch.cat(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per process and step")
    parser.add_argument("--context", type=int, default=64, help="letters the model looks back")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=300, help="letters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # Checkpoints go where the job says (ORC_CHECKPOINT_DIR), or to ./runs when there is no job. How often is in the
    # job file, too (checkpoint.every): they are made between two steps, with nothing to do here.
    accelerator = Accelerator(project_dir="runs")
    torch.manual_seed(args.seed)

    text = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    number = {letter: index for index, letter in enumerate(alphabet)}
    letters = torch.tensor([number[letter] for letter in text])
    cut = len(letters) * 9 // 10
    train_set = Windows(letters[:cut], args.context, stride=args.context // 4)
    held_out = Windows(letters[cut:], args.context, stride=args.context)

    model = GPT(len(alphabet), args.context, args.width, args.heads, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    held_out_loader = DataLoader(held_out, batch_size=args.batch_size)
    size = sum(p.numel() for p in model.parameters())
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )

    accelerator.print(f"{len(text)} letters, {size} parameters, {accelerator.num_processes} processes")
    resumed = accelerator.resume()
    step = resumed.step if resumed else 0
    if resumed:
        accelerator.print(f"resumed from {resumed.path} after step {step}")

    while step < args.steps:
        for inputs, targets in train_loader:
            # Warm up, then fall along a cosine; a function of the step alone, so that a resumed run agrees.
            warm, done = min(1.0, (step + 1) / 30), step / args.steps
            for group in optimizer.param_groups:
                group["lr"] = args.lr * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue  # a step is the optimizer's, and comes with the last batch that it accumulates
            step += 1
            if step % 20 == 0:
                mean = accelerator.reduce(loss.detach(), reduction="mean").item()
                accelerator.print(f"step {step:4d}/{args.steps}  loss {mean:.4f}")
            if step == args.steps:
                break
        held_out_loss = validation_loss(accelerator, model, held_out_loader)
        accelerator.print(f"step {step:4d}/{args.steps}  held-out loss {held_out_loss:.4f}")
    accelerator.save_state()

    if accelerator.is_main_process:
        writer = accelerator.unwrap_model(model)
        start = torch.tensor([[number["\n"]]], device=accelerator.device)
        generator = torch.Generator(device=accelerator.device).manual_seed(args.seed)
        written = writer.write(start, args.sample, generator)
        print("".join(alphabet[index] for index in written.tolist()))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
