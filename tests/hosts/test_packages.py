"""The user's own packages on hosts: built once on this machine, and only the added layers are sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rack.rack import Rack

from docker import DockerClient

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("shared_rack")]

SCRIPT = "import os, nltk\nprint('rank', os.environ['RANK'], 'has nltk', nltk.__version__)\n"


def test_two_hosts_get_the_packages_without_a_network_of_their_own(
    rack: Rack, engine: DockerClient, small_image: str, family: str, tmp_path: Path
) -> None:
    """LAB_PACKAGES is built here, less than 60 MB reach each host, and ranks import it."""
    hosts = rack.make("a", "b", image=small_image)
    lab = rack.lab(tmp_path, f"{family}-packages", hosts, {"LAB_IMAGE": small_image, "LAB_PACKAGES": "nltk"})
    before = [host.traffic().received for host in hosts]
    lab.call("up").expect(0)
    tag = lab.image()
    try:
        mine = engine.images.get(tag)
        assert [host.engine.images.get(tag).id for host in lab.hosts] == [mine.id, mine.id]
        assert 0 < mine.attrs["Size"] - engine.images.get(small_image).attrs["Size"] < 50e6
        assert all(host.traffic().received - old < 60e6 for host, old in zip(hosts, before, strict=True))
        (lab.path / "words.py").write_text(SCRIPT)
        passed = lab.call("run", "--script", "words.py", "--launcher", "mpirun", "--json").expect(0).json
        record = lab.path / "runs" / passed["run_id"]
        assert (record / "output.log").read_text().count("has nltk") == 2
        assert tag in (record / "versions.json").read_text()
        # Satisfied requirements need no index: none is reachable here.
        lab.call("down").expect(0)
        lab.call("up", "-s", "LAB_PIP_INDEX_URL=http://127.0.0.1:9/simple").expect(0)
    finally:
        lab.call("down")
        engine.images.remove(tag, force=True)
