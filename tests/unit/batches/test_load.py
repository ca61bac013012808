"""Cores of a host that others use, from the kernel's counts."""

from __future__ import annotations

import subprocess

import pytest

from labctl.batches import load


def test_the_script_reads_this_machine() -> None:
    done = subprocess.run(["sh", "-c", load.SCRIPT], check=True, capture_output=True, text=True)
    read = load.read(done.stdout)
    assert read
    assert read.cores >= 1
    assert 0 <= read.share <= 1


def test_what_the_hypervisor_takes_counts_as_used() -> None:
    read = load.read("100 50 0 0\n130 95 5 20\n2\n")
    assert read == load.Load(cores=2, used=1.0)
    assert read.text() == "1 of 2 cores in use by other programs"


@pytest.mark.parametrize("output", ["", "1 2 3\n1 2 3\n2\n", "a b c d\n1 2 3 4\n2\n", "1 2 3 4\n1 2 3 4\n2\n"])
def test_what_is_no_count_is_not_read(output: str) -> None:
    assert load.read(output) is None
