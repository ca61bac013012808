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
    """Refuse fp16 on a device without it, which DeepSpeed would find out in the first layer or not at all."""
    if (config.get("fp16") or {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise InputError(
            f"fp16 is enabled, but {name()} on {socket.gethostname()} {why_no_fp16()}; leave fp16.enabled false for "
            "fp32, or set bf16.enabled"
        )


def why_no_fp16() -> str:
    if get_accelerator().device_name() == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"has compute capability {major}.{minor}, below the 7.0 that DeepSpeed asks for"
    if get_accelerator().device_name() == "cpu":
        return "has no fp16 instructions"
    return "does not support it"


def usage() -> dict[str, object]:
    """The device in the columns of metrics.csv; of a CPU its host's load and memory, and no id or temperature."""
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
    """The product's name, of a CPU too."""
    if on_cpu():
        return str(torch.cpu.get_capabilities().get("cpu_name") or "CPU")
    return str(torch.get_device_module().get_device_name(index()))


def memory() -> tuple[int, int]:
    """Free and total bytes, whoever uses them."""
    if hasattr(torch.get_device_module(), "mem_get_info"):
        free, total = torch.get_device_module().mem_get_info(index())
        return int(free), int(total)
    return int(get_accelerator().available_memory(index())), int(get_accelerator().total_memory(index()))


def load() -> str:
    """Per cent: of an NVIDIA device over the last moments, of a CPU since the last call; empty where unknown."""
    if on_cpu():
        import psutil

        return f"{psutil.cpu_percent():.1f}%"
    percent = nvidia("utilization")
    return "" if percent == "" else f"{float(percent):.1f}%"


def temperature() -> str:
    """Degrees Celsius; empty where unknown."""
    return nvidia("temperature")


def nvidia(reading: str) -> str:
    """A reading of torch.cuda's, which come by way of NVIDIA's management library; empty without one."""
    if get_accelerator().device_name() != "cuda":
        return ""
    # The library has errors of its own, such as for what a slice of a device (MIG) does not tell.
    with suppress(Exception):
        return str(getattr(torch.cuda, reading)(index()))
    return ""
