"""Ranks 2 and 3 use two groups of all ranks in the other order than ranks 0 and 1."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
gradients, metrics = dist.new_group(), dist.new_group()
for step in range(1, 6):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    dist.all_reduce(torch.ones(1000), group=gradients)
if dist.get_rank() < 2:
    dist.all_reduce(torch.ones(10), group=gradients)  # others wait
    dist.all_reduce(torch.ones(10), group=metrics)
else:
    dist.all_reduce(torch.ones(10), group=metrics)  # apart
    dist.all_reduce(torch.ones(10), group=gradients)
