"""Packages of a person's own on hosts: built here once, and only what they add is sent."""

from __future__ import annotations

import pytest
from conftest import RackLabs

from docker import DockerClient

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("shared_rack")]

SCRIPT = "import os, nltk\nprint('rank', os.environ['RANK'], 'has nltk', nltk.__version__)\n"


def test_two_hosts_get_the_packages_without_a_network_of_their_own(
    rack_lab: RackLabs, engine: DockerClient, image: str
) -> None:
    lab = rack_lab(2, LAB_PACKAGES="nltk")
    lab.call("up").expect(0)
    tag = lab.image()
    try:
        mine = engine.images.get(tag)
        assert [host.engine.images.get(tag).id for host in lab.hosts] == [mine.id, mine.id]
        assert 0 < mine.attrs["Size"] - engine.images.get(image).attrs["Size"] < 50e6
        (lab.path / "words.py").write_text(SCRIPT)
        passed = lab.call("run", "--script", "words.py", "--json").expect(0).json
        record = lab.path / "runs" / passed["run_id"]
        assert (record / "output.log").read_text().count("has nltk") == 2
        assert tag in (record / "versions.json").read_text()
        # Nothing is asked for what is there: no index answers here.
        lab.call("down").expect(0)
        lab.call("up", "-s", "LAB_PIP_INDEX_URL=http://127.0.0.1:9/simple").expect(0)
    finally:
        lab.call("down")
        engine.images.remove(tag, force=True)
