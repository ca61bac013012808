"""Capabilities and utilisation of this rank's device."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from script_exit import InputError

MB = 1 << 20


def refuse_fp16(config: dict[str, Any]) -> None:
    """Raise InputError if fp16 is enabled and this rank's device lacks it."""
    if (config.get("fp16") or {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise InputError(
            f"fp16 is enabled, but {name()} on {socket.gethostname()} {why_no_fp16()}; leave fp16.enabled false for "
            "fp32, or set bf16.enabled"
        )


def why_no_fp16() -> str:
    """Return the reason why the device has no fp16: compute capability, or CPU."""
    if get_accelerator().device_name() == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"has compute capability {major}.{minor}, below the 7.0 that DeepSpeed asks for"
    if get_accelerator().device_name() == "cpu":
        return "has no fp16 instructions"
    return "does not support it"


def usage() -> dict[str, object]:
    """Return the device columns of metrics.csv; of a CPU the host's load and memory, without id and temperature."""
    free, total = memory()
    return {
        "GPU_ID": "" if on_cpu() else index(),
        "GPU_Name": name(),
        "GPU_Load": load(),
        "GPU_Free_Mem_MB": f"{free / MB:.1f}",
        "GPU_Used_Mem_MB": f"{(total - free) / MB:.1f}",
        "GPU_Total_Mem_MB": f"{total / MB:.1f}",
        "GPU_Temp_C": temperature(),
    }


def on_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")


def index() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def name() -> str:
    """Return the product name of the device, or of the CPU."""
    if on_cpu():
        return str(torch.cpu.get_capabilities().get("cpu_name") or "CPU")
    return str(torch.get_device_module().get_device_name(index()))


def memory() -> tuple[int, int]:
    """Return free and total bytes of the device, or of the host on a CPU."""
    if hasattr(torch.get_device_module(), "mem_get_info"):
        free, total = torch.get_device_module().mem_get_info(index())
        return int(free), int(total)
    return int(get_accelerator().available_memory(index())), int(get_accelerator().total_memory(index()))


def load() -> str:
    """Return the load as ``12.0%``: an NVIDIA device's, or the CPU's since the last call; empty if unknown."""
    if on_cpu():
        import psutil

        return f"{psutil.cpu_percent():.1f}%"
    percent = nvidia("utilization")
    return "" if percent == "" else f"{float(percent):.1f}%"


def temperature() -> str:
    """Return the device's temperature in degrees Celsius; empty if unknown."""
    return nvidia("temperature")


def nvidia(reading: str) -> str:
    """Return torch.cuda's function ``reading`` of the device as text; empty if it fails or without CUDA."""
    if get_accelerator().device_name() != "cuda":
        return ""
    # The library has errors of its own, such as for what a slice of a device (MIG) does not tell.
    with suppress(Exception):
        return str(getattr(torch.cuda, reading)(index()))
    return ""
