"""Train a transformer on text, with everything that a long run needs: schedule, accumulation, mixed precision,
checkpoints by step or epoch, resuming, tracking, metrics over all processes, and the best model at the end.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py --checkpointing-steps 20 --with-tracking
    orc launch -n 2 --cpu train.py --resume-from-checkpoint latest --epochs 8

The task: which chapter of Python's language reference is a passage from? `text-classification` is the same without the
features.

Expected: best accuracy >= 0.80
"""

import argparse
import random
import re
from pathlib import Path
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, ProjectConfiguration, get_logger, set_seed

CHAPTERS = [["debugger"], ["compound"], ["string-methods", "formatstrings"]]
WORDS = 16  # at most, in a passage
logger = get_logger(__name__, log_level="INFO")


def passages():
    """Return pairs of words and chapter number, 80 % to learn from and the rest to test on."""
    found = []
    for chapter, names in enumerate(CHAPTERS):
        words = re.findall(r"[a-z_]+", " ".join(topics[name] for name in names).lower())
        starts = range(0, len(words) - WORDS, WORDS)
        # Of different lengths, as sentences are: that is what the padding is for.
        found += [(words[start : start + WORDS - index % 5], chapter) for index, start in enumerate(starts)]
    random.Random(0).shuffle(found)
    cut = len(found) * 4 // 5
    return found[:cut], found[cut:]


class Collate:
    """Make a batch of the passages' word numbers: padded with 0 to the longest of this batch."""

    def __init__(self, vocabulary):
        self.number = {word: index + 2 for index, word in enumerate(vocabulary)}  # 0 is padding, 1 any other word

    def __call__(self, batch):
        rows = [torch.tensor([self.number.get(word, 1) for word in words]) for words, _ in batch]
        return {"words": pad_sequence(rows, batch_first=True), "labels": torch.tensor([label for _, label in batch])}


class Encoder(nn.Module):
    """A transformer layer over the words, their mean, and scores for the classes."""

    def __init__(self, words, width, classes):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Embedding(64, width)
        nn.init.normal_(self.places.weight, std=0.02)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.3, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, words):
        padding = words == 0
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        x = self.layer(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(2), 0)
        return self.head(x.sum(dim=1) / (~padding).sum(dim=1, keepdim=True))


def optimizer_of(model, lr, weight_decay):
    """Return AdamW without weight decay for biases and norms, as is usual for transformers."""
    plain = [parameter for name, parameter in model.named_parameters() if parameter.dim() < 2]
    decayed = [parameter for name, parameter in model.named_parameters() if parameter.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Return mean loss and accuracy over the whole loader."""
    model.eval()
    losses, hits = [], []
    for batch in loader:
        scores = model(batch["words"])
        each = nn.functional.cross_entropy(scores, batch["labels"], reduction="none")
        each, hit = accelerator.gather_for_metrics((each, scores.argmax(dim=1) == batch["labels"]))
        losses.append(each)
        hits.append(hit.float())
    model.train()
    return torch.cat(losses).mean().item(), torch.cat(hits).mean().item()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8, help="per process and batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], help="default: what the job says")
    parser.add_argument("--checkpointing-steps", default="epoch", help='"epoch", or every so many optimizer steps')
    parser.add_argument("--resume-from-checkpoint", default="latest", help='"latest", "no", or a checkpoint')
    parser.add_argument("--with-tracking", action="store_true", help="log to all trackers that are installed")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    return parser.parse_args()


def main():
    args = arguments()
    project = ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        log_with="tensorboard" if args.with_tracking else None,
        project_config=project,
    )
    set_seed(args.seed)
    accelerator.init_trackers("complete_nlp", config={"lr": args.lr, "epochs": args.epochs, "seed": args.seed})

    train_set, test_set = passages()
    collate = Collate(sorted({word for words, _ in train_set for word in words}))
    model = Encoder(len(collate.number) + 2, 64, len(CHAPTERS))
    optimizer = optimizer_of(model, args.lr, weight_decay=0.01)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, batch_size=64, collate_fn=collate)
    # The schedule counts batches of one process: `prepare` lets it advance as the processes do together.
    total = args.epochs * len(train_loader) // accelerator.gradient_accumulation_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=total + args.epochs + 1)
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )

    step = first_epoch = 0
    if args.resume_from_checkpoint == "latest":
        if resumed := accelerator.resume():
            step, first_epoch = resumed.step, resumed.epoch
            logger.info("resumed from %s after step %d", resumed.path, step)
    elif args.resume_from_checkpoint != "no":
        accelerator.load_state(args.resume_from_checkpoint)  # loaders go on where it was saved

    best = 0.0
    for epoch in range(first_epoch, args.epochs):
        losses = []
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["words"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                step += 1
                if args.checkpointing_steps.isdecimal() and step % int(args.checkpointing_steps) == 0:
                    accelerator.save_state()
        train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item() if losses else float("nan")
        test_loss, accuracy = evaluate(accelerator, model, test_loader)
        accelerator.log({"train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy}, step=epoch)
        accelerator.print(
            f"epoch {epoch + 1}/{args.epochs}  step {step}  loss {train_loss:.4f}  test loss {test_loss:.4f}  "
            f"accuracy {accuracy:.4f}  lr {schedule.get_last_lr()[0]:.1e}"
        )
        if args.checkpointing_steps == "epoch":
            accelerator.save_state()
        if accuracy > best:
            best = accuracy
            accelerator.save_model(model, args.output_dir / "best")  # weights alone, for use elsewhere
    accelerator.print(f"best accuracy {best:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
