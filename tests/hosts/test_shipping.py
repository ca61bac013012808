"""Copies of images to real hosts over real connections."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.harness import wait_until
from support.imagefile import LoadedImage
from support.rack.host import Host
from support.rack.rack import Rack

from docker import DockerClient
from labctl.backends.docker.hosts.ssh import connected
from labctl.backends.docker.images import distribute
from labctl.backends.docker.images.distribute import Failures, ImageTargets
from labctl.config.inventory import InventoryHost

pytestmark = pytest.mark.docker

SIZE = 4_000_000
"""Size of a layer in bytes."""


@pytest.fixture
def small(engine: DockerClient, family: str, tmp_path: Path) -> Iterator[LoadedImage]:
    """Yield an image with a layer of 4 MB, loaded into this machine's engine; remove it."""
    made = LoadedImage(engine, f"{family}/small:latest", tmp_path / "small.tar", SIZE)
    yield made
    made.remove()


class Sender:
    """Sends to hosts as labctl does, with the messages recorded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said: list[str] = []

    def __call__(self, image: LoadedImage, *hosts: Host) -> Failures:
        """Connect to the hosts and send them the image; return the errors by host name."""
        targets = [
            InventoryHost(name=host.name, address=host.address, user=host.user, port=host.port, key=str(host.key))
            for host in hosts
        ]
        with connected(targets, "true", seconds=60) as (connections, failures):
            receivers = ImageTargets(hosts=connections, notice=self.said.append, addresses={})
            return failures | distribute.send(image.name, receivers, self._folder)


@pytest.fixture
def send(rack: Rack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sender:
    """Return a Sender, with the rack's ssh on PATH."""
    monkeypatch.setenv("PATH", rack.environ["PATH"])
    return Sender(tmp_path)


def has(host: Host, image: LoadedImage) -> bool:
    """Return True if the host has this very image and no partial upload; raise if it has none of that name."""
    return host.engine.images.get(image.name).id == image.id and host.shell("ls -A ~ann/.labctl 2>&1 || :") == MISSING


MISSING = "ls: cannot access '/home/ann/.labctl': No such file or directory\n"


def test_an_image_and_then_its_changed_layer_go_from_host_to_host(
    rack: Rack, small: LoadedImage, send: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host relays the image to the second; later only the changed layer is sent."""
    monkeypatch.setattr(distribute, "WORTH", 0)
    hosts = first, second = rack.hosts(2)
    rack.introduce(*hosts)
    assert send(small, *hosts) == {}
    assert any("(each relays to the next)" in message for message in send.said)
    assert has(first, small)
    assert has(second, small)
    small.change()
    before = second.traffic()
    assert send(small, *hosts) == {}
    assert SIZE < second.traffic().received - before.received < 1.2 * SIZE
    assert has(first, small)
    assert has(second, small)


def test_a_host_that_is_cut_off_goes_on_where_it_stopped(rack: Rack, small: LoadedImage, send: Sender) -> None:
    """Hang up h1 during the copy: only h1 fails, and the next copy sends the rest."""
    first, second = rack.hosts(2)
    rack.slow_uplink("16mbit")
    part = "cat ~ann/.labctl/images/* 2> /dev/null | wc -c"
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, small, first, second)
        wait_until(lambda: int(first.shell(part)) > SIZE // 4, 120, "some of it is there")
        first.hang_up()
        failures = sending.result(120)
    assert list(failures) == ["h1"]
    assert failures["h1"].node == "h1"
    assert has(second, small)
    before = first.traffic()
    assert send(small, first, second) == {}
    assert first.traffic().received - before.received < 1.9 * SIZE
    assert has(first, small)


def test_a_host_without_room_is_named_and_the_other_has_the_image(rack: Rack, small: LoadedImage, send: Sender) -> None:
    """h1's engine has 8 MB: an error names h1 and the room needed; h2 has the image."""
    first, second = rack.hosts(2)
    first.small_engine_disk("8m")
    failures = send(small, first, second)
    assert list(failures) == ["h1"]
    assert "h1: no room for the image: 16 MB needed" in failures["h1"].message
    assert has(second, small)
