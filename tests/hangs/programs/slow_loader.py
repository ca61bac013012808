"""Rank 1 waits for its data loader, whose worker process sleeps in the dataset, as on storage that does not answer."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if dist.get_rank() == 1 and index == 6:
            time.sleep(3600)
        return torch.ones(1000)


dist.init_process_group("gloo")
for step, batch in enumerate(DataLoader(Samples(), num_workers=1, multiprocessing_context="fork"), 1):  # apart
    print(f"step {step}/100", flush=True)
    time.sleep(0.1)
    dist.all_reduce(batch)  # others wait
