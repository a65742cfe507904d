"""Train a convolutional network on image files, with everything that a long run needs: augmentation, a schedule, batch
normalisation over all processes, checkpoints by step or epoch, resuming, tracking, early stopping, the best model.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py --data_dir images --checkpointing-steps 30 --with-tracking
    orc launch -n 2 --cpu train.py --data_dir images --resume-from-checkpoint latest

`image-classification` is the same without the features.

Expected: best accuracy >= 0.93
"""

import argparse
import random
from pathlib import Path

import numpy
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from orc.runtime import Accelerator, ProjectConfiguration, get_logger, set_seed

logger = get_logger(__name__, log_level="INFO")


def write_digits(directory):
    """Write 1,797 digits as PNG files of 8 x 8 pixels."""
    directory.mkdir(parents=True)
    digits = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        Image.fromarray((image * 15).astype("uint8")).save(directory / f"{label}_{index:04d}.png")


class Images(Dataset):
    """Images as tensors (1, size, size) of 0..1, and the number of their class; shifted a little for the training."""

    def __init__(self, files, classes, size, shift=0):
        self.files, self.classes, self.size, self.shift = files, classes, size, shift

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        with Image.open(file) as image:
            pixels = numpy.asarray(image.convert("L").resize((self.size, self.size)), dtype="float32") / 255
        if self.shift:  # torch's random numbers are a part of the checkpoints
            across, down = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
            pixels = numpy.roll(pixels, (down, across), axis=(0, 1))
        return torch.from_numpy(pixels).unsqueeze(0), self.classes.index(file.name.rpartition("_")[0])


class Network(nn.Module):
    """Two convolutions with batch normalisation, and a linear head."""

    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 24, kernel_size=3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 48, kernel_size=3, stride=2, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(48 * 4 * 4, classes)

    def forward(self, images):
        return self.head(self.body(images))


class Progress:
    """The best accuracy so far, and for how many epochs there was none; a part of the checkpoints."""

    best, waited = 0.0, 0

    def is_better(self, accuracy):
        better = accuracy > self.best
        self.best, self.waited = max(accuracy, self.best), 0 if better else self.waited + 1
        return better

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Return the accuracy over the whole loader."""
    model.eval()
    hits = [accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels) for images, labels in loader]
    model.train()
    return torch.cat(hits).float().mean().item()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=Path("images"))
    parser.add_argument("--size", type=int, default=8, help="images are resized to this width and height")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, per process")
    parser.add_argument("--checkpointing-steps", default="epoch", help='"epoch", or every so many optimizer steps')
    parser.add_argument("--resume-from-checkpoint", default="latest", help='"latest", "no", or a checkpoint')
    parser.add_argument("--with-tracking", action="store_true", help="log to TensorBoard")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    return parser.parse_args()


def main():
    args = arguments()
    project = ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(log_with="tensorboard" if args.with_tracking else None, project_config=project)
    accelerator.init_trackers("complete_vision", config={"lr": args.lr, "epochs": args.epochs, "seed": args.seed})

    with accelerator.local_main_process_first():  # one process of each machine writes, the others find it done
        if not args.data_dir.exists():
            write_digits(args.data_dir)
    files = sorted(args.data_dir.glob("*_*.*"))
    classes = sorted({file.name.rpartition("_")[0] for file in files})
    random.Random(0).shuffle(files)
    cut = len(files) * 4 // 5

    set_seed(args.seed)
    model = Network(len(classes))
    if accelerator.device.type == "cuda":
        # Statistics of a batch are those of all processes' batches together, as if there were one process.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr / 25, weight_decay=0.01)
    options = {"batch_size": args.batch_size, "num_workers": args.workers}
    train_loader = DataLoader(Images(files[:cut], classes, args.size, shift=1), shuffle=True, **options)
    test_loader = DataLoader(Images(files[cut:], classes, args.size), **options)
    total = args.epochs * len(train_loader) + args.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=total)
    model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, test_loader, schedule
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    step = first_epoch = 0
    if args.resume_from_checkpoint == "latest":
        if resumed := accelerator.resume():
            step, first_epoch = resumed.step, resumed.epoch
            logger.info("resumed from %s after step %d", resumed.path, step)
    elif args.resume_from_checkpoint != "no":
        accelerator.load_state(args.resume_from_checkpoint)  # loaders go on where it was saved

    for epoch in range(first_epoch, args.epochs):
        losses = []
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.05)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
            if args.checkpointing_steps.isdecimal() and step % int(args.checkpointing_steps) == 0:
                accelerator.save_state()
        loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item() if losses else float("nan")
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=epoch)
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}  step {step}  loss {loss:.4f}  accuracy {accuracy:.4f}")
        if progress.is_better(accuracy):
            accelerator.save_model(model, args.output_dir / "best")  # weights alone, for use elsewhere
        if args.checkpointing_steps == "epoch":
            accelerator.save_state()
        if progress.waited >= args.patience:  # gathered metrics are the same on all processes: all stop here
            accelerator.print(f"no better accuracy for {args.patience} epochs")
            break
    accelerator.print(f"best accuracy {progress.best:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
