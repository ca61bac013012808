"""Earlier runs that may have left processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import records

from labctl.records import left


@pytest.mark.parametrize(
    ("cause", "reasons"),
    [
        ("node-lost", {"20260102-150405-b": "it lost a node"}),
        ("stalled", {"20260102-150405-b": "it stalled"}),
        ("criteria", {}),
    ],
)
def test_the_last_run_is_ended_if_it_may_have_left_processes(
    tmp_path: Path, cause: str, reasons: dict[str, str]
) -> None:
    """Record two ended runs: the last one is returned if its cause may leave processes, with the reason."""
    records.write(tmp_path, "20260101-150405-a", verdict="FAIL", cause="node-lost")
    records.write(tmp_path, "20260102-150405-b", verdict="FAIL", cause=cause)
    assert left.unfinished(tmp_path, {}, ()) == reasons


def test_a_stalled_run_whose_ranks_were_looked_at_has_left_none(tmp_path: Path) -> None:
    """Record a stalled run with a look at its ranks: nothing is returned."""
    hang = {"kind": "all-outside", "sentence": "no rank waits for another: rank 0 is at train.py:3"}
    records.write(tmp_path, "20260101-150405-a", verdict="ERROR", cause="stalled", hang=hang)
    assert left.unfinished(tmp_path, {}, ()) == {}
