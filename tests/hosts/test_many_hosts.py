"""A lab from creation to removal over several hosts, each with Docker and sshd only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import Answer
from support.rack.host import Host
from support.rack.rack import Rack, RackLab

pytestmark = pytest.mark.docker

LISTED = 'cd "$1" && find . -printf "%m %p %l\\n" | sort'
PLAIN = r"\.ssh|\.bash.*|\.profile|\.cache"
"""Files of a home directory before any lab, and the user's own cache, which outlives labs."""
RUN = "/workspace/outputs/20260102-150405-hello-3fa2"
NEW = 'find "$1" /tmp -mindepth 1 -maxdepth 1'


def leftovers(host: Host) -> list[str]:
    """List the containers, networks, volumes and files of the user or /tmp that are new on a host."""
    containers = [container.name or "" for container in host.engine.containers.list(all=True)]
    networks = [
        network.name or "" for network in host.engine.networks.list() if network.name not in ("bridge", "host", "none")
    ]
    volumes = [volume.name for volume in host.engine.volumes.list()]
    files = [
        path for path in host.shell(NEW, host.home).splitlines() if not re.fullmatch(PLAIN, path.rpartition("/")[2])
    ]
    return [*containers, *networks, *volumes, *files]


def modes(host: Host, lab: RackLab) -> dict[str, int]:
    """Return path -> mode of each file and folder below the lab's directory on a host, without links."""
    lines = host.shell(LISTED, f"{host.home}/.labctl/{lab.name}.{host.name}").splitlines()
    return {path: int(mode, 8) for mode, path, *target in (line.split(" ", 2) for line in lines) if not any(target)}


def passed(lab: RackLab, answer: Answer, ranks: int) -> dict[str, Any]:
    """Assert that a run passed with so many ranks, whose logs are in its record; return its result."""
    result: dict[str, Any] = answer.expect(0).json
    assert (result["verdict"], result["world_size"]) == ("PASS", ranks)
    record = lab.path / "runs" / result["run_id"]
    for rank in result["ranks"]:
        assert f"rank {rank['rank']} of {ranks} on {rank['node']}" in rank_log(record, rank["rank"])
    return result


def rank_log(record: Path, rank: int) -> str:
    """Return the text of a rank's log."""
    return (record / f"ranks/rank-{rank}.log").read_text()


@pytest.fixture(scope="module")
def lab(shared_rack: Rack, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RackLab]:
    """Yield a lab over two hosts; tests bring it up themselves."""
    yield shared_rack.lab(tmp_path_factory.mktemp("lab"), f"{family}-many", shared_rack.hosts(2), {})
    shared_rack.clear()


def test_up_sends_to_the_host_that_lacks_files_and_renews_only_what_mounted_them(lab: RackLab) -> None:
    """Files are gone on both hosts: dry run and `up` push them and recreate worker-1 alone."""
    lab.call("up").expect(0)
    before = lab.identities()
    first, second = (f"{host.home}/.labctl/{lab.name}.{host.name}" for host in lab.hosts)
    lab.hosts[0].shell('rm "$1/workloads/.current"', first)
    lab.hosts[1].shell('rm -r "$1"', second)

    assert lab.call("up", "--dry-run", "--json").expect(0).json["plan"][:-1] == [
        "#1 push files of worker-0 to h1  [files missing on host]",
        "#2 remove worker-1 on h2  [cannot be used: its files are gone]",
        "#3 push files of worker-1 to h2  [files missing on host]",
        f"#4 compose up worker-1 (project labctl-{lab.name}) on h2  [worker-1 missing]",
        "#5 write .lab/applied.json  [containers changed]",
    ]
    assert lab.hosts[0].shell('ls -A "$1/workloads"', first).count(".current") == 0
    assert lab.hosts[1].shell('[ -e "$1" ] || echo gone', second) == "gone\n"
    lab.call("up").expect(0)
    after = lab.identities()
    assert {node for node in before if after[node] != before[node]} == {"worker-1"}
    passed(lab, lab.call("run", "hello-mpi", "--json"), 2)
    for host, path in zip(lab.hosts, (first, second), strict=True):
        assert host.shell('cd "$1/runs" && find . -mindepth 1 | sort', path) == "./.outputs\n./notebooks\n"


