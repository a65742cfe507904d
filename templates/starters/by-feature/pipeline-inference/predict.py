"""Run a model in stages, one on each process, with several micro-batches on their way at a time.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu predict.py

For models that are too large for one device. `prepare_pippy` traces the model with an example and cuts it where a
device map would; `--split-points` names the modules that begin the later stages instead. Batches may have any size.
Without `gather_output=True` the answers are on the last process only.

Expected: accuracy of the answers >= 0.9
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn

from orc.runtime import Accelerator
from orc.runtime.inference import prepare_pippy


def make_model(images, labels):
    """Return a network of three layers; a large one would come from `from_pretrained`."""
    fitted = MLPClassifier((64, 64), alpha=0.1, max_iter=40, random_state=0).fit(images, labels)
    layers = []
    for weight, bias in zip(fitted.coefs_, fitted.intercepts_, strict=True):
        layer = nn.Linear(*weight.shape)
        layer.load_state_dict({"weight": torch.tensor(weight.T), "bias": torch.tensor(bias)})
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--split-points", nargs="+", default="auto", help="modules that begin a stage, such as 2")
    parser.add_argument("--num-chunks", type=int, help="micro-batches of a batch; one for each process by default")
    args = parser.parse_args()

    accelerator = Accelerator()
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = make_model(digits.data[:900] / 16, digits.target[:900])

    example = images[: args.batch_size]
    model = prepare_pippy(
        model, args.split_points, example_args=(example,), num_chunks=args.num_chunks, gather_output=True
    )
    accelerator.print(f"the later stages begin at {model.hf_split_points}")

    answers = torch.cat([model(batch).argmax(dim=1).cpu() for batch in images[900:].split(args.batch_size)])
    accelerator.print(f"{len(answers)} answers")
    accelerator.print(f"accuracy of the answers {(answers == labels[900:]).float().mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
