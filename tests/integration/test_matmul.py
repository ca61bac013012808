"""matmul: a rate for each rank, and the slow rank is named."""

from __future__ import annotations

import re

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker


def test_the_slow_rank_is_named_and_fails_the_run_where_none_is_expected(lab: Lab) -> None:
    """Rank 1 is slowed down tenfold: exit code 5, `slow` is 1, the log names worker-1."""
    aid = ("--set", "slow-rank=1", "--set", "slow-factor=10")
    argv = ("--launcher", "mpirun", "--rehearse", "--json", "--expect", "slow<=0", *aid)
    result = lab.call("run", "matmul", *argv).expect(5).json
    assert result["cause"] == "criteria"
    metrics = result["metrics"]
    text = (lab.path / "runs" / result["run_id"] / "ranks/rank-0.log").read_text()
    rates = [float(rate) for rate in re.findall(r"^ +\d  worker-\d +([\d.]+) ", text, re.MULTILINE)]
    assert len(rates) == 2
    assert metrics["tflops"]["value"] == pytest.approx(min(rates), abs=1e-4)
    assert metrics["slow"]["value"] == 1
    named = re.search(r"slow ranks: 1 on worker-1 \(([\d.]+) of the median\)", text)
    assert named
    assert float(named[1]) == pytest.approx(rates[1] / rates[0], abs=0.02)
