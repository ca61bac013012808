"""Rank 0 evaluates alone for a while and the other waits for it: slow, but no hang."""

import time

import torch
import torch.distributed as dist


def evaluate() -> None:
    end = time.monotonic() + 15
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)  # apart


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1000))
if dist.get_rank() == 0:
    evaluate()
dist.barrier()  # others wait
print("done", flush=True)
