"""Rank 2 does not come to the all_reduce of its group, ranks 0 to 2; rank 3, outside it, waits at the barrier."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group([0, 1, 2])
for step in range(1, 6):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    if rank < 3:
        dist.all_reduce(torch.ones(1000), group=group)
if rank == 2:
    time.sleep(3600)  # apart
if rank < 3:
    dist.all_reduce(torch.ones(1000), group=group)  # others wait
dist.barrier()
