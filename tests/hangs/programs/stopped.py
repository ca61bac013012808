"""Rank 1 is stopped by SIGSTOP, as by a debugger, and the others wait for it."""

import os
import signal
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 7):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    if dist.get_rank() == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGSTOP)  # apart
    dist.all_reduce(torch.ones(1000))  # others wait
