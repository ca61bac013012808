"""Rank 2 writes a checkpoint without end, and the others wait for it at the barrier."""

import time

import torch
import torch.distributed as dist


def write_checkpoint() -> None:
    time.sleep(3600)  # apart


dist.init_process_group("gloo")
for step in range(1, 6):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    dist.all_reduce(torch.ones(1000))
if dist.get_rank() == 2:
    write_checkpoint()
dist.barrier()  # others wait
