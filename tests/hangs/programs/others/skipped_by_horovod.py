"""Rank 1 catches an error, goes to sleep before it tries again, and so misses the allreduce of rank 0."""

import time

import horovod.torch as hvd
import torch

hvd.init()
for step in range(1, 51):
    if hvd.rank() == 0:
        print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    try:
        if hvd.rank() == 1 and step == 5:
            torch.load("/nowhere/part-5.pt")
    except OSError:
        time.sleep(3600)  # apart
    hvd.allreduce(torch.ones(1000), name="gradient")  # others wait
