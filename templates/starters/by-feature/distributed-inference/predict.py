"""Share out inputs over processes, and write every answer exactly once.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu predict.py

Each process takes its share of the inputs and writes it in shards, whose names say which inputs are in them. A shard
appears complete or not at all, so that after an interruption (a kill -9 too), also on another number of processes, only
what is missing is computed. `--break-after` ends the run early to try that out.

Expected: accuracy of the answers >= 0.92
"""

import argparse
import json
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from orc.runtime import Accelerator


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard-size", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("answers"))
    parser.add_argument("--break-after", type=int, help="stop after this many shards on each process")
    args = parser.parse_args()

    accelerator = Accelerator()
    digits = load_digits()
    model = LogisticRegression(C=0.01, max_iter=300).fit(digits.data[:900], digits.target[:900])
    # A linear model is its matrix; a large one would come from `from_pretrained` on each process.
    weights, bias = (torch.tensor(value, device=accelerator.device) for value in (model.coef_, model.intercept_))
    inputs = digits.data[900:]

    args.output.mkdir(exist_ok=True)
    ranges = [(start, min(start + args.shard_size, len(inputs))) for start in range(0, len(inputs), args.shard_size)]
    shards = {args.output / f"{start:06d}-{end:06d}.jsonl": (start, end) for start, end in ranges}
    written = set(args.output.glob("*.jsonl"))
    accelerator.wait_for_everyone()  # all have looked before anybody writes
    if written - set(shards):
        raise SystemExit(f"{args.output} has shards of another --shard-size: {min(written - set(shards)).name}")
    missing = [shard for shard in shards if shard not in written]
    with accelerator.split_between_processes(missing) as mine:
        for shard in mine[: args.break_after]:
            start, end = shards[shard]
            batch = torch.tensor(inputs[start:end], device=accelerator.device)
            answers = (batch @ weights.T + bias).argmax(dim=1).tolist()
            partial = shard.with_suffix(".part")
            with partial.open("w", encoding="utf-8") as file:
                for place, answer in enumerate(answers, start):
                    file.write(json.dumps({"input": place, "answer": answer}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(shard)  # at once: nobody sees half of a shard
        print(f"process {accelerator.process_index} has written {len(mine[: args.break_after])} shards")
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        lines = [line for shard in sorted(args.output.glob("*.jsonl")) for line in shard.read_text().splitlines()]
        answers = {(one := json.loads(line))["input"]: one["answer"] for line in lines}
        print(f"{len(lines)} answers to {len(answers)} of {len(inputs)} inputs")
        hits = [answer == digits.target[900 + place] for place, answer in answers.items()]
        print(f"accuracy of the answers {sum(hits) / len(hits):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
