"""The node that others wait for, from the shares of time in collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.records import samples
from labctl.records.straggler import apart, read, sentence, straggler

MINUTE = 60


def shares(**means: float) -> dict[str, list[float]]:
    """Build a minute of shares per node, half of the samples 0.05 above the mean and half below."""
    return {node.replace("_", "-"): [mean + 0.05, mean - 0.05] * (MINUTE // 2) for node, mean in means.items()}


def test_the_node_that_waits_least_is_named_with_the_time_of_each_step() -> None:
    """Give one of four nodes 4 %, the others 45 % and more: it is named, 0.41 of a step of 0.5 s behind."""
    late = straggler(shares(worker_0=0.5, worker_1=0.06, worker_2=0.47, worker_3=0.49), 0.5)
    assert late
    assert (late.node, late.share, late.others, late.behind) == ("worker-1", 0.06, 0.47, 0.205)
    assert sentence(late) == (
        "worker-1 arrives last, the others wait for it: they are in collectives 47 % of the time, it is 6 %; "
        "0.2 s of each step"
    )


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(shares(worker_0=0.3, worker_1=0.25), id="about the same"),
        pytest.param(shares(worker_0=0.95, worker_1=0.98), id="in collectives all the time"),
        pytest.param(shares(worker_0=0.4, worker_1=0.1, worker_2=0.12, worker_3=0.11), id="one fast, others alike"),
        pytest.param({"worker-0": [0.0] * 60 + [0.3] * 120, "worker-1": [0.95] * 60 + [0.3] * 120}, id="data first"),
        pytest.param(shares(worker_0=0.3), id="a single node"),
        pytest.param({}, id="no samples"),
        pytest.param({"worker-0": [0.9] * 10, "worker-1": [0.1] * 10}, id="ten seconds"),
        pytest.param({"worker-0": [0.6] * 20, "worker-1": [0.35] * 20}, id="too few samples for that difference"),
    ],
)
def test_no_node_is_named(given: dict[str, list[float]]) -> None:
    """Give shares that accuse no node: none is named."""
    assert straggler(given, 0.5) is None


def test_a_run_is_read_from_the_samples_of_its_nodes(tmp_path: Path) -> None:
    """Write tables with empty cells and half a last row: the node with less is named, without steps no time of them."""
    folder = tmp_path / "samples"
    folder.mkdir()
    for node, share in (("worker-0", "0.7"), ("worker-1", "0.02")):
        rows = [f"{second},0,1.0,{share if second > 9 else ''}" for second in range(90)]
        head = f"seconds (s),lost samples (count),CPU (cores),{samples.IN_COLLECTIVES}"
        (folder / f"{node}.csv").write_text("\n".join([head, *rows, "90,0"]))
    late = straggler(read(tmp_path, ("worker-0", "worker-1")), None)
    assert late
    assert (late.node, late.share, late.others, late.behind) == ("worker-1", 0.02, 0.7, None)


def test_a_run_without_samples_has_no_straggler(tmp_path: Path) -> None:
    """Read a run without a folder of samples: None."""
    assert straggler(read(tmp_path, ("worker-0", "worker-1")), 0.1) is None


@pytest.mark.parametrize(
    ("rows", "share", "expected"),
    [(40, "", True), (40, "0.1", False), (8, "", False)],
    ids=["apart", "joined", "short"],
)
def test_ranks_that_were_never_in_a_process_group_are_apart(
    tmp_path: Path, rows: int, share: str, expected: bool
) -> None:
    """Write samples of two nodes without, or with one, share in collectives: apart only without, in 15 s and more."""
    (tmp_path / "samples").mkdir()
    for node in ("worker-0", "worker-1"):
        lines = [f"seconds (s),{samples.IN_COLLECTIVES}", *(f"{second},{share}" for second in range(rows))]
        (tmp_path / f"samples/{node}.csv").write_text("\n".join(lines) + "\n")
    assert apart(read(tmp_path, ("worker-0", "worker-1"))) is expected
    assert apart(read(tmp_path, ("worker-0",))) is False
