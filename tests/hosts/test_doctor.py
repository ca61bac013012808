"""A host's faults are reported with its name before anything is done on it; other hosts go on."""

from __future__ import annotations

import ipaddress

import pytest
from conftest import RackLabs
from support.doctoring import doctor, single, type_in, wrong
from support.rack.rack import Rack

pytestmark = pytest.mark.docker

SSH_PORT = 12345
STALE = "LAB-IMAGE-002"
"""Code for the outdated image of these hosts, which is expected."""


def test_what_one_host_lacks_is_told_by_name_and_the_others_get_their_nodes(rack: Rack, rack_lab: RackLabs) -> None:
    """h2 has a taken port, a wrong clock and a full disk: `up` exits with 3, h1 gets its nodes."""
    lab = rack_lab(2)
    first, second = lab.hosts
    second.occupy(SSH_PORT, "bob")
    second.clock(300)
    second.fill_disk()
    findings = doctor(lab)
    assert {finding["node"] for finding in findings if finding["code"] != STALE} == {"h2"}
    assert "user bob" in single(findings, "LAB-PORT-002", "h2")["seen"]
    assert "5 min ahead" in single(findings, "LAB-CLOCK-001", "h2")["seen"]
    full = single(findings, "LAB-DISK-004", "h2")
    # Suggested commands for a host are typed here and executed there.
    assert full["fix"].startswith("ssh ")
    assert second.address in full["fix"]
    assert not any(finding["runnable"] for finding in findings)

    refused = lab.call("up", "--json").expect(3)
    error = refused.json["error"]
    assert (error["node"], "user bob" in error["message"], "LAB_SSH_PORT=" in error["hint"]) == ("h2", True, True)
    assert "h2: its clock is 5 min ahead" in refused.err
    assert rack.ssh(second, "ls -A .labctl", check=False).stdout == ""
    assert lab.on(second).labelled() == []
    containers = lab.on(first).containers()
    assert {node: container.status for node, container in containers.items()} == {
        "launcher": "running",
        "worker-0": "running",
    }


def test_a_port_is_told_by_the_lab_that_has_it_and_another_is_found(rack_lab: RackLabs, image: str) -> None:
    """LAB-PORT-002 names the other lab's node and owner, and its fix changes the port."""
    lab = rack_lab(2)
    labels = {"lab": "other", "node": "worker-7", "role": "worker", "owner": "cy@desk", "directory": "/home/cy/lab"}
    lab.hosts[1].engine.containers.run(
        image,
        ["60"],
        entrypoint="sleep",
        network_mode="host",
        environment={"LAB_SSH_PORT": str(SSH_PORT)},
        labels={f"labctl.{name}": value for name, value in labels.items()},
        detach=True,
    )
    finding = single(doctor(lab), "LAB-PORT-002", "h2")
    assert "worker-7 of lab `other`" in finding["seen"]
    assert "cy@desk" in finding["seen"]
    assert "LAB-PORT-002" not in {finding["code"] for finding in type_in(lab, [finding["fix"]], {})}


def test_hosts_that_do_not_answer_are_findings_beside_those_of_the_others(rack: Rack, rack_lab: RackLabs) -> None:
    """No engine on h1, no h2: LAB-ENGINE-001 and LAB-HOST-004 name them."""
    lab = rack_lab(2)
    first, second = lab.hosts
    nobody = str(ipaddress.ip_network(rack.network.attrs["IPAM"]["Config"][0]["Subnet"])[-2])
    first.stop_engine()
    lines = [first.line(), second.line(address=nobody)]
    (lab.path / "hosts.txt").write_text("\n".join(lines))
    findings = doctor(lab)
    assert "Docker Engine does not answer" in single(findings, "LAB-ENGINE-001", "h1")["seen"]
    assert "systemctl start docker" in single(findings, "LAB-ENGINE-001", "h1")["fix"]
    assert "unreachable: " in single(findings, "LAB-HOST-004", "h2")["seen"]


def test_bytes_take_the_interface_that_was_chosen_or_doctor_says_so(rack: Rack, rack_lab: RackLabs) -> None:
    """LAB-NET-007 is ok for both; with a wrong iface it names the interface in use."""
    lab = rack_lab(2)
    first_host, second_host = lab.hosts
    lab.call("up").expect(0)
    before = second_host.traffic()
    answer = lab.call("doctor", "--json").expect(0)
    findings = answer.json["findings"]
    proofs = {finding["node"]: finding["level"] for finding in findings if finding["code"] == "LAB-NET-007"}
    assert proofs == {"worker-0": "ok", "worker-1": "ok"}
    assert second_host.traffic().sent - before.sent > 4 << 20
    assert {finding["code"] for finding in wrong(findings)} <= {STALE}

    # Configure an interface of the second node that does not reach the first one.
    first, second = (host.interface(host.second_interface(rack.fabric)) for host in (first_host, second_host))
    (lab.path / "hosts.txt").write_text(f"{first_host.line(iface=first)}\n{second_host.line(iface='eth0')}\n")
    lab.call("up").expect(0)
    astray = single(doctor(lab), "LAB-NET-007", "worker-1")
    assert f"through {second}, not through eth0" in astray["seen"]


def test_devices_and_settings_are_those_of_the_hosts(rack_lab: RackLabs) -> None:
    """`devices` lists each host with its worker; `config` says cpu because of h1 and h2."""
    lab = rack_lab(2)
    hosts = lab.call("devices", "--json").expect(0).json["hosts"]
    assert [(host["name"], [node["name"] for node in host["nodes"]]) for host in hosts] == [
        ("h1", ["worker-0"]),
        ("h2", ["worker-1"]),
    ]
    decided = lab.call("config", "--json").expect(0).json["decided"]
    values = {setting["key"]: (setting["value"], "h1, h2" in setting["why"]) for setting in decided}
    assert values == {"accelerator": ("cpu", True), "LAB_NODES": ("2", False)}
