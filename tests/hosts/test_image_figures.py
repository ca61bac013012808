"""Cost of copying an image to one, two and four hosts: seconds, and bytes through each host's interface.

``pytest -m slow -s tests/hosts/test_image_figures.py`` shows the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.imagefile import LoadedImage
from support.rack.host import Host
from support.rack.rack import Rack

from docker import DockerClient
from labctl.backends.docker.hosts.ssh import connected
from labctl.backends.docker.images import distribute, local
from labctl.backends.docker.images.distribute import ImageTargets
from labctl.config.inventory import InventoryHost

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SIZE = 100_000_000
"""Size of each of the image's two layers, in bytes."""
UPLINK = "200mbit"


@dataclass(frozen=True)
class Figure:
    """Seconds until the image is on all hosts, and bytes received and sent by each host."""

    seconds: float
    received: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def from_here(self) -> int:
        """Return the bytes sent by this machine: those received by hosts minus those sent by hosts."""
        return sum(self.received) - sum(self.sent)


Send = Callable[[str, str, tuple[Host, ...]], Figure]


@pytest.fixture
def figures_image(engine: DockerClient, family: str, tmp_path: Path) -> Iterator[LoadedImage]:
    """Yield an image with two layers of 100 MB, loaded into this machine's engine; remove it."""
    made = LoadedImage(engine, f"{family}/figures:latest", tmp_path / "figures.tar", SIZE)
    yield made
    made.remove()


@pytest.fixture
def send(rack: Rack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Send:
    """Return a function that sends an image to hosts, prints and returns its Figure."""
    for key, value in rack.environ.items():
        monkeypatch.setenv(key, value)

    def send(label: str, image: str, hosts: tuple[Host, ...]) -> Figure:
        """Send the image, assert that each host has it, print the figure with its label, and return it."""
        targets = [
            InventoryHost(name=host.name, address=host.address, user=host.user, port=host.port, key=str(host.key))
            for host in hosts
        ]
        before = [host.traffic() for host in hosts]
        with connected(targets, "true", seconds=60) as (connections, failures):
            began = time.monotonic()
            receivers = ImageTargets(hosts=connections, notice=lambda _: None, addresses={})
            assert failures | distribute.send(image, receivers, tmp_path) == {}
            seconds = time.monotonic() - began
        traffic = [(host.traffic(), was) for host, was in zip(hosts, before, strict=True)]
        figure = Figure(
            seconds=seconds,
            received=tuple(now.received - was.received for now, was in traffic),
            sent=tuple(now.sent - was.sent for now, was in traffic),
        )
        mine = local.described(image)
        assert mine
        assert {host.engine.images.get(image).id for host in hosts} == {mine["Id"]}
        with capsys.disabled():
            each = ", ".join(f"{received / 1e6:.1f}" for received in figure.received)
            print(f"\n{label}: {seconds:.1f} s, {figure.from_here / 1e6:.1f} MB from here, MB to each host: {each}")  # noqa: T201
        return figure

    return send


def test_sending_to_many_hosts_takes_little_more_than_to_one(
    rack: Rack, send: Send, figures_image: LoadedImage
) -> None:
    """Four hosts take at most 1.5 times as long and 1.1 times the bytes; then one layer is sent."""
    single, pair, quad = rack.make("a"), rack.make("b", "c"), rack.make("d", "e", "f", "g")
    seven = (*single, *pair, *quad)
    rack.introduce(*seven)
    rack.slow_uplink(UPLINK)
    figures = [send(f"{len(hosts)} hosts", figures_image.name, hosts) for hosts in (single, pair, quad)]
    assert all(figure.from_here < 1.1 * figures[0].from_here for figure in figures)
    assert figures[2].seconds / figures[0].seconds <= 1.5
    figures_image.change()
    changed = send("one layer changed, 4 hosts", figures_image.name, quad)
    assert all(SIZE < received < 1.05 * SIZE for received in changed.received)
