"""A diffusion model trained as in the examples of diffusers."""

import logging
import os
import shutil
from datetime import timedelta

import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from diffusers.utils.torch_utils import is_compiled_module

logger = get_logger(__name__, log_level="INFO")


def unet():
    """A U-Net for images of 8 by 8 pixels."""
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def train(folder):
    """train_unconditional.py in small: EMA, hooks that save the model in its own format, total_limit, resuming."""
    output = f"{folder}/diffusion"
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="no",
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=output, logging_dir=os.path.join(output, "logs")),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=7200))],
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    logging.basicConfig(level=logging.WARNING)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(5)
    model = unet()
    ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)

    def unwrap_model(model):
        model = accelerator.unwrap_model(model)
        return model._orig_mod if is_compiled_module(model) else model

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for one in models:
                unwrap_model(one).save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()  # so that it is not saved again

    def load_model_hook(models, input_dir):
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        ema.load_state_dict(loaded.state_dict())
        ema.to(accelerator.device)
        for _ in range(len(models)):
            one = unwrap_model(models.pop())
            stored = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            one.register_to_config(**stored.config)
            one.load_state_dict(stored.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    if accelerator.is_main_process:
        os.makedirs(output, exist_ok=True)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(24, 1, 8, 8)
    train_dataloader = torch.utils.data.DataLoader(images, batch_size=2, shuffle=True, num_workers=0)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=60)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("train_unconditional", {"epochs": 2})
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses, global_step = [], 0
    for _ in range(2):
        model.train()
        for batch in train_dataloader:
            noise = torch.randn(batch.shape, generator=generator)
            timesteps = torch.randint(0, 100, (batch.shape[0],), generator=generator).long()
            noisy = noise_scheduler.add_noise(batch, noise, timesteps)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, timesteps).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                global_step += 1
                if global_step % 3 == 0 and accelerator.is_main_process:  # the others train on
                    accelerator.save_state(os.path.join(output, f"checkpoint-{global_step}"))
            logs = {"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}
            accelerator.log(logs, step=global_step)
            losses.append(accelerator.gather(loss.detach().repeat(batch.shape[0])).mean().item())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        DDPMPipeline(unet=unwrap_model(model), scheduler=noise_scheduler).save_pretrained(f"{output}/pipeline")
        ema.restore(model.parameters())
    accelerator.wait_for_everyone()
    weights = sum(float(value.double().abs().sum()) for value in unwrap_model(model).parameters())
    accelerator.load_state(os.path.join(output, "checkpoint-3"))
    before = sum(float(value.double().abs().sum()) for value in unwrap_model(model).parameters())
    assert before != weights
    average = sum(float(value.double().abs().sum()) for value in ema.shadow_params)
    accelerator.end_training()
    assert os.path.isdir(os.path.join(output, "logs", "train_unconditional"))
    if accelerator.is_main_process:
        shutil.rmtree(f"{output}/pipeline")
    return {"loss": losses, "weights": weights, "at 3": before, "average at 3": average, "steps": global_step}
