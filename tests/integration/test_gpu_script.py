"""The script for a machine with a GPU, in a toy size without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docker import DockerClient

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("copy-bandwidth", "allreduce", "opt-125m")
"""Workloads: one per launcher, and one training."""


def test_every_part_that_needs_no_gpu_leaves_its_figures(engine: DockerClient, image: str, tmp_path: Path) -> None:
    """tests/gpu/measure.sh --toy in the image, without network, writes figures of three workloads."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    out.mkdir()
    # labctl's own packages; the image's Python has the others.
    made = subprocess.run(
        ["bash", str(ROOT / "tests/gpu/wheels.sh"), str(wheels), "3.11", "labctl"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    engine.containers.run(
        image,
        ["/repo/tests/gpu/measure.sh", "--wheels", "/wheels", "--out", "/out", "--toy", *PARTS],
        entrypoint="bash",
        network_mode="none",
        volumes={
            str(ROOT): {"bind": "/repo", "mode": "ro"},
            str(wheels): {"bind": "/wheels", "mode": "ro"},
            str(out): {"bind": "/out", "mode": "rw"},
        },
        remove=True,
    )
    rows = json.loads((out / "figures.json").read_text())
    assert [(row["part"], row["code"]) for row in rows] == [(part, 0) for part in PARTS]
    figures = {row["part"]: row["figures"] for row in rows}
    assert figures["copy-bandwidth"]["host-to-device"] > 0
    assert figures["allreduce"]["wrong"] == 0
    assert figures["opt-125m"]["throughput"] > 0
    assert "| opt-125m | loss " in (out / "table.md").read_text()
