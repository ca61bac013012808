"""Common parts of both training scripts, without a framework: the command line, the checks, the exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from mnist import Images, load
from script_exit import InputError, exit_code


def main(train: Callable[[argparse.Namespace, Images], None]) -> int:
    """Parse and check arguments, load the images, train; return 0, or 2 after an InputError."""
    args = parse()

    def run() -> None:
        """Check the arguments, load the images and train."""
        check(args)
        train(args, load(args.data_path, args.images, generated=args.rehearse))

    return exit_code(run)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; with ``--rehearse`` reduce images, epochs, batch and warm-up."""
    parser = argparse.ArgumentParser(
        description="MNIST over Horovod.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data-path", type=Path, help="directory with mnist.npz or MNIST's four IDX files; if not given: .cache/mnist")
    add("--images", type=int, default=8000, help="images to train on, of all ranks together; 0 takes all there are")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=64, help="images per rank and step")
    add("--learning-rate", type=float, default=1e-3, help="of one rank; multiplied by the number of ranks")
    add("--warmup-epochs", type=int, default=1, help="epochs in which the rate rises from one rank's to all ranks'")
    add("--seed", type=int, default=1234)
    add("--output", type=Path, help="directory for rank 0's weights after each epoch; if not given, none")
    add("--rehearse", action="store_true", help="a few steps on generated images")
    args = parser.parse_args(argv)
    if args.rehearse:
        args.images, args.epochs, args.batch_size, args.warmup_epochs = 640, 2, 32, 1
    return args


def check(args: argparse.Namespace) -> None:
    """Raise InputError for counts out of range."""
    for name in ("epochs", "batch_size"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} is not at least 1")
    for name in ("images", "warmup_epochs"):
        if getattr(args, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} is negative")


def require_same(fingerprints: Sequence[int]) -> None:
    """Raise InputError unless the ranks' images have equal fingerprints."""
    if len(set(fingerprints)) > 1:
        raise InputError("ranks have different images; give every node the same --data-path")


def steps_per_epoch(images: Images, batch_size: int) -> int:
    """Return the full batches in a rank's share. InputError if there is none, or no test image."""
    steps = len(images.train[0]) // batch_size
    if not steps or not len(images.test[0]):
        raise InputError(f"{len(images.train[0])} images per rank are too few for batches of {batch_size}")
    return steps
