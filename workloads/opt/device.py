"""What this rank's device can do, and what all ranks must have in common."""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from shapes import InputError

BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in ``torch.cpu.get_capabilities()`` of bf16 multiplication: Intel AMX, x86 AVX-512, Arm."""


def use_cores() -> None:
    """Share the cores that this process may use among the ranks of this node, unless the caller has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def choose_dtype(requested: str) -> tuple[str, str]:
    """The number format to train in, and why: as requested if the device has it; ``auto`` is the device's fastest."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return cpu_dtype(requested, fp16=bool(accelerator.is_fp16_supported()))
    supported = {"bf16": has_bf16(), "fp16": accelerator.is_fp16_supported(), "fp32": True}
    usable = [name for name, has in supported.items() if has]
    if requested == "auto":
        return usable[0], f"this {accelerator.device_name()} device has {', '.join(usable)}"
    if requested not in usable:
        raise InputError(f"--dtype {requested}: this {accelerator.device_name()} device has only {', '.join(usable)}")
    return requested, "as asked"


def cpu_dtype(requested: str, *, fp16: bool) -> tuple[str, str]:
    """On a CPU bf16 always works, but is fast only with instructions for it; fp16 works only with its own."""
    capabilities = torch.cpu.get_capabilities()
    bf16 = [name for name in BF16_INSTRUCTIONS if capabilities.get(name)]
    if requested == "auto":
        return ("bf16", f"this CPU has {bf16[0]}") if bf16 else ("fp32", "this CPU has no bf16 instructions")
    if requested == "fp16" and not fp16:
        raise InputError("--dtype fp16: this CPU has no fp16 instructions; bf16 and fp32 work")
    return requested, "as asked"


def has_bf16() -> bool:
    """Whether the device itself multiplies bf16; torch says yes also for older NVIDIA devices, which emulate it."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(accelerator.is_bf16_supported())


def agree(facts: dict[str, Any]) -> None:
    """Refuse to train when ranks differ in a fact: they would silently train on different things, or hang."""
    gathered: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, facts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(f"ranks differ in {name}: rank 0 has {value}, rank {rank} has {other[name]}")
