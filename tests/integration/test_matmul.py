"""matmul: a rate for every rank, and the slow one is named."""

from __future__ import annotations

import re

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker


def test_the_slow_rank_is_named_and_fails_the_run_where_none_is_expected(lab: Lab) -> None:
    aid = ("--set", "slow-rank=1", "--set", "slow-factor=10")
    answer = lab.call("run", "matmul", "--rehearse", "--json", "--expect", "slow<=0", *aid).expect(5)
    assert answer.json["cause"] == "criteria"
    metrics = answer.json["metrics"]
    rates = [float(rate) for rate in re.findall(r"worker-0: +\d  worker-\d +([\d.]+) ", answer.err)]
    assert len(rates) == 2
    assert metrics["tflops"]["value"] == pytest.approx(min(rates), abs=1e-4)
    assert metrics["slow"]["value"] == 1
    named = re.search(r"slow ranks: 1 on worker-1 \(([\d.]+) of the median\)", answer.err)
    assert named
    assert float(named[1]) == pytest.approx(rates[1] / rates[0], abs=0.02)
