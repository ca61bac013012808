"""Resources that grow with a lab, and the warnings for hosts that do not allow them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import yaml
from msgspec.structs import replace
from support import builders

from labctl.backends.docker.compose import render
from labctl.backends.docker.engine import Capabilities
from labctl.backends.docker.lab import capabilities
from labctl.errors import HostError
from labctl.model import HERE, Lab


class Allowing:
    """A daemon that grants containers a number of open files, and counts the requests for it."""

    def __init__(self, files: int) -> None:
        """Grant this number of open files."""
        self.files, self.asked = files, 0

    def identity(self) -> str:
        return "d"

    def most_files(self, lab: str, image: str) -> int:  # noqa: ARG002
        """Count the request; return the number of open files."""
        self.asked += 1
        return self.files


def refused(ranks: int, directory: Path, *names: str) -> Lab:
    """Return a lab of two nodes with ``ranks`` ranks in total, on hosts ``names``, without a limit of open files."""
    hosts = tuple(builders.host(name=name) for name in names or (HERE,))
    nodes = tuple(builders.node(number, slots=ranks // 2) for number in range(2))
    base = builders.lab(nodes, hosts=hosts, directory=directory)
    return replace(base, limits=replace(base.limits, nofile=None))


def with_limits(lab: Lab, *daemons: Allowing) -> Lab:
    """Ask each host's daemon for its limit of open files; return the lab with the limits."""
    for host, daemon in zip(lab.hosts, daemons, strict=True):
        capabilities.ask_files(lab, host.name, cast(Capabilities, daemon))
    return capabilities.with_files(lab)


@pytest.mark.parametrize(
    ("nodes", "cores", "seconds"), [(1, 1, 15), (8, 2, 15), (9, 2, 30), (64, 2, 120), (64, 64, 15)]
)
def test_nodes_that_share_few_cores_are_checked_less_often(nodes: int, cores: int, seconds: int) -> None:
    """The health check's interval grows with nodes per core of the host, at least 15 s."""
    lab = builders.lab(nodes, hosts=(builders.host(cpus=tuple(range(cores))),))
    assert render.check_interval(lab, lab.hosts[0]) == seconds
    service = yaml.safe_load(render.render(lab)[0].content)["services"]["worker-0"]
    assert service["healthcheck"]["interval"] == f"{seconds}s"


def test_the_only_node_of_its_host_is_checked_as_ever() -> None:
    """64 hosts with a node each: interval 15 s, and 65 neighbours needed."""
    names = [f"host-{number}" for number in range(64)]
    hosts = tuple(builders.host(name=name, address="10.0.0.1", cpus=(0, 1)) for name in names)
    nodes = tuple(builders.node(number, host=name) for number, name in enumerate(names))
    lab = builders.lab(nodes, hosts=hosts, network="host")
    assert render.check_interval(lab, lab.hosts[0]) == 15
    assert render.neighbours_needed(lab) == 65


def test_thirty_two_nodes_of_eight_are_the_most_for_which_nobody_is_asked(tmp_path: Path) -> None:
    """240 ranks ask no daemon for its limit; 512 do, once, and both labs then have 4096."""
    few, many = refused(240, tmp_path), refused(512, tmp_path)
    daemon = Allowing(4096)
    assert not capabilities.lacks_files(few)
    assert capabilities.lacks_files(many)
    # Nothing is known of a daemon that was never asked.
    assert capabilities.with_files(many).limits.nofile is None
    assert [with_limits(many, daemon).limits.nofile, with_limits(many, daemon).limits.nofile] == [4096, 4096]
    assert daemon.asked == 1


def test_the_host_that_allows_least_decides(tmp_path: Path) -> None:
    """Of limits 4096 and 2048 on two hosts, the lab gets 2048."""
    lab = refused(512, tmp_path, "a", "b")
    assert with_limits(lab, Allowing(4096), Allowing(2048)).limits.nofile == 2048


def test_ranks_that_run_out_of_files_are_refused_with_the_numbers(tmp_path: Path) -> None:
    """512 ranks with 1024 files raise HostError with both numbers; with 2112 they pass."""
    lab = refused(512, tmp_path)
    capabilities.require_files(with_limits(lab, Allowing(2112)))
    with pytest.raises(HostError, match=r"512 ranks take 2112 open files .* may have 1024") as caught:
        capabilities.require_files(with_limits(replace(lab, directory=tmp_path / "b"), Allowing(1024)))
    assert "LAB_NOFILE" in caught.value.hint


@pytest.mark.parametrize(("table", "expected"), [("1024\n", (1024, 4160)), ("4160\n", None), ("", None)])
def test_nodes_on_one_machine_need_room_in_its_table_of_neighbours(
    tmp_path: Path, table: str, expected: tuple[int, int] | None
) -> None:
    """neighbours_lacking() is (has, needs) if gc_thresh3 is less than 64 nodes need, else None."""
    file = tmp_path / capabilities.NEIGHBOURS
    file.parent.mkdir(parents=True)
    file.write_text(table)
    assert capabilities.neighbours_lacking(builders.lab(64), tmp_path) == expected


def test_where_the_kernel_shows_no_table_nothing_is_said_of_it(tmp_path: Path) -> None:
    """Without a gc_thresh3 file neighbours_lacking() is None."""
    assert capabilities.neighbours_lacking(builders.lab(64), tmp_path) is None


def test_every_node_of_many_hosts_knows_all_of_them_by_address() -> None:
    """Each compose file of three hosts lists all workers' addresses as extra hosts."""
    hosts = tuple(builders.host(name=f"host-{number}", address=f"10.0.0.{number}") for number in range(3))
    nodes = tuple(builders.node(number, host=f"host-{number}") for number in range(3))
    files = [file for file in render.render(builders.lab(nodes, hosts=hosts, network="host")) if "compose" in file.path]
    for file in files:
        names = re.findall(r'- "(worker-\d:.*)"', file.content)
        assert names[:3] == ["worker-0:10.0.0.0", "worker-1:10.0.0.1", "worker-2:10.0.0.2"]
