"""Code that runs before and after the script of a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMON = Path(__file__).resolve().parents[3] / "workloads/common"
# As much of torch.distributed as is asked at the end.
SCRIPT = """
import sys, types
group = types.ModuleType("torch.distributed")
group.is_available = lambda: True
group.is_initialized = lambda: {begun}
group.get_backend = lambda: "{backend}"
group.destroy_process_group = lambda: print("closed")
sys.modules["torch.distributed"] = group
print("done")
"""


def printed(script: str, *path: Path) -> list[str]:
    """Return the words that the script prints with these folders as PYTHONPATH."""
    variables = {"PYTHONPATH": ":".join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("begun", "backend", "lines"),
    [
        (True, "gloo", ["done", "closed"]),
        (False, "gloo", ["done"]),
        # Those of devices may wait for ranks that are gone.
        (True, "nccl", ["done"]),
    ],
)
def test_a_process_group_of_gloo_is_closed_when_the_script_ends(begun: bool, backend: str, lines: list[str]) -> None:
    """End a script with a process group: gloo's is closed, nccl's is not."""
    assert printed(SCRIPT.format(begun=begun, backend=backend), COMMON) == lines


def test_a_script_without_torch_ends_as_it_does() -> None:
    """End a script without torch: only its own output."""
    assert printed("print('done')", COMMON) == ["done"]


def test_what_an_image_has_of_that_name_runs_too(tmp_path: Path) -> None:
    """Put another sitecustomize.py behind: it runs too."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    assert printed("print('done')", COMMON, tmp_path) == ["theirs", "done"]
