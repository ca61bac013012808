"""The command line of the training script, and what can be checked of it without torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from script_exit import InputError


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; with ``--rehearse`` replace model, data, lengths and steps by small ones."""
    parser = argparse.ArgumentParser(
        description="LoRA fine-tuning of a causal language model under DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--deepspeed_config", type=Path, required=True, help="DeepSpeed's configuration, a JSON file")
    add("--model", type=Path, help="directory of a Hugging Face model with its weights as safetensors")
    add("--random-model", action="store_true", help="a small Llama with random weights, instead of --model")
    add("--data", type=Path, help="text (.txt, .md) or records (.json, .jsonl), one file or a directory")
    add(
        "--dataset",
        help="name of a dataset in the Hugging Face cache; without --data and --dataset, the image's licence texts",
    )
    add("--lora-rank", type=int, default=8)
    add("--lora-alpha", type=float, default=16)
    add("--lora-dropout", type=float, default=0.05)
    add("--target-modules", default="q_proj,v_proj", help="layers that get adapters, with commas between them")
    add("--sequence-length", type=int, default=512, help="tokens; texts are joined and cut to it")
    add("--validation-percentage", type=float, default=4, help="of the sequences, the first ones")
    add("--epochs", type=int, default=3)
    add("--max-steps", type=int, default=0, help="steps of the optimiser after which to stop; 0: after all epochs")
    add("--learning-rate", type=float, default=3e-4, help="constant after the warm-up")
    add("--warmup-ratio", type=float, default=0.03, help="share of the steps while the learning rate rises")
    add(
        "--gradient-checkpointing",
        choices=["on", "off"],
        default="off",
        help="recompute activations in the backward pass",
    )
    add("--seed", type=int, default=1234)
    add("--output", type=Path, default=Path("adapters"), help="directory for the adapters, below the run's own")
    add("--rehearse", action="store_true", help="the random model, a handful of steps")
    add("--save-every", type=int, default=0, help="steps between checkpoints, of which the last two are kept; 0: none")
    add("--resume", type=Path, help="checkpoint to resume from, as `labctl run --resume` passes it")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.target_modules = [name for name in args.target_modules.split(",") if name]
    if args.rehearse:
        args.model, args.random_model, args.dataset = None, True, None
        args.sequence_length, args.max_steps, args.epochs, args.validation_percentage = 64, 6, 1, 1
    return args


def check(args: argparse.Namespace) -> None:
    """Raise InputError for arguments that cannot work: no model, no target modules, numbers out of range."""
    if args.model:
        check_model(args.model)
    elif not args.random_model:
        raise InputError("no model to fine-tune: pass --model DIR, or --random-model for a small one made here")
    if not args.target_modules:
        raise InputError("--target-modules names no layer")
    for name, least in {"lora_rank": 1, "epochs": 1, "max_steps": 0, "sequence_length": 2}.items():
        if getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} is not at least {least}")
    for name, beyond in {"lora_dropout": 1, "warmup_ratio": 1, "validation_percentage": 100}.items():
        if not 0 <= getattr(args, name) < beyond:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name):g} is not from 0 to below {beyond}")
    if args.validation_percentage == 0:
        raise InputError("--validation-percentage 0 leaves nothing to measure the perplexity on")


def check_model(directory: Path) -> None:
    """Raise InputError for a directory without config.json or without *.safetensors."""
    if not (directory / "config.json").is_file():
        raise InputError(f"--model {directory} has no config.json, so it is not the directory of a model")
    if not any(directory.glob("*.safetensors")):
        pickles = sorted(path.name for path in directory.glob("*.bin"))
        found = f"only {pickles[0]}, a pickle, which runs whatever code is in it when it is read" if pickles else "none"
        raise InputError(f"--model {directory}: weights are read from *.safetensors, and there are {found}")


def check_targets(targets: Sequence[str], layers: Iterable[str]) -> None:
    """Raise InputError, with the nearest layer, for a target that ends no layer's full name."""
    layers = list(layers)
    known = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
    for target in targets:
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            near = get_close_matches(target, known, n=1, cutoff=0.5)
            hint = f"the nearest is `{near[0]}`, " if near else ""
            raise InputError(
                f"--target-modules: the model has no layer `{target}` that takes adapters; {hint}"
                f"there are {', '.join(known)}"
            )
