"""Health of this machine: no false word, metrics, a text for repair, and a check of the site's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker


def test_this_machine_gets_no_false_word(lab: Lab) -> None:
    """`health` exits with 0 without a remark, and twice: the second time compared with the first."""
    for _ in range(2):
        answer = lab.call("health", "--json", "--since", "1s").expect(0)
        (verdict,) = answer.json["hosts"]
        wrong = [each for each in verdict["conditions"] if each["level"] in ("bad", "remark")]
        # Other tests on this machine run out of memory on purpose.
        assert [each for each in wrong if each["check"] not in ("oom", "oom-killed")] == []
        assert verdict["level"] in ("ok", "remark")
    assert "worker-0: last good" in lab.call("status", "-v").expect(0).out


def test_metrics_and_a_text_for_repair_are_written(lab: Lab, tmp_path: Path) -> None:
    """--prometheus writes a file for node_exporter, --ticket prints the hardware."""
    lab.call("health", "--prometheus", str(tmp_path / "lab.prom")).expect(0)
    assert 'labctl_health_host{host="local"} ' in (tmp_path / "lab.prom").read_text()
    assert "processor: " in lab.call("health", "worker-0", "--ticket").expect(0).out


def test_an_own_check_stops_a_run_that_asks_for_it(lab: Lab) -> None:
    """A command of health.yml with exit code 2 is bad: with LAB_PREFLIGHT=on nothing begins, else it is no bar."""
    rules = lab.path / "health.yml"
    rules.write_text("own:\n  licence:\n    command: sh -c 'echo no licence server; exit 2'\n")
    try:
        refused = lab.call("run", "hello", "-s", "LAB_PREFLIGHT=on").expect(3)
        assert "no licence server" in refused.err
        lab.call("run", "hello").expect(0)
    finally:
        rules.unlink()
