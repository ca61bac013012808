"""Doctor's check of the health of hosts, here and over ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import builders

from labctl.backends.docker.checks import health, run
from labctl.backends.docker.checks.examination import CheckContext
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.hosts.ssh import Connection
from labctl.config import settings
from labctl.config.inventory import InventoryHost
from labctl.health import catalogue, rules
from labctl.health.model import Check, Reading, Subject
from labctl.model import HERE, Lab, Mount
from labctl.system.hostdump import HostDump
from labctl.system.process import CompletedProcess


def fans(dump: HostDump) -> Iterator[Reading]:
    """Yield the speed of the fan."""
    yield Reading(name="fan", value=int(dump.facts["fan"]), source="fanctl", unit="rpm")


FANS = Subject(
    name="Fans", script="fact fan 900", readings=fans, checks=(Check(name="fan", reading="fan", judge=rules.below),)
)


class Machine:
    """Connection to a host that prints the same for any script."""

    def __init__(self, name: str, speed: int = 900) -> None:
        self.target = InventoryHost(name=name, user="ann")
        self.speed = speed
        self.script = ""
        self.timeout = 0.0

    def run(self, script: str, *_: str, timeout: float, check: bool) -> CompletedProcess:  # noqa: ARG002
        """Keep the script and its time limit; print the speed of the fan."""
        self.script, self.timeout = script, timeout
        return CompletedProcess(("sh",), 0, f"labctl survey\nfact fan\n\t{self.speed}\nend\n", "")


@pytest.fixture(autouse=True)
def _subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make FANS the only subject of hosts, with a limit of 100 rpm."""
    limited = replace(FANS, checks=(replace(FANS.checks[0], limit=100),))
    monkeypatch.setattr(catalogue, "HOST", (limited,))


def context(directory: Path, lab: Lab, machine: Machine, **fields: Any) -> CheckContext:
    """Build the context of a host with this connection."""
    (directory / ".env").write_text("")
    return CheckContext(
        lab=replace(lab, directory=directory),
        settings=settings.load(directory, {"HOME": str(directory)}, {}),
        environ={},
        engine=cast(DockerEngine, None),
        connection=cast(Connection, machine),
        **fields,
    )


@pytest.mark.parametrize(("speed", "level"), [(900, "ok"), (7, "error")])
def test_a_lab_on_this_machine_is_examined(tmp_path: Path, speed: int, level: str) -> None:
    """Examine a lab without an inventory: this machine has a finding."""
    (found,) = health.fit(context(tmp_path, builders.lab(), Machine(HERE, speed)))
    assert (found.level, found.code, found.node) == (level, "LAB-HEALTH-001", HERE)


def test_of_a_lab_on_other_hosts_those_are_examined_that_were_reached(tmp_path: Path) -> None:
    """Examine a lab on two hosts of which one was reached, then none: never this machine."""
    lab = builders.lab((builders.node(0, host="gpu-1"),), hosts=tuple(builders.host(name=f"gpu-{n}") for n in (1, 2)))
    reached = context(tmp_path, lab, Machine("gpu-1"))
    whole = context(tmp_path, lab, Machine(HERE), hosts=(reached,))
    assert [(found.level, found.node) for found in health.fit(whole)] == [("ok", "gpu-1")]
    assert list(health.fit(replace(whole, hosts=()))) == []


def test_a_silent_host_has_its_finding_before_the_check_is_out_of_time(tmp_path: Path) -> None:
    """Examine with an own check of 10 s: the script ends before the check does, and has the folders of the nodes."""
    (tmp_path / "health.yml").write_text("own:\n  scratch: {command: 'true', seconds: 10}\n")
    (tmp_path / ".lab/nodes").mkdir(parents=True)
    machine = Machine(HERE)
    lab = builders.lab(mounts=(Mount("/data", "/data", True),))
    assert list(health.fit(context(tmp_path, lab, machine)))
    (check,) = (check for check in run.CHECKS if check.function == "health.fit")
    assert machine.timeout == check.seconds - health.JUDGING
    assert "health_paths='r /data'" in machine.script
