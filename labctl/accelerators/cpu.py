"""Plain processors: the node's share of the cores is set by its cpuset, not by devices."""

from __future__ import annotations

from labctl.accelerators import AcceleratorModule
from labctl.model import DeviceMapping

# So that DeepSpeed does not look for anything else.
_ENVIRONMENT = (("DS_ACCELERATOR", "cpu"),)

MODULE = AcceleratorModule(
    sought="processor",
    order=100,
    find=lambda root: (),  # noqa: ARG005 - called by name
    container=lambda *_: DeviceMapping(environment=_ENVIRONMENT, launcher_environment=_ENVIRONMENT),
)
