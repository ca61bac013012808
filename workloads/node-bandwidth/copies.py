"""Copies between pinned host memory and this rank's device, both ways: what PCIe, or what is in its place, carries.

The device is the one that DeepSpeed chooses, as for training. A copy of n bytes counts n, as NVIDIA's nvbandwidth and
bandwidthTest count it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rank_group import set_up
from script_exit import InputError

if TYPE_CHECKING:
    import torch

DEFAULT_SIZE = 256 << 20


class PinnedCopies:
    """A round copies so many bytes to the device and back. InputError without a device, unless `host_copy`."""

    def __init__(self, size: int | None, node: str, *, host_copy: bool) -> None:
        """Allocate pinned host buffers and a device buffer. InputError without a device, unless ``host_copy``."""
        import torch

        set_up()
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        kind, size = accelerator.device_name(), size or DEFAULT_SIZE
        if kind == "cpu" and not host_copy:
            raise InputError(f"{node} has no accelerator, so there is no device to copy to and from")
        if kind != "cpu":
            accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device = accelerator.current_device_name()
        self._there = accelerator.pin_memory(torch.randint(256, (size,), dtype=torch.uint8))
        self._back = accelerator.pin_memory(torch.zeros(size, dtype=torch.uint8))
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self._wait = accelerator.synchronize
        self.parts = (
            ("host-to-device", "host-to-device copy", size),
            ("device-to-host", "device-to-host copy", size),
        )
        where = "within host memory: no accelerator" if kind == "cpu" else f"{device} {device_name(self._device)}"
        self.detail = f"{size / (1 << 20):.0f} MiB, {where}"

    def round(self) -> tuple[float, ...]:
        """Copy to the device and back; return the seconds of each."""
        self._wait()
        began = time.perf_counter()
        self._device.copy_(self._there, non_blocking=True)
        self._wait()
        between = time.perf_counter()
        self._back.copy_(self._device, non_blocking=True)
        self._wait()
        return between - began, time.perf_counter() - between

    def wrong(self) -> str:
        """Return an error text if the bytes that came back differ; empty if they are equal."""
        return "" if self._there.equal(self._back) else "what came back from the device is not what was sent there"


def device_name(tensor: torch.Tensor) -> str:
    import torch

    return str(torch.get_device_module(tensor.device).get_device_name())
