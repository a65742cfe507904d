"""Run the programs of this folder in 1 and 2 processes: ``python run.py reference|orc FOLDER [PROGRAM ...]``.

What they return is in FOLDER/results.json, by number of processes and program. With ACCELERATE_USE_CPU=true they run on
the CPU, else in this process on the GPU: Trainer's or the others.

Importing the libraries costs seconds, so one process imports them and forks the ranks.
"""

import gc
import importlib
import json
import os
import pathlib
import socket
import sys
import traceback

PROGRAMS = ("with_trl.sft", "with_trl.dpo", "with_trl.grpo", "with_peft.trainer", "with_peft.loop")
PROGRAMS += ("with_datasets.streams", "with_datasets.resumed", "with_datasets.split_by_node", "with_diffusers.train")
TRAINER = ("plain", "bf16", "accumulation", "gradient_checkpointing", "workers", "split_batches", "resume_in_mid_epoch")
TRAINER += ("classification", "automatic_batch_size", "fsdp", "deepspeed")
SEQUENCES = "with_trainer.sequences"  # which the reference cannot compute without a GPU
TRAINER = (*(f"with_trainer.{name}" for name in TRAINER), SEQUENCES)
ALONE = ("with_device_maps.from_pretrained", "with_device_maps.lora", "with_device_maps.by_hand")  # one process each
ON_GPU = os.environ.get("ACCELERATE_USE_CPU") != "true"
if ON_GPU:
    ALONE += ("with_device_maps.on_gpu",)


def rank_of(rank, size, port, folder, programs):
    """Run *programs* as one rank; write the results of rank 0, or an error."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if size == 1 and programs[0] not in TRAINER:  # which has shards on one process, too, if that was launched
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    results = {}
    for name in programs:
        module, _, function = name.partition(".")
        results[name] = getattr(importlib.import_module(module), function)(str(folder))
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results))


def run(size, folder, programs):
    """The results of *programs* in *size* forked processes."""
    toys = importlib.import_module("toys")
    toys.language_model().save_pretrained(folder / "base")  # for trainers that load it by its name
    toys.tokenizer().save_pretrained(folder / "base")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    if ON_GPU:  # which cannot be used in a fork of a process that has used it
        rank_of(0, 1, port, folder, programs)
        return json.loads((folder / "results.json").read_text())
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_of(rank, size, port, folder, programs)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    if failed:
        sys.exit(f"{len(failed)} of {size} processes failed")
    return json.loads((folder / "results.json").read_text())


def main():
    """Import, fork, print."""
    which, place, *chosen = sys.argv[1:]
    if which == "orc":
        import orc.runtime

        orc.runtime.stand_in("accelerate")
    import accelerate

    assert ("orc" in accelerate.Accelerator.__module__.split(".")) == (which == "orc")
    programs = [
        name for name in PROGRAMS + TRAINER + ALONE if not chosen or any(name.startswith(one) for one in chosen)
    ]
    if which == "reference":
        programs = [name for name in programs if name != SEQUENCES]
    for module in sorted({name.partition(".")[0] for name in programs}):
        importlib.import_module(module)
    if {"with_trainer.deepspeed", SEQUENCES} & set(programs):
        # Its kernel for collectives on CPUs takes a minute to compile; without it, it uses the process group.
        importlib.import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder = pathlib.Path(place)
    both = [name for name in programs if name not in ALONE]
    if which == "reference":  # on two processes without a GPU it fails in the middle of the streams
        both = [name for name in both if name.startswith(("with_trl", "with_peft", "with_trainer"))]
    gc.collect()
    gc.freeze()  # the libraries' objects: each collection of a rank took longer than its training
    results = {}
    for size, names in ((1, programs),) if ON_GPU else ((1, programs), (2, both)):
        results[size] = {}
        for number, few in enumerate(([n for n in names if n not in TRAINER], [n for n in names if n in TRAINER])):
            results[size] |= run(size, folder / f"{size}-{number}", few) if few else {}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
