"""Streams of `datasets` through prepared loaders."""

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, gather_object
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader


def stream(shards=4, rows=26):
    """A stream of the numbers below *rows*, in *shards*."""
    return Dataset.from_dict({"x": list(range(rows))}).to_iterable_dataset(num_shards=shards).with_format("torch")


def rows(batches):
    """What this rank has read, batch by batch."""
    return [batch["x"].tolist() for batch in batches]


def flat(ranks):
    """All rows of all ranks, in order of their value."""
    return sorted(row for batches in ranks for batch in batches for row in batch)


def streams(folder):
    """Both ways of dispatching, metrics without repetitions; read on every rank: skipped, and shuffled by a buffer."""
    result = {}
    for dispatch in (True, False):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(stream(), batch_size=3))
        result[f"read, dispatch={dispatch}"] = gather_object([rows(loader)])
        kept = [value for batch in loader for value in accelerator.gather_for_metrics(batch["x"]).tolist()]
        result[f"metrics, dispatch={dispatch}"] = sorted(kept)
        if not dispatch:
            result["skipped"] = gather_object([rows(skip_first_batches(loader, 2))])
            shuffled = stream().shuffle(seed=3, buffer_size=8)
            shuffled.set_epoch(1)
            loader = accelerator.prepare(DataLoader(shuffled, batch_size=2))
            result["shuffled"] = gather_object([rows(loader)])
        accelerator.free_memory()
    return result


def resumed(folder):
    """A stream that is left in the middle of a pass, saved, and gone on with in another loader."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    whole = rows(accelerator.prepare(DataLoader(stream(), batch_size=3)))
    left = accelerator.prepare(DataLoader(stream(), batch_size=3))
    for number, _ in enumerate(left, 1):
        if number == 2:
            break
    rest = rows(skip_first_batches(accelerator.prepare(DataLoader(stream(), batch_size=3)), 2))
    assert rest == whole[2:]
    accelerator.free_memory()
    return {"rest": rest}


def split_by_node(folder):
    """A stream that `split_dataset_by_node` has cut into one part for each process."""
    accelerator = Accelerator()
    part = split_dataset_by_node(stream(), rank=accelerator.process_index, world_size=accelerator.num_processes)
    return {"rows": flat(gather_object([[[int(one["x"]) for one in part]]]))}
