"""The rack itself: every fault really does what it says, and nothing of it stays."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from docker import DockerClient
from hosts.host import Host
from hosts.rack import Rack

pytestmark = pytest.mark.docker


def says(rack: Rack, host: Host, *argv: str) -> str:
    """What ssh or the command says when it fails."""
    done = rack.ssh(host, *argv, check=False)
    assert done.returncode != 0
    return done.stderr


def test_a_host_is_a_machine_with_ssh_and_docker_and_no_more(rack: Rack, engine: DockerClient, image: str) -> None:
    first, second = rack.hosts(2)
    assert rack.ssh(first, "id -un; hostname; docker images --quiet | wc -l").stdout.split() == ["ann", "h1", "1"]
    assert first.run("which", "python3", "rsync", "curl", check=False).stdout == ""
    assert first.engine.images.get(image).id == engine.images.get(image).id
    assert len({first.engine.info()["ID"], second.engine.info()["ID"], engine.info()["ID"]}) == 3
    assert (
        first.engine.containers.run(image, ["-c", "echo up"], entrypoint="sh", network_mode="host", remove=True)
        == b"up\n"
    )
