"""The command line of the training script, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script_exit import InputError
from shapes import LORA_MODULES, Config, load, lora_parameters, names, shrink

MODES = ("sft", "reward", "rlhf")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; with ``--rehearse`` reduce steps, lengths and LoRA rank."""
    parser = argparse.ArgumentParser(
        description="The three steps from a language model to an assistant, for OPT models under DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", default="sft", choices=MODES, help="supervised fine-tuning, a reward model, or reinforcement (PPO)")
    add("--deepspeed_config", type=Path, help="JSON file; if not given, micro-batches of 4, bf16, ZeRO stage 0")
    add("--model", default="opt-125m", help=f"one of {', '.join(names())}; the actor of --mode rlhf")
    add("--weights", type=Path, help="directory with its weights; if not given, a snapshot in the cache, else random")
    add("--data", type=Path, help="text file or directory; if not given, the image's licence texts")
    add("--dataset", help="name of a cached dataset instead, NAME or NAME:CONFIGURATION")
    add("--datasets", nargs="+", default=[], help="names of datasets to use where all of them are cached")
    add("--sequence-length", type=int, default=512, help="tokens (of --mode rlhf, see the lengths below)")
    add("--steps", type=int, default=60)
    add("--warmup-steps", type=int, default=5, help="steps while the learning rate rises; not timed")
    add("--learning-rate", type=float, default=1e-4)
    add("--lora-dim", "--actor-lora-dim", type=int, default=0, help="rank of the LoRA adapters; 0 trains all weights")
    add(
        "--lora-modules",
        nargs="+",
        default=list(LORA_MODULES),
        help="adapt linear layers with one of these in the name",
    )
    switch: dict[str, Any] = {"nargs": "?", "const": "on", "default": "off", "choices": ("on", "off")}
    add("--gradient-checkpointing", **switch, help="recompute activations in the backward pass")
    add("--disable-dropout", **switch, help="as --mode rlhf always does")
    add("--seed", type=int, default=1234)
    add("--rehearse", action="store_true", help="a tiny model of the same kind, a handful of steps")
    add("--output", type=Path, help="directory for the weights (of LoRA, the adapters), below the run's own")
    add("--save-every", type=int, default=0, help="steps between checkpoints, of which the last two are kept; 0: none")
    add("--resume", type=Path, help="checkpoint to resume from, as `labctl run --resume` passes it")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    add = parser.add_argument_group("--mode rlhf").add_argument
    add("--critic-model", help="shape of critic and reward model; if not given, the actor's")
    add("--critic-weights", type=Path, help="directory that --mode reward wrote, for critic and reward model")
    add("--critic-learning-rate", type=float, help="if not given, the actor's")
    add("--critic-zero-stage", type=int, choices=range(4), help="if not given, the actor's")
    add("--max-prompt-length", type=int, default=256, help="tokens")
    add("--max-answer-length", type=int, default=256, help="tokens")
    add("--ppo-epochs", type=int, default=1, help="times that each batch of answers is learnt from")
    add("--kl-coefficient", type=float, default=0.1, help="price of leaving the reference model, per nat")
    args = parser.parse_args(argv)
    for name in ("gradient_checkpointing", "disable_dropout"):
        setattr(args, name, getattr(args, name) == "on")
    args.critic_model = args.critic_model or args.model
    args.critic_learning_rate = args.critic_learning_rate or args.learning_rate
    if args.rehearse:
        args.steps, args.warmup_steps, args.sequence_length = 6, 2, 64
        args.max_prompt_length, args.max_answer_length = 16, 16
        args.lora_dim = min(args.lora_dim, 4)
    return args


def check(args: argparse.Namespace) -> tuple[Config, Config]:
    """Return the shapes of model and critic, shrunk for a rehearsal. InputError for arguments that cannot work."""
    config, critic = (shrink(load(name)) if args.rehearse else load(name) for name in (args.model, args.critic_model))
    for name in ("steps", "ppo_epochs", "max_prompt_length", "max_answer_length"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} is not at least 1")
    check_lengths(args, config, critic)
    if not 0 <= args.warmup_steps < args.steps:
        raise InputError(f"--warmup-steps {args.warmup_steps} leaves none of {args.steps} steps to time")
    if args.lora_dim < 0:
        raise InputError(f"--lora-dim {args.lora_dim} is negative")
    lora_parameters(config, args.lora_dim, tuple(args.lora_modules))
    return config, critic


def check_lengths(args: argparse.Namespace, config: Config, critic: Config) -> None:
    """Raise InputError if the lengths exceed the positions of model or critic."""
    limit = min(config["max_position_embeddings"], critic["max_position_embeddings"])
    if args.mode == "rlhf":
        if args.max_prompt_length + args.max_answer_length > limit:
            raise InputError(
                f"--max-prompt-length {args.max_prompt_length} and --max-answer-length {args.max_answer_length}: "
                f"{args.model} and {args.critic_model} take {limit} together"
            )
    elif not 2 <= args.sequence_length <= limit:
        raise InputError(f"--sequence-length {args.sequence_length}: {args.model} takes 2 to {limit}")
