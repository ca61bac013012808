"""Load of hosts, from the kernel's counts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from labctl.system import load
from labctl.system.process import CompletedProcess

WHOLE = """\
times 100 50 0 0
tasks 8 5.12
times 130 95 5 20
tasks 6 5.28
cores 2
cpu 41.50
memory 0.00
MHz 2600.000
MHz 2000.000
kHz 1400000
"""


def times(busy: int) -> str:
    """Return what the script prints of two cores that are busy for so many of 100 ticks."""
    return f"times 0 0 0 0\ntimes {busy} {100 - busy} 0 0\ncores 2\n"


def on_hosts(answers: Mapping[str, str]) -> load.RunOnHosts:
    """Return a function that answers for these hosts."""

    def run(_: str, __: tuple[str, ...], ___: float) -> Any:
        """Return the answer of each host, and no failures."""
        return {host: CompletedProcess((), 0, out, "") for host, out in answers.items()}, {}

    return run


def test_the_script_reads_this_machine() -> None:
    """Run the script here for 0.1 s: cores, share from 0 to 1 and load average, nothing on stderr."""
    done = subprocess.run(["sh", "-c", load.SCRIPT, "sh", "0.1"], check=True, capture_output=True, text=True)
    read = load.read(done.stdout)
    assert read
    assert read.cores >= 1
    assert 0 <= read.share <= 1
    assert read.load_average is not None
    assert done.stderr == ""


def test_all_that_the_script_prints_is_read_and_what_the_hypervisor_takes_counts_as_used() -> None:
    """Read a full output: all fields, stolen time counts as used; its text and the line of a busy host."""
    read = load.read(WHOLE)
    assert read == load.Load(
        cores=2, used=1.0, runnable=6, load_average=5.28, cpu_pressure=0.415, memory_pressure=0.0, clock=2300.0
    )
    assert read.text() == "1 of 2 cores in use by other programs, 6 runnable tasks"
    assert load.busy_text("red0", read.text()) == f"red0 is busy: {read.text()}"
    assert load.busy_text("local", "so") == "this machine is busy: so"


def test_what_a_kernel_does_not_count_is_left_out() -> None:
    """Read an output without tasks and pressure: these are None."""
    read = load.read("times 100 50 0 0\ntimes 130 95 5 20\ncores 2\nkHz 1400000\n")
    assert read == load.Load(cores=2, used=1.0, clock=1400.0)
    assert read.text() == "1 of 2 cores in use by other programs"


@pytest.mark.parametrize(
    "output",
    [
        "",
        "times 1 2 3\ntimes 1 2 3\ncores 2\n",
        "times a b c d\ntimes 1 2 3 4\ncores 2\n",
        "times 1 2 3 4\ntimes 1 2 3 4\ncores 2\n",
        "times 1 2 3 4\ntimes nan 2 3 4\ncores 2\n",
        f"{times(10)}tasks many 0.1\n",
        f"times 0 0 0 0\ntimes 1 2 3 4\ncores {'9' * 5000}\n",
    ],
)
def test_what_is_no_count_is_not_read(output: str) -> None:
    """Read invalid output: None."""
    assert load.read(output) is None


def test_a_busy_host_is_noted_once_and_each_reading_kept() -> None:
    """Watch three hosts twice: one notice for the busy one, its highest use, every valid reading."""
    answers, notices = {"red0": times(30), "red1": times(0), "red2": "no such file"}, list[str]()
    watch = load.Watch(on_hosts(answers), notices.append)
    assert {host: found.share for host, found in watch.read("speed", "before").items()} == {"red0": 0.3, "red1": 0}
    answers["red0"] = times(80)
    watch.read("speed", "after")
    assert notices == ["red0 is busy: 0.6 of 2 cores in use by other programs"]
    assert {host: found.used for host, found in watch.busy.items()} == {"red0": 1.6}
    assert [(found.step, found.when, found.host) for found in watch.measured] == [
        ("speed", "before", "red0"),
        ("speed", "before", "red1"),
        ("speed", "after", "red0"),
        ("speed", "after", "red1"),
    ]
