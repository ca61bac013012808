"""Python's startup hook of a rank's program: it finds its project, and closes torch's process group when it ends.

Else Gloo's threads are ended by force while Python shuts down, which now and then aborts a rank whose work is done:
"terminate called without an active exception", in 4 of 36 runs of a small DDP script, and in none of 36 with this.
"""

import atexit
import importlib.util
import os
import site
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def find_project() -> None:
    """Add what the project installed, and last its root and ``src``, so that no folder of it hides a package."""
    for packages in Path(os.environ.get("LABCTL_SITE", os.devnull)).glob("lib/python*/site-packages"):
        site.addsitedir(str(packages))
    if root := os.environ.get("LABCTL_PROJECT"):
        sys.path += [path for path in (root, f"{root}/src") if path not in sys.path]


def close_process_group() -> None:
    """Close the process group of a script that did not, if that is Gloo's, which waits for no other rank."""
    distributed = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def run_shadowed() -> None:
    """Run the module of this name that Python would have run without this one, such as an image's."""
    here = Path(__file__).resolve().parent
    others = [place for place in sys.path if Path(place).resolve() != here]
    if (spec := PathFinder.find_spec("sitecustomize", others)) and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


find_project()
atexit.register(close_process_group)
run_shadowed()
