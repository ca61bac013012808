from __future__ import annotations

import pytest

from labctl.records import places
from unit.scripts.test_labnode import labnode


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (["step 1/9", "step 2/9", "saved"], "step 2/9"),
        (["step 1/9: 0.5 s", "time per step: 3.2 s"], "step 1/9"),
        (["Epoch: [3] Loss 2.0"], "epoch 3"),
        (["{'epoch': 0.0007112375533428165}"], "epoch 0.000711"),
        ([" iteration       12/      40 | consumed samples"], "iteration 12/40"),
        (["step 3/2.5"], "step 3"),
        (["step 1.2.3", "footstep 8", "time per step: 3.2"], ""),
        ([], ""),
    ],
)
def test_labctl_and_nodes_read_the_same_place_off_lines(lines: list[str], place: str) -> None:
    """Read the last step or epoch of lines: labctl and the node's program return the same text."""
    assert places.last(lines) == place
    parsed = labnode.STEP.findall("\n".join(lines).encode())
    assert (labnode.render_step(*parsed[-1]) if parsed else "") == place


@pytest.mark.parametrize(
    ("line", "step", "epoch"),
    [
        ("epoch 1/3 step 5/9", (5, 9), (1, 3)),
        ("step 5 of epoch 2", (5, None), (2, None)),
        ("step 0.5 epoch 0.25", None, None),
        ("step 0.5, step 7", (7, None), None),
        ("loss 2.1", None, None),
    ],
)
def test_a_line_names_a_step_and_an_epoch_in_whole_numbers(
    line: str, step: places.Count | None, epoch: places.Count | None
) -> None:
    """Read a line's step and epoch: number and total, None for fractions."""
    assert (places.step(line), places.epoch(line)) == (step, epoch)
