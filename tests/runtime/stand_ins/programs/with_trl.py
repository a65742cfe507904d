"""The trainers of trl, as its documentation uses them."""

from datasets import Dataset
from toys import fingerprint, history, language_model, texts, tokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

COMMON = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "learning_rate": 1e-2,
}


def sft(folder):
    """Supervised fine-tuning with accumulation; saved in the middle and resumed."""

    def trainer():
        data = Dataset.from_list([{"text": text} for text in texts(32)])
        args = SFTConfig(f"{folder}/sft", gradient_accumulation_steps=2, save_steps=2, **COMMON)
        return SFTTrainer(language_model(), args=args, train_dataset=data, processing_class=tokenizer())

    first = trainer()
    first.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=f"{folder}/sft/checkpoint-2")
    assert abs(fingerprint(first.model) - fingerprint(resumed.model)) < 1e-3
    return {**history(first, "loss", "grad_norm", "mean_token_accuracy"), "weights": fingerprint(first.model)}


def dpo(folder):
    """Preference optimisation with a reference model."""
    lines = zip(texts(16, 4, 1), texts(16, 4, 2), texts(16, 4, 3), strict=True)
    data = Dataset.from_list([{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in lines])
    args = DPOConfig(f"{folder}/dpo", save_strategy="no", **COMMON)
    trainer = DPOTrainer(f"{folder}/base", args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return {**history(trainer, "loss", "grad_norm", "rewards/margins"), "weights": fingerprint(trainer.model)}


def grpo(folder):
    """Policy optimisation: generation, rewards gathered over the processes, steps."""

    def reward(completions, **_):
        return [float(sum(int(word[1:]) for word in text.split() if word[1:].isdigit())) for text in completions]

    data = Dataset.from_list([{"prompt": text} for text in texts(16, 4, 4)])
    args = GRPOConfig(f"{folder}/grpo", num_generations=2, max_completion_length=6, save_strategy="no", **COMMON)
    base = f"{folder}/base"
    trainer = GRPOTrainer(base, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return {**history(trainer, "grad_norm", "reward"), "weights": fingerprint(trainer.model)}
