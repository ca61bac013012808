"""Rank 1 fails at its third step each time that an elastic launcher starts it again."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 51):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    if dist.get_rank() == 1 and step == 3:
        sys.exit(7)  # apart
    dist.all_reduce(torch.ones(1000))
