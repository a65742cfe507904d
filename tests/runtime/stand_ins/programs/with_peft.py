"""LoRA adapters of peft, trained by the Trainer and by a loop written with an Accelerator."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, is_peft_model, set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from toys import fingerprint, history, language_model, texts, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, get_linear_schedule_with_warmup

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted():
    """The language model with an adapter."""
    set_seed(1)
    return get_peft_model(language_model(), LoraConfig(**LORA))


def trainer(folder):
    """Transformers' Trainer with an adapter, which it saves by itself."""
    words = tokenizer()
    args = TrainingArguments(
        f"{folder}/lora",
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=os.environ.get("ACCELERATE_USE_CPU") == "true",
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    run = Trainer(
        adapted(),
        args,
        train_dataset=[words(text) for text in texts(24)],
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    run.train()
    loaded = PeftModel.from_pretrained(language_model(), f"{folder}/lora/checkpoint-4")
    assert abs(fingerprint(loaded) - fingerprint(run.model)) < 1e-3
    return {**history(run, "loss", "grad_norm"), "weights": fingerprint(run.model)}


def loop(folder):
    """A loop as peft's examples have it: accumulate, clip, save_state and load_state, the adapter saved and loaded."""
    accelerator = Accelerator(
        gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(3)
    words = tokenizer()
    rows = [words(text, return_tensors="pt")["input_ids"][0] for text in texts(24)]
    loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=torch.stack)
    model = adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 100)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if epoch == 0:
            accelerator.save_state(f"{folder}/lora-loop/state")
    accelerator.wait_for_everyone()
    whole = accelerator.unwrap_model(model)
    assert is_peft_model(whole)
    whole.save_pretrained(
        f"{folder}/lora-loop/adapter",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    weights = fingerprint(whole)
    loaded = PeftModel.from_pretrained(language_model(), f"{folder}/lora-loop/adapter")
    assert abs(fingerprint(loaded) - weights) < 1e-3
    accelerator.load_state(f"{folder}/lora-loop/state")
    assert fingerprint(whole) != weights
    return {"loss": losses, "weights": weights, "rate": schedule.get_last_lr()}
