"""A host with many nodes whose sshd allows few sessions and few concurrent logins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.rack.rack import RackLab

pytestmark = [pytest.mark.docker, pytest.mark.slow]

LIMITS = {"MaxSessions": 10, "MaxStartups": "10:30:100"}


@pytest.mark.parametrize(
    ("nodes", "more"),
    [(30, {}), (12, {"AllowStreamLocalForwarding": "no"})],
    ids=["over a forwarded socket", "where sshd forbids that"],
)
def test_up_brings_many_nodes_up_on_one_host(
    rack_lab: Callable[..., RackLab], nodes: int, more: dict[str, str]
) -> None:
    """With MaxSessions 10, `up` starts 30 workers on a host (12 without forwarding); `down` removes them."""
    lab = rack_lab(1, LAB_NODES=str(nodes), LAB_SHM_SIZE="16m")
    (host,) = lab.hosts
    host.sshd(**LIMITS, **more)
    lab.call("up", limit=600).expect(0)
    assert sorted(lab.containers()) == sorted(["launcher", *(f"worker-{number}" for number in range(nodes))])
    assert lab.call("exec", "-n", f"worker-{nodes - 1}", "--", "hostname").expect(0).out == f"worker-{nodes - 1}\n"
    lab.call("down", limit=300).expect(0)
    assert lab.labelled() == []
