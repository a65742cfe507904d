"""Arithmetic of Megatron-LM's parallelism: what each process gets of layers, vocabulary, tokens and batches. Pure."""

from __future__ import annotations


def data_parallel_size(processes: int, tp_degree: int, pp_degree: int) -> int:
    """Return how many copies of the model *processes* train. Raises `ValueError` when they are no whole number."""
    size, rest = divmod(processes, tp_degree * pp_degree)
    if rest or not size:
        raise ValueError(
            f"tp_degree {tp_degree} x pp_degree {pp_degree} needs a multiple of {tp_degree * pp_degree} processes, and "
            f"there are {processes}: launch more, or lower the degrees"
        )
    return size


def global_batch_size(micro_batch_size: int, num_micro_batches: int, data_parallel: int) -> int:
    """Return the samples of one optimizer step."""
    return micro_batch_size * num_micro_batches * data_parallel


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the optimizer steps of one pass over *samples*, the last incomplete batch included."""
    return -(-samples // batch_size)


def padded_vocabulary(size: int, tp_degree: int, divisible_by: int = 128) -> int:
    """Return the rows of the embedding for *size* tokens: a multiple of *divisible_by* on each of the processes."""
    multiple = divisible_by * tp_degree
    return -(-size // multiple) * multiple


def layers_per_stage(layers: int, pp_degree: int, layers_per_virtual_stage: int | None = None) -> int:
    """Return the layers of one stage.

    Raises:
        ValueError: the layers cannot be shared out evenly, or not into virtual stages of that many layers.
    """
    share, rest = divmod(layers, pp_degree)
    if rest or not share:
        raise ValueError(f"{layers} layers cannot be shared out evenly over pp_degree {pp_degree} stages")
    if layers_per_virtual_stage is not None and share % layers_per_virtual_stage:
        raise ValueError(
            f"a stage has {share} layers, which is no multiple of num_layers_per_virtual_pipeline_stage "
            f"{layers_per_virtual_stage}"
        )
    return share


def virtual_stages(layers: int, pp_degree: int, layers_per_virtual_stage: int | None) -> int:
    """Return how many separate pieces of the model each process has in an interleaved schedule; 1 without one."""
    share = layers_per_stage(layers, pp_degree, layers_per_virtual_stage)
    return 1 if layers_per_virtual_stage is None else share // layers_per_virtual_stage
