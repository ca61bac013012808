"""Gaudi's validation on stand-ins: everything except the computations on a Gaudi."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import FreshLab
from support.harness import Lab
from support.machine import hardware
from support.machine.machine import Machine

pytestmark = pytest.mark.docker

CARDS, PORTS = 8, 24
QUALIFICATION = "/opt/habanalabs/qual/gaudi2/bin"
NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >>/run/stand-in/qualified\n'
SLEEP = '#!/bin/sh\ncase "$1" in 0.*) ;; *) echo "sleep $*" >>/run/stand-in/qualified ;; esac\n'
"""Notes the waits of the ports' set-up, not those in which a host's load is read."""
SET_UP = ["manage_network_ifs.sh --down", "manage_network_ifs.sh --up", "sleep 120"]
STATUS = ["manage_network_ifs.sh --status"]


@pytest.fixture
def lab(machine: Machine, machine_lab: FreshLab) -> Lab:
    """Return a lab of one node, not up, on a machine with eight Gaudis, their ports and stand-in programs."""
    for index in range(CARDS):
        hardware.gaudi(machine, index, module=index)
    for port in range(PORTS):
        hardware.port(machine, f"ens{port}", driver="habanalabs")
    machine.program("sudo", '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n')
    machine.program("sleep", SLEEP)
    machine.program("hl-smi", listed(CARDS))
    for name in ("manage_network_ifs.sh", "hl_qual"):
        machine.file(f"{QUALIFICATION}/{name}", NOTE)
        machine.at(f"{QUALIFICATION}/{name}").chmod(0o755)
    machine.file("/run/stand-in/qualified", "")
    return machine_lab(LAB_ACCELERATOR="habana", LAB_NODES="1", LAB_SHM_SIZE="8g")


def listed(cards: int) -> str:
    """Return the Python text of a stand-in for hl-smi that lists ``cards`` cards."""
    lines = [f"{index}, 0000:{0x30 + index:02x}:00.0, HL-225, 98304, 01P0-{index}" for index in range(cards)]
    return f"print({chr(10).join(lines)!r})\n"


def validated(lab: Lab, *, code: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Validate by the gaudi profile with check ssh-check only; assert the code; return document, steps by name."""
    gaudi = lab.call("validate", "--profile", "gaudi", "--print-profile").expect(0).out
    (lab.path / "gaudi.yml").write_text(f"{gaudi.partition('checks:')[0]}checks: [{{workload: ssh-check}}]\n")
    answer = lab.call("validate", "--profile", "gaudi.yml", "--json", limit=400).expect(code)
    validation = answer.json["validation"]
    return validation, {step["name"]: step for step in validation["steps"]}


def test_cards_are_qualified_ports_set_up_again_and_counted_and_the_node_has_all_cards(
    machine: Machine, lab: Lab
) -> None:
    """Habana's programs are called in order, all steps pass, the node gets 8 cards."""
    _, steps = validated(lab, code=0)
    called = machine.at("/run/stand-in/qualified").read_text().splitlines()
    qualified = [line.split(" -c all ")[1].split()[0] for line in called if line.startswith("hl_qual ")]
    assert qualified == ["-pciOnly", "-e2e_concurrency", "-f2"]
    network = [line for line in called if not line.startswith("hl_qual ")]
    assert network == [*SET_UP, *STATUS, *SET_UP, *STATUS]
    assert {step["status"] for step in steps.values()} == {"passed"}
    assert list(steps) == [
        "doctor",
        "network set-up",
        "hl_qual",
        "network set-up again",
        "network",
        "up",
        "nodes",
        "ssh-check",
        "network after",
        "clean-up",
    ]
    assert steps["network"]["message"] == f"{PORTS} up on each host"
    (started,) = machine.requests()[:1]
    assert started["environment"]["HABANA_VISIBLE_DEVICES"] == ",".join(map(str, range(CARDS)))
    assert lab.labelled() == []


def test_a_card_that_is_gone_after_qualification_is_named_and_nothing_runs_on_its_node(
    machine: Machine, lab: Lab
) -> None:
    """hl-smi lists 7 of 8: exit code 5, worker-0 is failing, ssh-check has no node."""
    machine.program("hl-smi", listed(CARDS - 1))
    validation, steps = validated(lab, code=5)
    assert "check failed with exit code 1" in steps["hl_qual"]["message"]
    assert [node["verdict"] for node in validation["nodes"] if node["node"] == "worker-0"] == ["failing"]
    assert steps["ssh-check"]["message"] == "no node is left"
    assert lab.labelled() == []


@pytest.mark.slow
def test_a_port_that_is_down_is_named(machine: Machine, lab: Lab) -> None:
    """Take the carrier of one port: exit code 5, and step network names it with 23 of 24."""
    machine.file("/sys/devices/stand-in/net/ens7/carrier", "0\n")
    _, steps = validated(lab, code=5)
    assert steps["network"]["message"] == f"local: {PORTS - 1} of {PORTS} interfaces up; ens7 is down"
