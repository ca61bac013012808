"""The loop over the steps, the same in every mode, and what is said at its end."""

from __future__ import annotations

import hashlib
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import device
import flops
from checkpoints import Checkpoints, Progress
from deepspeed.accelerator import get_accelerator
from rank_group import WORLD, largest, say, synchronised_time


@dataclass(frozen=True)
class Work:
    """Work of one step of the optimiser, over all ranks."""

    samples: int
    tokens: int
    flops: float
    """Floating-point operations, without recomputation; 0 where they are not those of bf16 or fp16."""


@dataclass(frozen=True)
class Step:
    """Result of a step, equal on all ranks."""

    loss: float
    learning_rate: float
    more: dict[str, float] = field(default_factory=dict)


def run(args: Namespace, work: Work, take: Callable[[int], Step], saved: Checkpoints) -> list[Step]:
    """Take all steps after the checkpoint's, print each, save checkpoints, report speed; return all steps.

    The steps after the warm-up are timed, ranks waiting for each other.
    """
    progress = saved.load(args.steps)
    steps = [Step(**one) for one in progress.get("steps", ())]
    # Of the whole training: what is judged by its first loss is not judged by that of a part of it.
    first = progress.get("first", "")
    if first:
        say(first)

    def progress_now() -> Progress:
        """Return the progress to store in a checkpoint."""
        return {"first": first, "steps": [asdict(one) for one in steps]}

    untimed = max(args.warmup_steps, len(steps))
    started = synchronised_time()
    for number in range(len(steps) + 1, args.steps + 1):
        if number == untimed + 1:
            started = synchronised_time()
        step_started = time.perf_counter()
        step = take(number - 1)
        speed = work.tokens / (time.perf_counter() - step_started)
        more = "".join(f" {name} {value:.4f}" for name, value in step.more.items())
        line = f"step {number}/{args.steps} loss {step.loss:.4f} lr {step.learning_rate:.1e} tokens/s {speed:.0f}{more}"
        say(line)
        first = first or line
        steps.append(step)
        saved.after(number, args.steps, progress_now)
    report(work, args.steps - untimed, synchronised_time() - started)
    say(f"Loss curve: {len(steps)} steps, SHA-256 {fingerprint(steps)} on {device.hardware()}")
    return steps


def fingerprint(steps: list[Step]) -> str:
    """Return a hash of all losses, to the last bit: equal for identical runs."""
    return hashlib.sha256(" ".join(step.loss.hex() for step in steps).encode()).hexdigest()[:16]


def report(work: Work, steps: int, seconds: float) -> None:
    """Print time, samples and tokens per second, peak memory and, on a GPU, MFU.

    As DeepSpeed-Chat defines it in its first two steps; in the third it counts the warm-up too, which is left out here.
    """
    say(f"Execution time: {seconds:.3f} seconds for {steps} steps")
    say(f"Throughput: {steps * work.samples / seconds:.4f} samples/sec")
    say(f"Tokens: {steps * work.tokens / seconds:.1f} tokens/sec")
    say(f"Peak memory: {largest(device.peak_memory()) / 2**30:.3f} GiB")
    if get_accelerator().device_name() == "cuda" and work.flops:
        peak = flops.peak(device.name())
        achieved = steps * work.flops / seconds / WORLD / 1e12
        share = f"{100 * achieved / peak:.1f} % of {peak:g} TFLOP/s" if peak else f"unknown, {achieved:.1f} TFLOP/s"
        say(f"MFU: {share} ({device.name()})")
