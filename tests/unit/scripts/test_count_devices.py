"""Count of a node's devices, with stand-ins for the frameworks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "docker/count_devices.py"


@pytest.mark.parametrize(
    ("framework", "counted"),
    [
        ({"torch/__init__.py": "", "torch/zeta.py": "device_count = lambda: 3"}, "torch 3"),
        (
            {"tensorflow.py": "class config:\n list_physical_devices = lambda kind: {'ZETA': 'ab'}[kind]"},
            "tensorflow 2",
        ),
    ],
)
def test_the_framework_of_the_image_counts(tmp_path: Path, framework: dict[str, str], counted: str) -> None:
    """Write a stand-in for torch or tensorflow: the program prints its name and count, exit code 0."""
    for name, text in framework.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = count(tmp_path)
    assert (done.stdout.strip(), done.returncode) == (counted, 0)


def test_an_image_without_a_framework_says_which_it_misses(tmp_path: Path) -> None:
    """Run without a framework: exit code 1, ModuleNotFoundError for torch."""
    done = count(tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch'"


def count(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the counting program as in a node, with stand-ins for frameworks from a folder; return its end."""
    argv = [sys.executable, "-S", "-c", SOURCE.read_text(), "torch.zeta", "ZETA"]
    return subprocess.run(argv, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
