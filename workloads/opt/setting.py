"""Common start of all modes: arguments, configuration, shapes, tokeniser, and the lines that describe them."""

from __future__ import annotations

import socket
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from configuration import Configuration
from data import load_tokenizer
from device import check_precision, name
from model import choose_weights
from rank_group import RANK, WORLD, agree, join, say, set_up
from shapes import Config, lora_parameters, parameters

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """A run, as far as it is decided before its data and its models."""

    args: Namespace
    ds: Configuration
    config: Config
    """Shape of the model that is trained."""
    critic: Config
    weights: Path | None
    critic_weights: Path | None
    tokenizer: Any
    origins: tuple[str, ...]
    """Lines that say where weights and tokeniser come from."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return DTYPES[self.ds.precision]

    def operations(self, number: float) -> float:
        """Return the number, or 0 in fp32, for which no device peak is known."""
        return 0 if self.ds.precision == "fp32" else number

    def announce(self, text: str) -> None:
        """Print on each rank its node, and on rank 0 mode, model, precision, ZeRO stage, weights and data."""
        args = self.args
        total = parameters(self.config)
        trained = lora_parameters(self.config, args.lora_dim, tuple(args.lora_modules)) or total
        rehearsed = ", rehearsed" if args.rehearse else ""
        print(f"rank {RANK}/{WORLD} on {socket.gethostname()}", flush=True)
        say(f"world size {WORLD}, on {name()}")
        say(f"mode: {args.mode}")
        say(f"model: {args.model}{rehearsed}, {total} parameters, {trained} of them trained")
        say(f"precision: {self.ds.precision}")
        say(f"ZeRO stage: {self.ds.stage}")
        for line in self.origins:
            say(line)
        say(f"data: {text}")


def prepare(args: Namespace, ds: Configuration, config: Config, critic: Config) -> Setting:
    """Choose weights and tokeniser, join the other ranks. InputError if ranks chose differently."""
    set_up()
    check_precision(ds.precision)
    weights, origin = choose_weights(args.model, args.weights, rehearse=args.rehearse)
    critic_weights, critic_origin = choose_weights(args.critic_model, args.critic_weights, rehearse=args.rehearse)
    tokenizer, tokenizer_origin = load_tokenizer(weights, args, config)
    join()
    names = tuple(path and path.name for path in (weights, critic_weights))
    agree({"DeepSpeed configuration": ds, "weights": names})
    origins = [f"weights: {origin}", f"tokeniser: {tokenizer_origin}"]
    if args.mode == "rlhf":
        origins.insert(1, f"critic: {args.critic_model}, {parameters(critic)} parameters; weights: {critic_origin}")
    return Setting(args, ds, config, critic, weights, critic_weights, tokenizer, tuple(origins))
