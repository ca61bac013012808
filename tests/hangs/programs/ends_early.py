"""Rank 1 has no file to read and ends with 0 before it meets the others, who wait for it in init_process_group."""

import os
import sys

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
files = ["part-0"][rank::world]
if not files:
    print("nothing to do", flush=True)
    sys.exit()
dist.init_process_group("gloo")  # others wait
dist.all_reduce(torch.ones(1000))
