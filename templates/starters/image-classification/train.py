"""Classify image files, whose names begin with their class (`7_0123.png`), with a small convolutional network.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py --data_dir images
    python train.py --data_dir images

A directory that is not there yet is filled with scikit-learn's handwritten digits; put your own images there instead.

Expected: test accuracy >= 0.93
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

from orc.runtime import Accelerator, set_seed


def write_digits(directory):
    """Write 1,797 digits as PNG files of 8 x 8 pixels."""
    directory.mkdir(parents=True)
    digits = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        Image.fromarray((image * 15).astype("uint8")).save(directory / f"{label}_{index:04d}.png")


class Images(Dataset):
    """Images as tensors (1, size, size) of 0..1, and the number of their class."""

    def __init__(self, files, classes, size):
        self.files, self.classes, self.size = files, classes, size

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        with Image.open(file) as image:
            pixels = numpy.asarray(image.convert("L").resize((self.size, self.size)), dtype="float32") / 255
        return torch.from_numpy(pixels).unsqueeze(0), self.classes.index(file.name.rpartition("_")[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=Path("images"))
    parser.add_argument("--size", type=int, default=8, help="images are resized to this width and height")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    args = parser.parse_args()

    accelerator = Accelerator()
    with accelerator.local_main_process_first():  # one process of each machine writes, the others find it done
        if not args.data_dir.exists():
            write_digits(args.data_dir)
    files = sorted(args.data_dir.glob("*_*.*"))
    classes = sorted({file.name.rpartition("_")[0] for file in files})
    random.Random(0).shuffle(files)
    cut = len(files) * 4 // 5

    set_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, len(classes)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    train_loader = DataLoader(Images(files[:cut], classes, args.size), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Images(files[cut:], classes, args.size), batch_size=64)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        for images, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        hits = []
        for images, labels in test_loader:
            with torch.no_grad():
                hits.append(accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels))
        model.train()
        accuracy = torch.cat(hits).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
