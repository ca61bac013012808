"""Plain processors: the node's share of the cores is set by its cpuset, not by devices."""

from __future__ import annotations

from labctl.accelerators import AcceleratorModule
from labctl.model import DeviceMapping

# DS_ACCELERATOR stops DeepSpeed from searching for devices. Without ACCELERATE_USE_CPU and without a GPU, each rank of
# a script of Accelerate's or of transformers' Trainer would train alone.
_ENVIRONMENT = (("ACCELERATE_USE_CPU", "true"), ("DS_ACCELERATOR", "cpu"))

MODULE = AcceleratorModule(
    sought="processor",
    order=100,
    torch_index="https://download.pytorch.org/whl/cpu",
    find=lambda root: (),  # noqa: ARG005 - called by name
    container=lambda *_: DeviceMapping(environment=_ENVIRONMENT, launcher_environment=_ENVIRONMENT),
)
