"""Rank 1 is in state D, as on an NFS server that is gone: it waits for a child of vfork(2) that does not end."""

import ctypes
import time

import torch
import torch.distributed as dist


def write_checkpoint() -> None:
    if ctypes.CDLL(None).vfork() == 0:  # apart
        time.sleep(3600)


dist.init_process_group("gloo")
for step in range(1, 7):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    if dist.get_rank() == 1 and step == 5:
        write_checkpoint()
    dist.all_reduce(torch.ones(1000))  # others wait
