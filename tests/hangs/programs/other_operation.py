"""Rank 1 takes another branch and broadcasts, where the others reduce."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 7):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    gradient = torch.ones(1000)
    if dist.get_rank() == 1 and step == 6:
        dist.broadcast(gradient, src=0)  # apart
    else:
        dist.all_reduce(gradient)  # others wait
