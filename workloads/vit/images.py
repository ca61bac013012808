"""Labelled images: CIFAR-10 from files, or generated ones that can be learnt; and each rank's share of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cifar10
import torch
from rank_group import fingerprint
from script_exit import InputError
from torch.nn import functional

TRAINING_IMAGES, TEST_IMAGES = 50_000, 10_000
"""Numbers of images in CIFAR-10."""


@dataclass(frozen=True)
class Images:
    """``pixels`` (N, 3, 32, 32) and ``labels`` (N,), both of bytes."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def first(self, share: float) -> Images:
        """Return the first ``share`` of the images, at least one."""
        count = max(1, int(len(self.labels) * share))
        return Images(self.pixels[:count], self.labels[:count])

    def batches(self, order: torch.Tensor, size: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield a rank's pixels and labels, batch by batch, dealt out in turns of ``size`` images."""
        for start in range(rank * size, len(order), world * size):
            chosen = order[start : start + size]
            yield self.pixels[chosen], self.labels[chosen].long()

    def fingerprint(self) -> str:
        """Return a hash of pixels and labels, to compare between ranks."""
        return fingerprint(self.pixels, self.labels)


def load(directory: Path | None, share: float, seed: int) -> tuple[Images, Images, str]:
    """Return training and test images and a description: CIFAR-10 of a directory, or generated without one."""
    if directory is None:
        training, test = generate(TRAINING_IMAGES, TEST_IMAGES, share, seed)
        source = "generated, ten patterns under noise, no real pictures (--data-path DIR reads CIFAR-10)"
    else:
        folder = cifar10.find(directory)
        training, test = (from_records(cifar10.read(folder, names)) for names in (cifar10.TRAINING, cifar10.TEST))
        training, test = training.first(share), test.first(share)
        source = f"CIFAR-10 in {folder}"
    return training, test, f"{source}; {len(training.labels)} images to train on, {len(test.labels)} to test on"


def from_records(records: bytearray) -> Images:
    """Return CIFAR-10 records as Images that share their memory."""
    table = torch.frombuffer(records, dtype=torch.uint8).view(-1, cifar10.RECORD)
    return Images(table[:, 1:].view(-1, 3, 32, 32), table[:, 0])


def generate(training: int, test: int, share: float, seed: int) -> tuple[Images, Images]:
    """Return random training and test images: a smooth pattern for each class under noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(cifar10.CLASSES, 3, 4, 4, generator=generator)
    patterns = functional.interpolate(coarse, size=(32, 32), mode="bilinear")

    def draw(count: int) -> Images:
        """Return ``count`` random images, each its class's pattern with noise."""
        labels = torch.randint(cifar10.CLASSES, (count,), generator=generator, dtype=torch.uint8)
        pixels = torch.randint(-64, 64, (count, 3, 32, 32), generator=generator, dtype=torch.int16)
        pixels += (patterns * 40).to(torch.int16)[labels.int()]
        return Images((pixels + 128).clamp(0, 255).to(torch.uint8), labels)

    return draw(max(1, int(training * share))), draw(max(1, int(test * share)))


def require_steps(training: Images, batch: int) -> int:
    """Return the full batches per epoch. InputError if there is none."""
    steps = len(training.labels) // batch
    if not steps:
        raise InputError(f"{len(training.labels)} images are fewer than one train batch of {batch}")
    return steps
