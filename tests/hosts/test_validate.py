"""A validation over several hosts, one of which has a trouble: it is named, the others are checked, nothing is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.rack.rack import Rack, RackLab

pytestmark = pytest.mark.docker

PROFILE = """\
description: hosts with a trouble
hooks:
  - name: firmware
    command: touch /tmp/$L3_ENABLED
    check: test -e /tmp/true && test "$(hostname)" != h2
checks:
  - {workload: hello, nodes: each}
"""


def test_bad_hosts_are_named_and_nothing_is_left(rack: Rack, rack_lab: Callable[[int], RackLab]) -> None:
    lab = rack_lab(3)
    (lab.path / "mine.yml").write_text(PROFILE)
    *_, last = rack.hosts(3)
    last.stop_engine()
    answer = lab.call("validate", "--profile", str(lab.path / "mine.yml"), "--json", environ={"L3_ENABLED": "true"})
    found = answer.expect(5).json["validation"]
    verdicts = {one["node"]: (one["host"], one["verdict"]) for one in found["nodes"]}
    assert verdicts == {
        "worker-0": ("h1", "good"),
        "worker-1": ("h2", "failing"),
        "worker-2": ("h3", "not reached"),
    }
    steps = {one["name"]: one for one in found["steps"]}
    assert steps["firmware"]["message"].startswith("1 of 3 hosts: h2: check failed with exit code 1")
    assert (steps["up"]["status"], steps["hello"]["status"]) == ("failed", "passed")
    assert "h3" in steps["clean-up"]["message"]
    last.cure()
    assert [container for host in lab.hosts for container in host.engine.containers.list(all=True)] == []
