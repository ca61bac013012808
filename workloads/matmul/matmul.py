"""Multiply matrices on all ranks, in synchronous rounds; rank 0 reports each rank's rate and the slow ranks.

On the device and with the communication that DeepSpeed chooses, so that what is found here is what training will find.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import rates
import turns
from rank_group import local_ranks, use_cores

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
"""Relative error of a product times a vector: the last digits of the number format, with room."""


def main() -> int:
    """Run turns and rounds on this rank, rank 0 prints the results; return 1 if this rank's products are wrong."""
    args = parse()
    import torch
    import torch.distributed as dist

    device, dtype = start(args.dtype)
    rank, size = dist.get_rank(), args.size or (1024 if device == "cpu" else 8192)
    torch.manual_seed(rank)
    number = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    left, right = (torch.randn(size, size, device=device).to(number) for _ in range(2))
    taken = (
        turns.take(args.turns, args.seconds, partial(multiply_for, args.products, left, right)) if args.turns else []
    )
    report = work(args, left, right)
    error = relative_error(left, right)
    if error > TOLERANCE[dtype]:
        print(f"rank {rank} on {report.node}: its products are wrong: relative error {error:.2g}", flush=True)
        return 1
    reports: list[rates.Report] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0:
        print(f"{size} x {size} {dtype}, {args.rounds} rounds of {args.products} products on {report.device}")
        print(*rates.table(reports, dtype), rates.verdict(reports, args.slow_below), sep="\n")
        print(*turns.lines(taken), sep="\n", end="\n" if taken else "")
        print(f"slow: {len(rates.slow(reports, args.slow_below))}")
        print(f"tflops: {min(report.tflops for report in reports):.6f} (the slowest rank)", flush=True)
    dist.destroy_process_group()
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line; exit with an error for a size, count or share out of range."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, help="rows and columns; if not given, 1024 on a CPU and 8192 on anything else")
    add("--rounds", type=int, default=20, help="timed rounds, after one that is not")
    add("--products", type=int, default=8, help="products of a round")
    add("--dtype", default="auto", choices=["auto", "bf16", "fp16", "fp32"], help="auto: fp32 on a CPU")
    add("--turns", type=int, default=0, help="times that each node multiplies alone, or with nodes of other hosts")
    add("--seconds", type=float, default=1.0, help="least time of a turn")
    add("--slow-below", type=float, default=0.8, help="a rank below this share of the median is slow")
    add("--slow-rank", type=int, default=-1, help="a rank that is made slow, to see that it is found")
    add("--slow-factor", type=int, default=3, help="how many times its work that rank does")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.size or 1, args.rounds, args.products, args.slow_factor) < 1 or not 0 < args.slow_below <= 1:
        parser.error("sizes and counts are at least 1, --slow-below is above 0 and at most 1")
    return args


def start(dtype: str) -> tuple[str, str]:
    """Initialise DeepSpeed on this rank's device; return torch's device and the precision, chosen if ``auto``."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("error")
    accelerator = get_accelerator()
    kind = accelerator.device_name()
    use_cores()
    if kind != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(verbose=False)
    if dtype != "auto":
        return accelerator.current_device_name(), dtype
    if kind == "cpu":
        return kind, "fp32"
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if kind == "cuda" else True
    return accelerator.current_device_name(), "bf16" if bf16 else "fp16"


def work(args: argparse.Namespace, left: Tensor, right: Tensor) -> rates.Report:
    """Multiply in rounds that end with an all-reduce; return this rank's times, and its rate in the median round."""
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    wait = get_accelerator().synchronize
    rank = dist.get_rank()
    times = args.products * (args.slow_factor if rank == args.slow_rank else 1)
    product, token = torch.empty_like(left), torch.ones(1, device=left.device)
    busy, waited, cpu = [], [], []
    for _ in range(args.rounds + 1):
        began, used = time.perf_counter(), time.process_time()
        for _ in range(times):
            torch.matmul(left, right, out=product)
        wait()
        done = time.perf_counter()
        cpu.append(time.process_time() - used)
        dist.all_reduce(token)
        wait()
        busy.append(done - began)
        waited.append(time.perf_counter() - done)
    return rates.Report(
        rank=rank,
        node=socket.gethostname(),
        tflops=rates.tflops(len(left), args.products, median(busy[1:])),
        busy=sum(busy[1:]),
        waited=sum(waited[1:]),
        cpu=sum(cpu[1:]),
        cores=len(os.sched_getaffinity(0)) / local_ranks(),
        device="cpu" if left.device.type == "cpu" else torch.get_device_module(left.device).get_device_name(),
    )


def multiply_for(products: int, left: Tensor, right: Tensor, seconds: float) -> float:
    """Multiply for at least ``seconds``; return the TFLOP done."""
    import torch
    from deepspeed.accelerator import get_accelerator

    wait, product = get_accelerator().synchronize, torch.empty_like(left)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(products):
            torch.matmul(left, right, out=product)
        wait()
        done += products
    return rates.tflops(len(left), done, 1.0)


def relative_error(left: Tensor, right: Tensor) -> float:
    """Return the relative error of (left right) x against left (right x) for a random x (Freivalds)."""
    import torch

    vector = torch.randn(len(left), device=left.device)
    straight = (left @ right).float() @ vector
    detour = left.float() @ (right.float() @ vector)
    return float((straight - detour).norm() / detour.norm())


if __name__ == "__main__":
    sys.exit(main())
