"""Capabilities and memory of this rank's device."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from script_exit import InputError


def name() -> str:
    """Return the GPU's product name on CUDA, else the accelerator's kind, such as ``cpu``."""
    accelerator = get_accelerator()
    return torch.cuda.get_device_name() if accelerator.device_name() == "cuda" else str(accelerator.device_name())


def hardware() -> str:
    """Return the device's name; on a CPU the processor's model and the number of torch's threads."""
    if get_accelerator().device_name() != "cpu":
        return name()
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, threads {torch.get_num_threads()}"


def check_precision(precision: str) -> None:
    """Raise InputError if this device lacks the precision; on a CPU only fp16 can be missing."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        if precision == "fp16" and not accelerator.is_fp16_supported():
            raise InputError("fp16: this CPU has no fp16 instructions; bf16 and fp32 work")
        return
    supported = {"bf16": has_bf16(), "fp16": accelerator.is_fp16_supported(), "fp32": True}
    if not supported[precision]:
        usable = ", ".join(name for name, has in supported.items() if has)
        raise InputError(f"{precision}: this {accelerator.device_name()} device has only {usable}")


def has_bf16() -> bool:
    """Return True if the device has bf16 in hardware; emulation on older NVIDIA devices does not count."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(accelerator.is_bf16_supported())


def peak_memory() -> int:
    """Return the peak bytes that torch allocated on the device; on a CPU the process's peak resident memory."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(kilobytes[1]) * 1024 if kilobytes else 0
