"""Models as DeepSpeed runs them: one that is trained, with optimiser and schedule, and one that is only asked."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from rank_group import RANK, say
from torch import nn

BETAS = (0.9, 0.95)


def trained(
    model: nn.Module, ds_config: dict[str, Any], learning_rate: float, args: Namespace, updates: int = 1
) -> Any:
    """Return a DeepSpeed engine for the unfrozen weights, with AdamW and schedule unless the config has its own."""
    if args.gradient_checkpointing:
        # Reentrant: ZeRO-3 empties weights between forward pass and recomputation, an error to the other kind.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "optimizer" in ds_config:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=ds_config)
        return engine
    if ds_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none":
        optimizer = DeepSpeedCPUAdam(parameters, lr=learning_rate, betas=BETAS)
    else:
        fused = get_accelerator().device_name() == "cuda"
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=BETAS, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(update // updates, args))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config)
    return engine


def frozen(model: nn.Module, ds_config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a model without gradients for evaluation: moved to the device, or an engine under ZeRO-3."""
    model.requires_grad_(False)
    if ds_config["zero_optimization"]["stage"] < 3:
        return model.to(get_accelerator().current_device_name(), dtype).eval()
    keys = ds_config.keys() - {"optimizer", "scheduler"}
    engine, *_ = deepspeed.initialize(model=model, config={key: ds_config[key] for key in keys})
    engine.eval()
    return engine


def schedule(step: int, args: Namespace) -> float:
    """Return the factor on the learning rate: linear warm-up, then half a cosine down to 0.1."""
    if step < args.warmup_steps:
        return (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / (args.steps - args.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def save(engine: Any, tokenizer: Any, directory: Path, *, adapters_only: bool) -> None:
    """Write weights, or adapters only, configuration and tokeniser; all ranks take part, rank 0 writes.

    A relative directory is below the run's own, which every node sees.
    """
    directory = Path(os.environ.get("LABCTL_RUN_DIR", ".")) / directory
    engine.save_16bit_model(str(directory), exclude_frozen_parameters=adapters_only)
    if RANK == 0:
        engine.module.config.save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
    say(f"saved to {directory}")
