"""Size of a job by its specification, and the share of its training that is done. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# What scripts call the length of a training, as the job file passes it on.
_STEPS = ("max_steps", "total_steps", "num_steps", "max_train_steps", "train_steps", "steps")
_EPOCHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "train_epochs")


def nodes_and_gpus(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return the nodes that a job requests, and the GPUs on all of them: the most where it is elastic."""
    resources = spec.get("resources") or {}
    nodes = int(str(resources.get("nodes", 1)).rpartition(":")[2])
    return nodes, nodes * int(resources.get("gpus_per_node") or 0)


def share_done(spec: Mapping[str, Any], progress: Mapping[str, Any]) -> float | None:
    """Return the share of the training that *progress* is, between 0 and 1; `None` where its end is not known.

    The end is what the arguments of the program say: steps (``--max-steps 1000``), or else epochs (``epochs: 12``).
    """
    step, epoch = progress.get("step"), progress.get("epoch")
    lengths: dict[str, float] = {}
    for name, value in _numbers(spec.get("args") or ()):
        lengths.setdefault(name, value)
    for name in _STEPS:
        if lengths.get(name, 0) > 0 and isinstance(step, (int, float)):
            return min(max(step / lengths[name], 0.0), 1.0)
    for name in _EPOCHS:
        if lengths.get(name, 0) > 0 and isinstance(epoch, (int, float)):
            samples, length = progress.get("samples"), progress.get("of")
            known = isinstance(samples, (int, float)) and isinstance(length, (int, float)) and length > 0
            part = min(samples / length, 1.0) if known else 0.0  # type: ignore[operator]
            return min(max((epoch + part) / lengths[name], 0.0), 1.0)
    return None


def _numbers(args: Any) -> Iterator[tuple[str, float]]:
    """Yield the flags of *args* that have a number, by their names with underscores."""
    words = [str(word) for word in args]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, separator, value = word.partition("=")
        if not name.startswith("-"):
            name = f"--{name}" if separator else ""  # `lr=0.1`, as Hydra takes it
        try:
            number = float(value if separator else following)
        except ValueError:
            continue
        if name and number == number:
            yield name.lstrip("-").replace("-", "_"), number
