"""Rank 1 computes for longer than rank 0 before each collective."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
values = torch.ones(4)
for step in range(100):
    time.sleep(0.35 if rank else 0.1)
    dist.all_reduce(values)
    values /= dist.get_world_size()
    if rank == 0:
        print(f"step {step + 1}/100", flush=True)
dist.destroy_process_group()
