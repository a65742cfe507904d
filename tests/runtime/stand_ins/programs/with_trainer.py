"""Transformers' Trainer: what it logs and learns, in the ways that its arguments choose."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH, SAMPLES = 32, 8, 24
Results = dict[str, Any]


class Tokens(torch.utils.data.Dataset):
    """Sequences that can be learnt: each token is the former one plus a step; the step is the class."""

    def __init__(self, samples: int, classes: bool = False) -> None:
        self.rows = [[(7 * i + (1 + i % 2) * t) % VOCABULARY for t in range(LENGTH)] for i in range(samples)]
        self.classes = classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.tensor(self.rows[index])
        return {"input_ids": row, "labels": torch.tensor(index % 2) if self.classes else row}


def language_model() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def classifier() -> BertForSequenceClassification:
    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def arguments(folder: str, **more: Any) -> TrainingArguments:
    settings = {
        "output_dir": folder,
        "use_cpu": os.environ.get("ACCELERATE_USE_CPU") == "true",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(**{**settings, **more})


def numbers(trainer: Trainer) -> Results:
    """What the run logged, and a figure of the final weights."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped).values()
    return {
        "loss": [round(row["loss"], 5) for row in trainer.state.log_history if "loss" in row],
        "norm": [round(float(row["grad_norm"]), 4) for row in trainer.state.log_history if "grad_norm" in row],
        "eval": [round(row["eval_loss"], 5) for row in trainer.state.log_history if "eval_loss" in row],
        "weights": round(float(sum(w.double().abs().sum() for w in weights)), 4),
        "steps": trainer.state.global_step,
    }


def train(folder: str, callbacks: list[TrainerCallback] | None = None, **more: Any) -> Results:
    trainer = Trainer(language_model(), arguments(folder, **more), train_dataset=Tokens(SAMPLES), callbacks=callbacks)
    trainer.train()
    return numbers(trainer)


def plain(folder: str) -> Results:
    return train(folder, max_steps=-1, num_train_epochs=2)


def bf16(folder: str) -> Results:
    return train(folder, bf16=True)


def accumulation(folder: str) -> Results:
    return train(folder, gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=2)  # a short last window


def gradient_checkpointing(folder: str) -> Results:
    return train(folder, gradient_checkpointing=True, max_steps=3)


def workers(folder: str) -> Results:
    return train(folder, dataloader_num_workers=1, max_steps=3)


def split_batches(folder: str) -> Results:
    return train(folder, accelerator_config={"split_batches": True, "dispatch_batches": False}, max_steps=3)


def resume_in_mid_epoch(folder: str) -> Results:
    from_start = train(folder + "/whole", max_steps=8, warmup_steps=2)

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    saving = {"max_steps": 8, "warmup_steps": 2, "save_strategy": "steps", "save_steps": 4}
    train(folder + "/parts", callbacks=[Stop()], **saving)
    settings = arguments(folder + "/parts", **saving)
    trainer = Trainer(language_model(), settings, train_dataset=Tokens(SAMPLES))
    trainer.train(resume_from_checkpoint=True)
    resumed = numbers(trainer)
    assert resumed["weights"] == from_start["weights"], (resumed, from_start)
    return resumed


def classification(folder: str) -> Results:
    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    settings = arguments(
        folder, max_steps=-1, num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="accuracy", learning_rate=3e-2,
    )  # fmt: skip
    trainer = Trainer(
        classifier(), settings, train_dataset=Tokens(SAMPLES, True), eval_dataset=Tokens(11, True),
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    predictions = trainer.predict(Tokens(11, True))
    best = round(float(trainer.state.best_metric or 0), 5)
    shape = list(predictions.predictions.shape)
    return {**numbers(trainer), "best": best, "shape": shape, "after": round(trainer.evaluate()["eval_loss"], 5)}


def automatic_batch_size(folder: str) -> Results:
    class Small(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            if len(inputs["input_ids"]) > 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return super().training_step(model, inputs, *rest, **more)

    settings = arguments(folder, per_device_train_batch_size=8, auto_find_batch_size=True, max_steps=4)
    trainer = Small(language_model(), settings, train_dataset=Tokens(SAMPLES))
    trainer.train()
    return {**numbers(trainer), "size": trainer._train_batch_size}


def fsdp(folder: str) -> Results:
    options = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return train(folder, fsdp="full_shard auto_wrap", fsdp_config=options, max_steps=4)


def deepspeed(folder: str) -> Results:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    return train(folder, deepspeed=config, max_steps=4)


def sequences(folder: str) -> Results:
    """Two processes compute pieces of the sequences that one computes whole."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    more: dict[str, Any] = {}
    if os.environ["WORLD_SIZE"] == "2":
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        more["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    steps = {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    return train(folder, deepspeed=config, **steps, **more)
