"""A lab carried in one file to hosts without Internet access."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rack.host import Host
from support.rack.rack import Rack, RackLab

from docker import DockerClient

pytestmark = pytest.mark.docker

LIMIT = 900
ALONE = """
for table in "$@"; do iptables --wait --append OUTPUT --destination "$table" --jump ACCEPT; done
iptables --wait --append OUTPUT --jump REJECT
"""


def set_apart(host: Host, network: str) -> None:
    """Reject the host's packets to all but itself and its own network; assert that `docker pull` fails."""
    host.shell(ALONE, "127.0.0.0/8", network)
    assert "registry-1.docker.io" in host.shell("timeout 20 docker pull --quiet debian 2>&1 || :")


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("small_image", ("hello", "--launcher", "mpirun")),
        pytest.param("image", ("opt-tiny", "--set", "steps=40"), marks=pytest.mark.slow),
    ],
)
def test_a_lab_comes_up_and_runs_where_no_registry_is(
    rack: Rack,
    engine: DockerClient,
    family: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    given: str,
    flags: tuple[str, ...],
) -> None:
    """`bundle save` and `load` bring a lab with its image to two hosts without Internet; up, run, down."""
    image = request.getfixturevalue(given)
    hosts = rack.make("a", "b")
    for host in hosts:
        set_apart(host, rack.network.attrs["IPAM"]["Config"][0]["Subnet"])
    origin = rack.lab(tmp_path / "origin", f"{family}-bundled", hosts, {"LAB_IMAGE": image})
    file = tmp_path / "lab.bundle"
    origin.call("bundle", "save", str(file), limit=LIMIT).expect(0)
    lab = RackLab(tmp_path / "site", origin.name, origin.engine, origin.environ, hosts=hosts)
    origin.call("bundle", "load", str(file), str(lab.path), limit=LIMIT).expect(0)
    file.unlink()
    mine = engine.images.get(image).id
    assert [host.engine.images.get(image).id for host in hosts] == [mine, mine]
    lab.call("up", limit=LIMIT).expect(0)
    result = lab.call("run", *flags, "--json", limit=LIMIT).expect(0)
    assert result.json["verdict"] == "PASS"
    assert {rank["node"] for rank in result.json["ranks"]} == {"worker-0", "worker-1"}
    lab.call("down").expect(0)
    assert lab.labelled() == []
