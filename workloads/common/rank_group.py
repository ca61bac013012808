"""Rank and world size, cores, printing on rank 0, and agreement between all ranks.

Imports torch and DeepSpeed only in the functions that need them.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

from script_exit import InputError

if TYPE_CHECKING:
    import torch

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(text, flush=True)


# --- the process ---------------------------------------------------------------------------------------------


def local_ranks() -> int:
    """Return the number of ranks on this node, from LOCAL_SIZE or LOCAL_WORLD_SIZE; 1 without them."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def cores_per_rank(ranks: int) -> int:
    """Return the cores that this process may use divided by the node's ranks; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def use_cores() -> None:
    """Set torch's number of threads to this rank's share of the cores, unless OMP_NUM_THREADS is set."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank(local_ranks()))


def set_up() -> None:
    """Silence DeepSpeed's log below errors and libraries' FutureWarnings, and share the cores."""
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    use_cores()


def join() -> None:
    """Select the device LOCAL_RANK and initialise DeepSpeed's process group."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()


# --- all ranks together --------------------------------------------------------------------------------------


def fingerprint(*tensors: torch.Tensor) -> str:
    """Return a hash of the tensors' values, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def agree(facts: dict[str, Any]) -> None:
    """Raise InputError on all ranks if a fact of any rank differs from rank 0's."""
    import torch

    gathered: list[dict[str, Any]] = [{}] * WORLD
    torch.distributed.all_gather_object(gathered, facts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(f"ranks differ in {name}: rank 0 has {value}, rank {rank} has {other[name]}")


def mean(*numbers: torch.Tensor) -> list[float]:
    """Return the mean over all ranks of each scalar, with one all-reduce."""
    import torch

    together = torch.stack([number.detach().float() for number in numbers])
    torch.distributed.all_reduce(together)
    return list((together / WORLD).tolist())


def largest(number: float) -> float:
    """Return the largest of a number over all ranks."""
    import torch
    from deepspeed.accelerator import get_accelerator

    tensor = torch.tensor(number, device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return float(tensor)


def synchronised_time() -> float:
    """Wait for this device and all ranks, then return this rank's clock in seconds."""
    import torch
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    torch.distributed.barrier()
    return time.perf_counter()
