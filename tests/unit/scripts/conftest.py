"""Fixtures that import scripts of workloads/ as a rank does: first the workload's folder, then workloads/common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

WORKLOADS = Path(__file__).resolve().parents[3] / "workloads"
ImportScripts = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def import_scripts() -> Iterator[ImportScripts]:
    """Return a function that imports a workload's modules with workloads/common; unload them after the file."""
    with pytest.MonkeyPatch.context() as patch:

        def imported(folder: str, *names: str) -> SimpleNamespace:
            """Put the two folders on sys.path; return the imported modules as attributes."""
            for path in (WORKLOADS / "common", WORKLOADS / folder):
                patch.syspath_prepend(str(path))
            return SimpleNamespace(**{name: import_module(name) for name in names})

        yield imported
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{WORKLOADS}/"):
            del sys.modules[name]
