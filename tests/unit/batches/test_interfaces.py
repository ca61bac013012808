from __future__ import annotations

import pytest

from labctl.backends.docker.hosts.ssh import LocalConnection
from labctl.batches import interfaces

BEFORE = interfaces.read("eth0 mlx5_core up 1 100000\neth1 habanalabs up 1 100000\neth2 habanalabs down 0 -1\n")


def test_those_with_a_carrier_are_up() -> None:
    """Read three interfaces, one without carrier: up() is 2, down() names the one."""
    assert interfaces.up(BEFORE) == 2
    assert interfaces.down(BEFORE.values()) == "eth2 is down"


def test_they_are_chosen_by_name_and_driver() -> None:
    """Read with a driver or name pattern: only matching interfaces."""
    text = "eth0 mlx5_core up 1 100000\neth1 habanalabs up 1 -1\nib0 mlx5_core up 1 -1\n"
    assert list(interfaces.read(text, driver="habanalabs.*")) == ["eth1"]
    assert list(interfaces.read(text, interfaces="eth.*", driver="mlx5_core")) == ["eth0"]


def test_what_got_worse_is_named_and_nothing_else() -> None:
    """Compare two readings: a lower speed, a missing and a downed interface are named, improvements are not."""
    after = "eth0 mlx5_core up 1 1000\neth2 habanalabs up 1 100000\n"
    assert interfaces.changes(BEFORE, interfaces.read(after)) == [
        "eth0 fell from 100000 to 1000 Mbit/s",
        "eth1 is gone",
    ]
    down = "eth0 mlx5_core up 1 100000\neth1 habanalabs up 0 -1\neth2 habanalabs down 0 -1\n"
    assert interfaces.changes(BEFORE, interfaces.read(down)) == ["eth1 went down"]


def test_the_script_runs_here_and_what_it_prints_is_read() -> None:
    """Run the script on this machine: its output is parsed, without lo."""
    parsed = interfaces.read(LocalConnection().run(interfaces.SCRIPT).out)
    assert "lo" not in parsed


def test_another_output_is_refused() -> None:
    """Read a line of too few words: ValueError."""
    with pytest.raises(ValueError, match="unpack"):
        interfaces.read("eth0 up\n")
