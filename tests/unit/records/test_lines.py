"""Lines as launchers print them, with the mark of a rank behind their own prefix."""

from __future__ import annotations

import pytest

from labctl.records.lines import Line, line_of


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("worker-0: \x010\x02step 3", Line("worker-0: step 3", 7, 0, "step 3")),
        ("[default1]:\x013!\x02labctl: rank 3", Line("[default1]:labctl: rank 3", 7, 3, "labctl: rank 3", report=True)),
        ("[1,0]<stderr>:\x010\x02step <stderr> 3", Line("[1,0]:step <stderr> 3", 7, 0, "step <stderr> 3")),
        ("[0]<stdout>:\x010\x02step 3", Line("[0]<stdout>:step 3", 7, 0, "step 3")),
        ("[1,0]<stderr>:step 3", Line("[1,0]<stderr>:step 3", 7)),
        ("\x01x\x02step 3", Line("\x01x\x02step 3", 7)),
    ],
)
def test_the_mark_of_a_rank_and_the_stream_that_open_mpi_read_it_from_are_taken_out(printed: str, line: Line) -> None:
    """Parse lines of launchers: rank, text, report and mark are told apart."""
    assert line_of(printed, 7) == line
