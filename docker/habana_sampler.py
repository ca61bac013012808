"""Sample Gaudis with hl-smi; only the first sample waits for it."""

from __future__ import annotations

import shutil
import subprocess

import sampler

# Seconds for the tool's first answer: it may have to load the driver.
TOOL_LIMIT = 15
# Source: docs.habana.ai, "System Management Interface Tool (hl-smi)".
PROPERTIES = {
    "utilisation (%)": "utilization.aip",
    "memory (MiB)": "memory.used",
    "temperature (°C)": "temperature.aip",
    "power (W)": "power.draw",
    "SoC clock (MHz)": "clocks.current.soc",
    "uncorrected ECC errors (count)": "ecc.errors.uncorrected.volatile.total",
    "power violations (as hl-smi has them)": "stats.violation.power",
    "thermal violations (as hl-smi has them)": "stats.violation.thermal",
}
TOOL = ("hl-smi", "-Q", ",".join(["index", *PROPERTIES.values()]), "-f", "csv,noheader,nounits")


def devices() -> sampler.Devices | None:
    """Return a function that reads all Gaudis, or None if hl-smi is not installed or takes more than 15 s.

    hl-smi may take longer than a second, and survives SIGKILL if it hangs in the driver, so only one runs at a time.
    """
    if not shutil.which(TOOL[0]):
        return None
    tool = start_tool()
    try:
        tool.wait(TOOL_LIMIT)
    except subprocess.TimeoutExpired:
        return None

    def read() -> list[tuple[object, sampler.Values]]:
        """Return index and values of each Gaudi from the finished hl-smi, and start the next; empty while it runs."""
        nonlocal tool
        if tool.poll() is None:
            return []
        printed, tool = tool.communicate()[0], start_tool()
        rows = [line.replace(" ", "").split(",") for line in printed.splitlines()]
        return [(index, values(cells)) for index, *cells in rows if len(cells) == len(PROPERTIES)]

    return read


def start_tool() -> subprocess.Popen[str]:
    """Start hl-smi, which prints a line of values per Gaudi, and return the process."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(TOOL, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True)


def values(cells: list[str]) -> sampler.Values:
    """Return column -> value of a Gaudi from hl-smi's cells; None for a cell that is no number."""
    # `strict` came with Python 3.10.
    return {name: sampler.number(cell) for name, cell in zip(PROPERTIES, cells)}  # noqa: B905
