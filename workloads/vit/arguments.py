"""The command line of the training script, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from script_exit import InputError
from shapes import MODELS, Shape


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; with ``--rehearse`` the tiny model, two epochs and a hundredth of the images."""
    parser = argparse.ArgumentParser(
        description="Image classification with a vision transformer under DeepSpeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--deepspeed_config", type=Path, required=True, help="DeepSpeed's configuration, a JSON file")
    add("--model", default="vit-b-16", choices=sorted(MODELS))
    add("--image-size", type=int, help="pixels that images are scaled to; if not given, the model's own")
    add("--data-path", type=Path, help="directory of CIFAR-10's binary version; if not given, images are generated")
    add("--dataset-percentage", type=float, default=1.0, help="share of the images: 1 is all, 0.1 a tenth")
    add("--epochs", type=int, default=10)
    add("--learning-rate", type=float, default=1e-4, help="of AdamW, unless the configuration has its own optimizer")
    add("--seed", type=int, default=1234)
    add("--rehearse", action="store_true", help="the tiny model on a hundredth of the images, two epochs")
    add("--save-every", type=int, default=0, help="steps between checkpoints, of which the last two are kept; 0: none")
    add("--resume", type=Path, help="checkpoint to resume from, as `labctl run --resume` passes it")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rehearse:
        args.model, args.image_size, args.epochs, args.dataset_percentage = "vit-tiny", None, 2, 0.01
    return args


def check(args: argparse.Namespace) -> Shape:
    """Return the model's shape with ``--image-size``. InputError for arguments that cannot work."""
    shape = MODELS[args.model]
    if args.image_size is not None:
        shape = replace(shape, image=args.image_size)
    if shape.image < shape.patch or shape.image % shape.patch:
        raise InputError(f"--image-size {shape.image} is not a multiple of the {shape.patch} pixels of a patch")
    if not 0 < args.dataset_percentage <= 1:
        raise InputError(f"--dataset-percentage {args.dataset_percentage:g} is not above 0 and at most 1 (all images)")
    if args.epochs < 1:
        raise InputError(f"--epochs {args.epochs} is not at least 1")
    return shape
