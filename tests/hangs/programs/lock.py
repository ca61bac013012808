"""Rank 1 waits for a lock that its own thread, which saves in the background, has taken and does not give back."""

import threading
import time

import torch
import torch.distributed as dist

saving = threading.Lock()


def save() -> None:
    with saving:
        time.sleep(3600)


dist.init_process_group("gloo")
for step in range(1, 7):
    print(f"step {step}/50", flush=True)
    if dist.get_rank() == 1 and step == 5:
        threading.Thread(target=save, daemon=True).start()
    time.sleep(0.1)
    with saving:  # apart
        gradient = torch.ones(1000)
    dist.all_reduce(gradient)  # others wait
