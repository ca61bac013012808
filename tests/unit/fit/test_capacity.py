"""Tests of verdicts that depend on what is unknown."""

from __future__ import annotations

from typing import Any

from labctl import fit
from labctl.fit import Capacity
from labctl.fit.capacity import unknown
from labctl.fit.training import Training
from unit.fit.test_fit import GIB, OPT_350M, training


def small(**changes: Any) -> Training:
    """Return a training that takes 9 GiB of a device, and 1.2 GiB of the host while it is built."""
    return training(model=OPT_350M, ranks=1, slots=1, stage=2, micro_batch=8, **changes)


def test_a_host_that_is_not_known_decides_nothing_for_a_small_need() -> None:
    """Judge a small training with an unknown host: it fits, nothing is unknown."""
    capacity = Capacity(device=24 * GIB, host=None)
    assert GIB < fit.needs(small()).host < 2 * GIB
    assert (fit.fits(small(), capacity), unknown(small(), capacity)) == (True, ())


def test_a_known_host_decides_however_small_the_need() -> None:
    """Judge a small training with a known host: it fits 64 GiB and not 1 GiB."""
    assert fit.fits(small(), Capacity(device=24 * GIB, host=64 * GIB)) is True
    assert fit.fits(small(), Capacity(device=24 * GIB, host=GIB)) is False


def test_a_host_that_is_not_known_decides_if_more_is_needed_than_its_devices_have() -> None:
    """Judge an offloaded training with an unknown host: no verdict, "host" is unknown."""
    capacity = Capacity(device=24 * GIB, host=None)
    offloaded = training(ranks=1, slots=1, stage=3, offload_optimizer=True, offload_parameters=True)
    assert (fit.fits(offloaded, capacity), unknown(offloaded, capacity)) == (None, ("host",))


def test_a_device_that_is_not_known_decides_and_the_small_need_of_its_host_does_not() -> None:
    """Judge a small training with nothing known: only "device" is unknown."""
    assert unknown(small(), Capacity(device=None, host=None)) == ("device",)


def test_on_a_cpu_a_node_that_is_not_known_decides() -> None:
    """Judge a CPU training with nothing known: "host" is unknown."""
    assert unknown(small(accelerator="cpu"), Capacity(device=None, host=None)) == ("host",)


def test_nothing_is_unknown_about_what_does_not_fit_anyway() -> None:
    """Report a training that does not fit its device: False, and nothing is unknown."""
    report = fit.report("opt", 1, training(ranks=1, slots=1), Capacity(device=24 * GIB, host=None))
    assert (report.fits, report.unknown) == (False, ())
