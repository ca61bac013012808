from __future__ import annotations

from pathlib import Path

import pytest

from labctl.records import samples
from labctl.records.samples import NodeSamples, Reading

HEAD = "seconds (s),cpu (%),memory (MiB),device 0 utilisation (%),device 10 utilisation (%)"


def test_the_last_row_is_read_by_its_head() -> None:
    """Parse a samples file: values and devices of the last row, with units of the head."""
    parsed = samples.parse("worker-0", f"{HEAD}\n12.5,95.0,1024,97,98\n")
    assert parsed == NodeSamples(
        node="worker-0",
        seconds=12.5,
        values={"cpu": Reading(95.0, "%"), "memory": Reading(1024.0, "MiB")},
        devices={"0": {"utilisation": Reading(97.0, "%")}, "10": {"utilisation": Reading(98.0, "%")}},
    )


def test_a_sample_that_was_lost_is_left_out() -> None:
    """Parse a row with empty and invalid cells: they are left out."""
    parsed = samples.parse("worker-0", f"{HEAD}\n12.5,,nan,n/a,98\n")
    assert (dict(parsed.values), [*parsed.devices]) == ({}, ["10"])


@pytest.mark.parametrize(
    "text",
    ["", f"{HEAD}\n", f"{HEAD}\n{HEAD}\n", f"{HEAD}\n12.5,9", "Rank,Epoch\n1,2\n", "head: cannot open\n"],
    ids=["nothing", "no row", "a head as row", "half a row", "another table", "no file"],
)
def test_what_is_no_whole_row_is_nothing(text: str) -> None:
    """Parse text without a complete row: no values."""
    parsed = samples.parse("worker-0", text)
    assert (parsed.values, parsed.devices) == ({}, {})


def test_a_file_here_is_read_from_its_end(tmp_path: Path) -> None:
    """The header and the last rows come, whatever is before; a row that is being written is left out by the parser."""
    rows = "".join(f"{second}.000,{second % 7}.5\n" for second in range(50_000))
    (tmp_path / "worker-0.csv").write_text(f"seconds (s),CPU (cores)\n{rows}50000.0")
    table = samples.read_last(tmp_path / "worker-0.csv")
    assert len(table.splitlines()) == samples.RECENT + 1
    assert samples.parse("worker-0", table).seconds == 49_999
    assert samples.read_last(tmp_path / "worker-1.csv") == ""
