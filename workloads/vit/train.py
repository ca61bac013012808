"""Image classification with a vision transformer under DeepSpeed, started on every rank by any launcher."""

from __future__ import annotations

import csv
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arguments
from checkpoints import Checkpoints, Progress
from deepspeed_file import read_config
from rank_group import RANK, WORLD, agree, join, say, set_up
from script_exit import run_and_exit
from shapes import Shape, parameters

if TYPE_CHECKING:
    import torch
    from images import Images

COLUMNS = (
    "Timestamp", "Rank", "Epoch", "Computation_Time", "GPU_ID", "GPU_Name", "GPU_Load", "GPU_Free_Mem_MB",
    "GPU_Used_Mem_MB", "GPU_Total_Mem_MB", "GPU_Temp_C",
)  # fmt: skip
"""Columns of metrics.csv; Computation_Time is the rank's training time in the epoch, in seconds."""


@dataclass
class Part:
    """Completed part of an epoch: batches, the sum of their losses (a tensor), and seconds."""

    epoch: int
    batches: int = 0
    loss: Any = 0.0
    seconds: float = 0


def main() -> None:
    """Parse and check the arguments, then train on this rank."""
    args = arguments.parse()
    train(args, arguments.check(args), read_config(args.deepspeed_config))


def train(args: Namespace, shape: Shape, config: dict[str, Any]) -> None:
    """Train on this rank from the checkpoint on; after each epoch test, append to metrics.csv and print a line."""
    import deepspeed
    import torch
    from images import require_steps
    from model import VisionTransformer

    set_up()
    training, test = prepare(args, shape, config)

    torch.manual_seed(args.seed)
    model = VisionTransformer(shape)
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    config = {"steps_per_print": sys.maxsize, **config}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    steps = require_steps(training, engine.train_batch_size())
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    say(f"batch: {engine.train_batch_size()} = {micro} x {accumulation} accumulated x {WORLD} ranks, {steps} per epoch")

    saved = Checkpoints({"model": engine}, args, {"images": training.fingerprint()})
    progress = saved.load(args.epochs * steps)
    part, lines = Part(**progress.get("part", {"epoch": 1})), progress.get("lines", [])
    # Of the whole training, by which it is judged.
    for line in lines:
        say(line)

    def after_batch() -> None:
        """Save a checkpoint if one is due, at the end of an accumulated step."""
        if part.batches % accumulation == 0:
            saved.after((part.epoch - 1) * steps + part.batches // accumulation, args.epochs * steps, progress_now)

    def progress_now() -> Progress:
        return {"part": {**asdict(part), "loss": float(part.loss)}, "lines": lines}

    for epoch in range(part.epoch, args.epochs + 1):
        part = part if part.epoch == epoch else Part(epoch)
        loss = train_epoch(engine, training, steps, shape, args.seed + epoch, part, after_batch)
        slowest = max(record(epoch, part.seconds))
        accuracy = evaluate(engine, test, shape)
        speed = steps * engine.train_batch_size() / slowest
        lines.append(f"epoch {epoch}/{args.epochs} loss {loss:.4f} accuracy {accuracy:.4f} images/s {speed:.1f}")
        say(lines[-1])
        if engine.fp16_enabled():
            skipped = f"{engine.skipped_steps} of {engine.global_steps} steps skipped"
            say(f"loss scale {engine.optimizer.loss_scale:g}, {skipped}")
    torch.distributed.destroy_process_group()


def prepare(args: Namespace, shape: Shape, config: dict[str, Any]) -> tuple[Images, Images]:
    """Load the images, join the ranks, check that all have the same, print the setting; return the images."""
    import images
    from device import name, refuse_fp16

    refuse_fp16(config)
    training, test, source = images.load(args.data_path, args.dataset_percentage, args.seed)
    join()
    agree({"images": training.fingerprint(), "test images": test.fingerprint()})

    say(f"world size {WORLD}")
    say(f"model: {args.model}{', rehearsed' if args.rehearse else ''}, {parameters(shape)} parameters")
    say(f"images: {source}, scaled to {shape.image} pixels")
    say(f"device: {name()}; ZeRO stage: {(config.get('zero_optimization') or {}).get('stage', 0)}")
    return training, test


def train_epoch(
    engine: Any,
    training: Images,
    steps: int,
    shape: Shape,
    seed: int,
    part: Part,
    after_batch: Callable[[], None],
) -> float:
    """Train on the rest of an epoch's images, updating ``part``; return the mean loss over all ranks.

    ``part`` is what was done of the epoch before, and gets what is done now.
    """
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.nn import functional

    order = torch.randperm(len(training.labels), generator=torch.Generator().manual_seed(seed))
    order = order[: steps * engine.train_batch_size()]
    part.loss = torch.tensor(part.loss, device=engine.device)
    engine.train()
    started = time.perf_counter() - part.seconds
    own = training.batches(order, engine.train_micro_batch_size_per_gpu(), RANK, WORLD)
    for pixels, labels in islice(own, part.batches, None):
        loss = functional.cross_entropy(predict(engine, pixels, shape).float(), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        part.loss += loss.detach()
        part.batches += 1
        part.seconds = time.perf_counter() - started
        after_batch()
    get_accelerator().synchronize()
    part.seconds = time.perf_counter() - started
    mean, ranks = summed([part.loss / part.batches, 1])
    return mean / ranks


def evaluate(engine: Any, test: Images, shape: Shape) -> float:
    """Return the share of test images classified correctly, over all ranks."""
    import torch

    size = engine.train_micro_batch_size_per_gpu()
    order = torch.arange(len(test.labels))
    missing = -len(order) % (size * WORLD)
    padded = torch.cat([order, order.new_zeros(missing)])
    right = torch.zeros((), device=engine.device)
    engine.eval()
    with torch.no_grad():
        for number, (pixels, labels) in enumerate(test.batches(padded, size, RANK, WORLD)):
            hits = predict(engine, pixels, shape).argmax(dim=1) == labels.to(engine.device)
            first = (number * WORLD + RANK) * size
            right += hits[: max(0, len(order) - first)].sum()
    return summed([right])[0] / len(order)


def predict(engine: Any, pixels: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Scale bytes (batch, 3, 32, 32) to -1..1 and to the model's size; return the logits (batch, classes)."""
    from torch.nn import functional

    values = pixels.to(engine.device).float() / 127.5 - 1
    if values.shape[-1] != shape.image:
        values = functional.interpolate(values, size=(shape.image, shape.image), mode="bilinear")
    return engine(values.to(next(engine.parameters()).dtype))


def summed(values: list[Any]) -> list[float]:
    """Return each value's sum over all ranks."""
    import torch
    from deepspeed.accelerator import get_accelerator

    total = torch.tensor([float(value) for value in values], device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(total)
    return total.tolist()


def record(epoch: int, seconds: float) -> list[float]:
    """Append a row per rank to metrics.csv on rank 0; return the training seconds of all ranks."""
    import torch
    from device import usage

    row = {"Timestamp": time.strftime("%Y-%m-%d %H:%M:%S"), "Rank": RANK, "Epoch": epoch, "Computation_Time": seconds}
    rows: list[dict[str, Any]] = [{}] * WORLD
    torch.distributed.all_gather_object(rows, {**row, **usage()})
    if RANK == 0:
        path = Path(os.environ.get("LABCTL_RUN_DIR", ".")) / "metrics.csv"
        # What goes on from a checkpoint begins in a later epoch.
        new = epoch == 1 or not path.exists()
        with path.open("w" if new else "a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
    return [other["Computation_Time"] for other in rows]


if __name__ == "__main__":
    run_and_exit(main)
