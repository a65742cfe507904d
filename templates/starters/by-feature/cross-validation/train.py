"""Cross-validate: train one model per fold, and let all of them vote on samples that none of them has seen.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu train.py

Expected: test accuracy >= 0.93
"""

import argparse

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, set_seed


@torch.no_grad()
def scores_of(accelerator, model, loader):
    """Scores (samples, classes) and labels (samples) of the whole loader, on every process and in its order."""
    model.eval()
    parts = [accelerator.gather_for_metrics((model(inputs), labels)) for inputs, labels in loader]
    return torch.cat([scores for scores, _ in parts]), torch.cat([labels for _, labels in parts])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    accelerator = Accelerator()
    data = load_wine()  # 178 wines, 13 chemical measurements, three growers
    inputs, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    known, test = train_test_split(torch.arange(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    inputs = (inputs - inputs[known].mean(dim=0)) / inputs[known].std(dim=0)
    test_loader = accelerator.prepare(DataLoader(TensorDataset(inputs[test], labels[test]), batch_size=16))

    # The folds are drawn with a fixed seed, so that all processes cut alike.
    folds = StratifiedKFold(args.folds, shuffle=True, random_state=0).split(known, labels[known])
    votes, fold_accuracies = [], []
    for fold, (train, valid) in enumerate(folds):
        set_seed(fold)
        model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train_set = TensorDataset(inputs[known[train]], labels[known[train]])
        valid_set = TensorDataset(inputs[known[valid]], labels[known[valid]])
        train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
        valid_loader = DataLoader(valid_set, batch_size=16)
        model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
        for _ in range(args.epochs):
            for batch, truth in train_loader:
                accelerator.backward(nn.functional.cross_entropy(model(batch), truth))
                optimizer.step()
                optimizer.zero_grad()
        scores, truth = scores_of(accelerator, model, valid_loader)
        fold_accuracies.append((scores.argmax(dim=1) == truth).float().mean().item())
        accelerator.print(f"fold {fold + 1}/{args.folds}  accuracy {fold_accuracies[-1]:.4f}")
        scores, truth = scores_of(accelerator, model, test_loader)
        votes.append(scores.softmax(dim=1))
        # This fold's model is done with: let it go before the next one is made.
        model, optimizer, train_loader, valid_loader = accelerator.free_memory(
            model, optimizer, train_loader, valid_loader
        )

    accelerator.print(f"mean over folds {sum(fold_accuracies) / len(fold_accuracies):.4f}")
    accuracy = (torch.stack(votes).mean(dim=0).argmax(dim=1) == truth).float().mean().item()
    accelerator.print(f"test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
