"""The command line of the training script, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shapes import LORA_MODULES, Config, InputError, load, lora_parameters, names, shrink


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; of a rehearsal, with everything that costs time cut down."""
    parser = argparse.ArgumentParser(
        description="Causal language modelling of an OPT model under DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="opt-125m", help=f"one of {', '.join(names())}")
    add("--data", help="text file, directory, or hf:NAME of a cached dataset; if not given, the image's licence texts")
    add("--zero-stage", type=int, default=2, choices=range(4))
    add("--dtype", default="auto", choices=["auto", "bf16", "fp16", "fp32"])
    add("--micro-batch", type=int, default=4, help="sequences per rank and forward pass")
    add("--gradient-accumulation", type=int, default=1, help="forward passes per step")
    add("--sequence-length", type=int, default=512, help="tokens")
    add("--steps", type=int, default=60)
    add("--warmup-steps", type=int, default=5, help="steps while the learning rate rises; not timed")
    add("--learning-rate", type=float, default=1e-4)
    add("--lora-dim", type=int, default=0, help="rank of the LoRA adapters; 0 trains all weights")
    add("--lora-modules", nargs="+", default=list(LORA_MODULES))
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--seed", type=int, default=1234)
    add("--rehearse", action="store_true", help="a tiny model of the same kind, a handful of steps")
    add("--output", type=Path, help="directory for the trained weights (of LoRA, the adapters); if not given, none")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rehearse:
        args.steps, args.warmup_steps, args.sequence_length = 6, 2, 64
        args.micro_batch, args.gradient_accumulation = min(args.micro_batch, 2), min(args.gradient_accumulation, 2)
        args.lora_dim = min(args.lora_dim, 4)
    return args


def check(args: argparse.Namespace) -> Config:
    """The configuration to train; refuses what cannot work before anything heavy is imported or built."""
    config = shrink(load(args.model)) if args.rehearse else load(args.model)
    for name in ("micro_batch", "gradient_accumulation", "steps"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} is not at least 1")
    if not 2 <= args.sequence_length <= config["max_position_embeddings"]:
        limit = config["max_position_embeddings"]
        raise InputError(f"--sequence-length {args.sequence_length}: {args.model} takes 2 to {limit}")
    if not 0 <= args.warmup_steps < args.steps:
        raise InputError(f"--warmup-steps {args.warmup_steps} leaves none of {args.steps} steps to time")
    if args.lora_dim < 0:
        raise InputError(f"--lora-dim {args.lora_dim} is negative")
    lora_parameters(config, args.lora_dim, tuple(args.lora_modules))
    return config
