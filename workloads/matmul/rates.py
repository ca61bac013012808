"""Summary of the ranks' figures, without torch: slow ranks, and the used share of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

PEAK = {
    "H100PCIE": {"bf16": 756, "fp16": 756, "fp32": 51},
    "H100NVL": {"bf16": 835.5, "fp16": 835.5, "fp32": 60},
    "H100": {"bf16": 989.4, "fp16": 989.4, "fp32": 67},
    "H200NVL": {"bf16": 835.5, "fp16": 835.5, "fp32": 60},
    "H200": {"bf16": 989.4, "fp16": 989.4, "fp32": 67},
    "A100": {"bf16": 312, "fp16": 312, "fp32": 19.5},
    "L40S": {"bf16": 362, "fp16": 362, "fp32": 91.6},
    "V100": {"fp16": 125, "fp32": 15.7},
    "GAUDI2": {"bf16": 432},
    "GAUDI3": {"bf16": 1835},
}
"""TFLOP/s by a word in the name of the device, from its maker's data sheet: without sparsity, fp32 without TF32."""


@dataclass(frozen=True)
class Report:
    """A rank's TFLOP/s while multiplying, and its seconds of multiplying, waiting, and CPU time."""

    rank: int
    node: str
    tflops: float
    busy: float
    waited: float
    cpu: float
    cores: float
    device: str


def tflops(size: int, products: int, seconds: float) -> float:
    """Return TFLOP/s of so many products of two n x n matrices, 2 n^3 operations each."""
    return 2 * size**3 * products / seconds / 1e12


def utilisation(report: Report, dtype: str) -> tuple[float, str] | None:
    """Return the used share of the device and a text of what; None if the device's peak is unknown.

    A CPU: processor time over time and cores, while multiplying. Anything else: TFLOP/s over the maker's peak.
    """
    if report.device == "cpu":
        return report.cpu / (report.busy * report.cores), f"of {report.cores:g} core{'s' * (report.cores != 1)}"
    name = report.device.upper().replace(" ", "")
    peak = next((known[dtype] for word, known in PEAK.items() if word in name and dtype in known), None)
    return (report.tflops / peak, f"of {peak:g} TFLOP/s") if peak else None


def slow(reports: Sequence[Report], below: float) -> list[tuple[Report, float]]:
    """Return the reports below this share of the (higher) median rate, each with its share."""
    middle = median_high(report.tflops for report in reports)
    return [(report, report.tflops / middle) for report in reports if report.tflops < below * middle]


def table(reports: Sequence[Report], dtype: str) -> list[str]:
    """Return the heading and a line for each rank: rate, share of the median, waited, utilisation."""
    middle = median_high(report.tflops for report in reports)
    width = max(len("node"), *(len(report.node) for report in reports))
    lines = [f"rank  {'node':<{width}}  {'TFLOP/s':>9}  of median  waited  utilisation"]
    for report in reports:
        used = utilisation(report, dtype)
        share = f"{used[0]:.0%} {used[1]}" if used else f"unknown: no peak of {report.device} in {dtype}"
        waited = report.waited / (report.busy + report.waited)
        lines.append(
            f"{report.rank:>4}  {report.node:<{width}}  {report.tflops:>9.4f}  {report.tflops / middle:>9.2f}"
            f"  {waited:>6.0%}  {share}"
        )
    return lines


def verdict(reports: Sequence[Report], below: float) -> str:
    """Return the line ``slow ranks: ...`` that names the slow ranks, or ``none``."""
    found = slow(reports, below)
    named = ", ".join(f"{report.rank} on {report.node} ({share:.2f} of the median)" for report, share in found)
    return f"slow ranks: {named or 'none'}"
