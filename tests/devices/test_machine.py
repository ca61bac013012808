"""The second machine: planted devices and files exist for its programs only."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.machine.machine import Machine

from docker import DockerClient

pytestmark = pytest.mark.docker


def test_what_is_planted_is_real_there_and_absent_here(machine: Machine) -> None:
    """A planted device and file exist on the machine only, until `clear`."""
    machine.device("/dev/dri/renderD250", mode=0o660, gid=991)
    machine.file("/sys/class/drm/renderD250/device/vendor", "0x8086\n")
    assert machine.run("stat", "--format=%F %a %g", "/dev/dri/renderD250").stdout == "character special file 660 991\n"
    assert machine.run("cat", "/sys/class/drm/renderD250/device/vendor").stdout == "0x8086\n"
    assert not Path("/sys/class/drm/renderD250/device/vendor").is_file()
    machine.clear()
    assert machine.run("ls", "-d", "/dev/dri/renderD250", "/sys/class/drm/renderD250", check=False).stdout == ""


def test_its_engine_is_another(machine: Machine, engine: DockerClient) -> None:
    """The machine's Docker engine has another id than this machine's."""
    assert machine.engine.info()["ID"] != engine.info()["ID"]
