"""Placeholders that scripts prepare in the place of what Megatron-LM makes by itself. Torch-free."""

from __future__ import annotations

from typing import Any


class MegatronLMDummyScheduler:
    """Placeholder of a schedule; `prepare` makes Megatron-LM's own, which warms up and decays by optimizer steps.

    Args:
        optimizer: the optimizer whose learning rate is the highest of the schedule.
        total_num_steps: optimizer steps until the rate has come down to ``min_lr`` of the plug-in.
        warmup_num_steps: optimizer steps of warm-up.
        kwargs: kept, for scripts that pass the arguments of another schedule.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """Placeholder of the loaders of an indexed dataset of Megatron-LM.

    Prepare it once, twice or three times in one call: it becomes the loaders of training, validation and test, which
    give the tokens of a batch to ``model(**next(loader))`` without end. A split without documents becomes `None`.

    Args:
        dataset_kwargs: ``data_path`` (of the files without ``.bin`` and ``.idx``), ``splits_string`` (``969,30,1``),
            ``seq_length``, ``micro_batch_size`` and ``seed``.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dict(dataset_kwargs)
