"""Device of this rank, and the communication library for such devices."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
import torch.distributed as dist

BACKENDS = ("auto", "gloo", "nccl", "hccl", "xccl", "ccl")
KINDS = {"gloo": "cpu", "nccl": "cuda", "hccl": "hpu", "xccl": "xpu", "ccl": "xpu"}
BUDGET = {"cpu": 1 << 30}
"""Bytes that the timed calls of one size may move; GPUs' links are a hundred times as fast as a CPU's network."""
DEFAULT_BUDGET = 20 << 30
COPIES = (("gloo", "all_gather"), ("gloo", "reduce_scatter"))
"""Operations for which the backend copies the whole buffer; measured with torch 2.13."""


def choose(asked: str) -> tuple[str, torch.device]:
    """Return the backend's name and this rank's device, which is selected. RuntimeError if torch lacks it."""
    backend = asked if asked != "auto" else detect()
    if backend == "hccl":
        # Registers the device and the backend with torch.
        import habana_frameworks.torch.core
        import habana_frameworks.torch.distributed.hccl  # noqa: F401
    if backend == "ccl":
        import oneccl_bindings_for_pytorch  # noqa: F401
    if not dist.is_backend_available(backend):
        raise RuntimeError(f"torch {torch.__version__} here has no backend `{backend}`")
    kind = KINDS[backend]
    if kind in ("cpu", "hpu"):
        return backend, torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    getattr(torch, kind).set_device(device)
    return backend, device


def detect() -> str:
    """Return the backend of the accelerator found: hccl, nccl, xccl or ccl; gloo without one."""
    if find_spec("habana_frameworks"):
        return "hccl"
    if torch.cuda.is_available():
        return "nccl"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xccl" if dist.is_backend_available("xccl") else "ccl"
    return "gloo"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; return at once on a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def free_memory(device: torch.device) -> int:
    """Return the bytes free on the device; 0 for a CPU."""
    return 0 if device.type == "cpu" else int(getattr(torch, device.type).mem_get_info()[0])


def scratch(backend: str, operation: str) -> float:
    """Return the backend's own memory beside the buffers, as a share of the size."""
    return 1.0 if (backend, operation) in COPIES else 0.2