def test_a_host_gets_the_keys_of_its_own_nodes_and_gives_all_back(lab: RackLab) -> None:
    """Each host has its own nodes' keys only; `down` fetches runs, and keeps a run it cannot fetch."""
    lab.call("up").expect(0)
    modes_by_host = {host.name: modes(host, lab) for host in lab.hosts}
    names = {name: [path.rpartition("/")[2] for path in paths] for name, paths in modes_by_host.items()}
    private = {
        name: sorted(path for path in paths if path.endswith("ed25519_key") or path.startswith("id_"))
        for name, paths in names.items()
    }
    assert private == {"h1": ["id_ed25519", "ssh_host_ed25519_key"], "h2": ["ssh_host_ed25519_key"]}
    for name, other in (("h1", "worker-1"), ("h2", "worker-0")):
        assert not [path for path in modes_by_host[name] if f"nodes/{other}" in path]
        assert not [path for path, mode in modes_by_host[name].items() if "/nodes/" in path and mode & 0o077]
    assert f"{lab.hosts[1].home}/.labctl" in leftovers(lab.hosts[1])

    kept = f"{lab.hosts[1].home}/.labctl/{lab.name}.h2/runs/.outputs/20260102-150405-hello-3fa2"
    lab.inside("worker-1", "sh", "-c", f"mkdir {RUN}; echo 1 > {RUN}/loss; mkfifo {RUN}/pipe", user="1000:1000")
    # A run's name on the host must not be used as a path here: no such run was started from this machine.
    answer = lab.call("down").expect(3)
    assert f"contains '{Path(RUN).name}', not a run of this lab" in answer.err
    assert not (lab.path / "runs" / Path(RUN).name).exists()
    (lab.path / "runs" / Path(RUN).name).mkdir()
    answer = lab.call("down").expect(3)
    assert (
        f"h2: run {Path(RUN).name}: not fetched, because it is not a file of the run: pipe; files of run" in answer.err
    )
    assert f"stay on h2 in {kept}" in answer.err
    assert (lab.labelled(), leftovers(lab.hosts[0])) == ([], [])
    lab.hosts[1].shell('rm "$1/pipe"', kept)
    lab.call("down").expect(0)
    assert (lab.path / "runs" / Path(RUN).name / "loss").read_text() == "1\n"
    assert [leftovers(host) for host in lab.hosts] == [[], []]
    assert all(host.engine.images.list() for host in lab.hosts)


def test_down_takes_the_image_along_where_nothing_else_uses_it(lab: RackLab, image: str) -> None:
    """`down --images` removes the image on h2, and keeps it on h1, where a container uses it."""
    first, second = lab.hosts
    first.engine.containers.create(image, name="neighbour")
    answer = lab.call("down", "--images").expect(0)
    assert f"h1: image {image} stays: " in answer.err
    assert first.engine.images.list()
    assert second.engine.images.list() == []


@pytest.mark.slow
def test_four_hosts_from_nothing_to_nothing(rack: Rack, family: str, image: str, tmp_path: Path) -> None:
    """up, training on two hosts, hello-mpi on two and four, down: no file, container or image is left."""
    hosts = rack.make("a", "b", "c", "d")
    assert [host.engine.images.list() for host in hosts] == [[], [], [], []]
    lab = rack.lab(tmp_path, f"{family}-four", hosts, {"LAB_SHM_SIZE": "256m", "LAB_IMAGE": image})
    lab.call("up", limit=900).expect(0)

    trained = lab.call("run", "opt-tiny", "--include", "worker-1@worker-3", "--set", "steps=20", "--json", limit=600)
    result = passed(lab, trained, 2)
    assert [rank["node"] for rank in result["ranks"]] == ["worker-1", "worker-3"]
    assert result["metrics"]["throughput"]["value"] > 0
    (tmp_path / "two").write_text("worker-0 slots=1\nworker-2 slots=1\n")
    passed(lab, lab.call("run", "hello-mpi", "--hostfile", "two", "--json"), 2)
    everywhere = passed(lab, lab.call("run", "hello-mpi", "--json"), 4)
    assert [rank["node"] for rank in everywhere["ranks"]] == [f"worker-{number}" for number in range(4)]

    lab.call("down", "--images", limit=600).expect(0)
    assert [leftovers(host) for host in hosts] == [[], [], [], []]
    assert [host.engine.images.list() for host in hosts] == [[], [], [], []]
