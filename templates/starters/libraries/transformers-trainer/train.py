"""Train with the Trainer of Transformers, unchanged: `import accelerate`, which it does, gives orc.runtime.

    orc submit job.yaml --follow
    orc launch -n 2 --cpu --stand-in accelerate train.py

A tiny GPT-2 learns Python's reference letter by letter; nothing is downloaded. What the Trainer does itself
(evaluation, its own checkpoints, `resume_from_checkpoint`, gradient accumulation, bf16) works as everywhere;
processes, placement, retries and metrics are the job's.

Expected: eval loss <= 3.1
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics  # the language reference, as help("topics") shows it

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

CONTEXT = 64


def windows():
    """Return lists of samples: windows of CONTEXT characters to learn from, and every tenth to evaluate on."""
    text = "".join(letter for name in ("compound", "string-methods", "formatstrings") for letter in topics[name])
    letters = torch.tensor([min(ord(letter), 127) for letter in text])
    rows = letters[: len(letters) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    return [one for index, one in enumerate(samples) if index % 10], samples[::10]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    args = parser.parse_args()

    train_set, test_set = windows()
    sizes = {"vocab_size": 128, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    options = TrainingArguments(
        output_dir=str(args.output_dir),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=10,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    trainer = Trainer(GPT2LMHeadModel(config), options, train_dataset=train_set, eval_dataset=test_set)
    # After an interruption: go on with the newest checkpoint, if there is one.
    newest = get_last_checkpoint(str(args.output_dir)) if args.output_dir.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps on {options.world_size} processes")
        print(f"eval loss {result['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
