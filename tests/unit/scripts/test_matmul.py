"""The matmul workload without torch: rates, slow ranks, and the used share of a device."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.scripts.conftest import ImportScripts

FOLDER = Path(__file__).resolve().parents[3] / "workloads/matmul"


@pytest.fixture(scope="module")
def rates(import_scripts: ImportScripts) -> ModuleType:
    """Return the module rates of workload matmul."""
    module: ModuleType = import_scripts("matmul", "rates").rates
    return module


def reports(rates: ModuleType, *tflops: float, **changes: Any) -> list[Any]:
    """Return a Report of each rate, a node each; ``changes`` replace fields."""
    fields = {"busy": 8.0, "waited": 2.0, "cpu": 4.0, "cores": 1.0, "device": "cpu", **changes}
    return [rates.Report(rank=rank, node=f"worker-{rank}", tflops=rate, **fields) for rank, rate in enumerate(tflops)]


def test_a_product_takes_two_n_cubed_operations(rates: ModuleType) -> None:
    """Compute the rate of 1000 x 1000 products: 2 n^3 operations each."""
    assert rates.tflops(1000, 10, 0.02) == pytest.approx(1.0)


def test_a_rank_below_the_share_of_the_median_is_slow(rates: ModuleType) -> None:
    """Judge five ranks by a share of the median: the slow one is named, or none."""
    made = reports(rates, 10, 10, 6.2, 8.1, 11)
    assert rates.verdict(made, 0.8) == "slow ranks: 2 on worker-2 (0.62 of the median)"
    assert rates.verdict(made, 0.6) == "slow ranks: none"


def test_of_two_ranks_the_slower_one_is_compared_with_the_faster(rates: ModuleType) -> None:
    """Judge two ranks: the slower is compared with the faster."""
    assert [report.rank for report, _ in rates.slow(reports(rates, 7, 10), 0.8)] == [0]


def test_one_rank_alone_is_not_slow(rates: ModuleType) -> None:
    """Judge one rank: none is slow."""
    assert rates.verdict(reports(rates, 1), 0.8) == "slow ranks: none"


def test_a_cpus_utilisation_is_processor_time_over_time_and_cores(rates: ModuleType) -> None:
    """Compute a CPU's utilisation: processor time over time and cores."""
    assert rates.utilisation(reports(rates, 1, cpu=12.0, cores=2.0)[0], "fp32") == (0.75, "of 2 cores")


@pytest.mark.parametrize(
    ("device", "dtype", "share"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 494.5 / 989.4),
        ("NVIDIA H100 PCIe", "bf16", 494.5 / 756),
        ("NVIDIA A100-SXM4-80GB", "fp16", 494.5 / 312),
        ("GAUDI2", "bf16", 494.5 / 432),
    ],
)
def test_any_other_devices_utilisation_is_over_its_makers_peak(
    rates: ModuleType, device: str, dtype: str, share: float
) -> None:
    """Compute a device's utilisation: its rate over its maker's peak."""
    assert rates.utilisation(reports(rates, 494.5, device=device)[0], dtype)[0] == pytest.approx(share)


@pytest.mark.parametrize(("device", "dtype"), [("Some GPU", "bf16"), ("Tesla V100-SXM2-16GB", "bf16")])
def test_an_unknown_peak_is_said_and_not_guessed(rates: ModuleType, device: str, dtype: str) -> None:
    """Compute an unknown device's utilisation: None, and the table says which peak is unknown."""
    made = reports(rates, 1, device=device)
    assert rates.utilisation(made[0], dtype) is None
    assert f"unknown: no peak of {device} in {dtype}" in rates.table(made, dtype)[1]


def test_the_table_has_a_line_for_every_rank(rates: ModuleType) -> None:
    """Format a table: a line for each rank."""
    heading, *lines = rates.table(reports(rates, 2, 1), "fp32")
    assert heading.split()[:3] == ["rank", "node", "TFLOP/s"]
    assert [line.split() for line in lines] == [
        ["0", "worker-0", "2.0000", "1.00", "20%", "50%", "of", "1", "core"],
        ["1", "worker-1", "1.0000", "0.50", "20%", "50%", "of", "1", "core"],
    ]
