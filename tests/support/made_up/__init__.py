"""A fictitious accelerator: a module and a compose fragment beside labctl's own."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = Path(__file__).parent
CHECKOUT = FOLDER.parents[2]


def checkout_with_zeta(directory: Path) -> Path:
    """Copy labctl with the additional accelerator; return the directory for PYTHONPATH."""
    for name in ("labctl", "compose"):
        shutil.copytree(CHECKOUT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docker", "hostfiles", "workloads", "env.example", "hosts.example"):
        (directory / name).symlink_to(CHECKOUT / name)
    shutil.copy(FOLDER / "zeta.py", directory / "labctl/accelerators")
    shutil.copy(FOLDER / "zeta.yml.j2", directory / "compose")
    return directory
