"""Count the devices that a node's framework sees; print the framework's name and the number.

    count_devices.py MODULE KIND

MODULE is a module of torch, such as torch.cuda; KIND is TensorFlow's device type, such as GPU. Python >= 3.8.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec


def main(module: str, kind: str) -> None:
    """Print `torch` and the device count of `module`, or TensorFlow's count if only tensorflow is installed."""
    if find_spec("tensorflow") and not find_spec(module.partition(".")[0]):
        config = import_module("tensorflow").config
        print("tensorflow", len(config.list_physical_devices(kind)))
    else:
        print("torch", import_module(module).device_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
