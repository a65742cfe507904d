"""Train on Amazon SageMaker: arguments are hyperparameters, data comes by channels, the model leaves by a directory.

    ORC_CLUSTERS=clusters.yaml orc render job.yaml        # the request; needs no credentials and no network
    ORC_CLUSTERS=clusters.yaml orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py                        # the same script on this machine

Nothing in here is about SageMaker but four variables, which it sets and a laptop does not.

Expected: test accuracy >= 0.95
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, set_seed
from orc.runtime.utils import str_to_bool


def datasets():
    """455 tumours to learn from and 114 to test on: 30 measurements each, benign (1) or malignant (0)."""
    data = load_breast_cancer()
    inputs, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:455], order[455:]
    inputs = (inputs - inputs[train].mean(dim=0)) / inputs[train].std(dim=0)
    return TensorDataset(inputs[train], labels[train]), TensorDataset(inputs[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=16, help="per process")
    # SageMaker gives every argument a value, so that a flag is written as one: --shuffle True
    parser.add_argument("--shuffle", type=str_to_bool, default=True)
    args = parser.parse_args()

    # What is saved in SM_MODEL_DIR is packed into model.tar.gz when the job has succeeded. Checkpoints go to
    # /opt/ml/checkpoints, which is kept in S3 and comes back when a spot instance was taken away.
    model_dir = Path(os.environ.get("SM_MODEL_DIR", "model"))
    accelerator = Accelerator(project_dir=os.environ.get("SM_OUTPUT_DATA_DIR", "runs"))
    accelerator.print(
        f"{accelerator.num_processes} processes on {len(os.environ.get('SM_HOSTS', '[1]').split(','))} hosts"
    )
    accelerator.print(f"channel train: {os.environ.get('SM_CHANNEL_TRAIN', 'none; the data comes with scikit-learn')}")
    set_seed(0)
    train_set, test_set = datasets()
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=bool(args.shuffle))
    test_loader = DataLoader(test_set, batch_size=64)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    resumed = accelerator.resume()

    for _ in range(resumed.epoch if resumed else 0, args.epochs):
        for inputs, labels in train_loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
    model.eval()
    hits = []
    for inputs, labels in test_loader:
        with torch.no_grad():
            hits.append(accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == labels))
    accelerator.print(f"test accuracy {torch.cat(hits).float().mean().item():.4f}")
    accelerator.save_model(model, model_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
