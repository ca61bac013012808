"""ssh-check: all pairs of a lab answer, and a pair that does not is named."""

from __future__ import annotations

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker


def test_every_pair_answers_with_its_time(lab: Lab) -> None:
    """ssh-check on two workers reaches all 6 pairs: launcher to workers by ssh, the others by TCP."""
    answer = lab.call("run", "ssh-check", "--json").expect(0)
    metrics = answer.json["metrics"]
    assert metrics["pairs"]["value"] == 6
    assert metrics["slowest"]["value"] > 0
    assert answer.json["ranks"] == [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]
    rows = {tuple(line.split()[:3]) for line in answer.err.splitlines() if line.endswith("  yes")}
    assert rows == {
        ("launcher", "worker-0", "ssh"),
        ("launcher", "worker-1", "ssh"),
        ("worker-0", "launcher", "tcp"),
        ("worker-0", "worker-1", "tcp"),
        ("worker-1", "launcher", "tcp"),
        ("worker-1", "worker-0", "tcp"),
    }
    assert lab.processes_of(answer.json["run_id"]) == []


def test_a_worker_that_cannot_be_reached_is_named_and_the_others_are_tried(lab: Lab) -> None:
    """worker-9 does not exist: `pairs: 6 of 12`, one failed line, code 1."""
    hostfile = "worker-0 slots=1\\nworker-1 slots=1\\nworker-9 slots=1\\n"
    script = f"cd workloads/ssh-check; LABCTL_HOSTFILE=<(printf '{hostfile}') python ssh_check.py; echo code $?"
    output = lab.inside("launcher", "bash", "-c", script)
    assert "pairs: 6 of 12" in output
    failed = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1
    assert failed[0].startswith("failed: launcher -> worker-9 by ssh: ")
    assert output.endswith("code 1\n")
