"""LAB_SHARED_DIR: hosts that see the lab's directory under its own path, as with NFS, receive no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.rack.rack import Rack

pytestmark = pytest.mark.docker


def test_results_appear_in_place_and_are_the_persons_own(
    rack: Rack, family: str, image: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Hosts that share the directory get no files and write results in place; a host without it is refused."""
    hosts = rack.make("n1", "n2", image=image, uid=os.getuid() or 1000, shared=tmp_path)
    (tmp_path / "lab").mkdir()
    lab = rack.lab(tmp_path / "lab", f"{family}-shared", hosts, {"LAB_SHARED_DIR": str(tmp_path)})
    # Over NFS the user has the same uid on all hosts.
    rack.inventory(lab.path / "hosts.txt", *hosts, user="ann" if os.getuid() else "root")

    # A local directory that the hosts cannot see.
    directory = tmp_path_factory.mktemp("own")
    apart = rack.lab(directory, f"{family}-apart", hosts, {"LAB_SHARED_DIR": str(directory)})
    refused = apart.call("up").expect(3).err
    for name in ("n1", "n2"):
        assert f"{name}: does not see {directory} (LAB-HOST-008): LAB_SHARED_DIR must be the same directory" in refused
    assert [host.shell('[ ! -e "$1" ] || echo made', str(directory)) for host in hosts] == ["", ""]

    assert "push files" not in lab.call("up").expect(0).err
    assert lab.inside("worker-1", "id", "-u") == f"{os.getuid()}\n"

    result = lab.call("run", "hello-mpi", "--json").expect(0).json
    record = lab.path / "runs" / result["run_id"]
    assert "hello from rank 1 of 2 on worker-1" in (record / "ranks/rank-1.log").read_text()
    assert not (record / "hosts").exists()
    lab.inside("worker-1", "touch", "/workspace/outputs/made-on-worker-1")
    assert (lab.path / "runs/.outputs/made-on-worker-1").stat().st_uid == os.getuid()

    lab.call("down").expect(0)
    assert lab.labelled() == []
    assert (record / "result.json").is_file()
    assert [host.shell('ls -A "$1" /root', host.home).count(".labctl") for host in hosts] == [0, 0]
