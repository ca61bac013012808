"""Labs on one machine that want the same devices: one gets them, the others are refused with the holder's name."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Answer, Lab, wait_until
from support.machine import hardware
from support.machine.machine import NODE_IMAGE, Machine

pytestmark = pytest.mark.docker

FIRST, SECOND = "/dev/dri/renderD128", "/dev/dri/renderD129"
UID = 1234


@pytest.fixture
def gpus(machine: Machine) -> None:
    """Plant two Intel GPUs on the machine."""
    for number in (0, 1):
        hardware.card(machine, number, vendor="0x8086")


def wanting(*devices: str, **more: str) -> dict[str, str]:
    """Return the settings of a lab of one node with these devices."""
    return {"LAB_ACCELERATOR": "intel", "LAB_NODES": "1", "LAB_DEVICES": ",".join(devices), **more}


def refused(answer: Answer, *, holder: Lab, device: str = FIRST) -> None:
    """Assert exit code 3 and that stderr names the device, and the holder's lab and directory."""
    answer.expect(3)
    assert device in answer.err
    assert f"lab `{holder.name}`" in answer.err
    assert str(holder.path) in answer.err


@pytest.mark.usefixtures("gpus")
def test_a_device_is_granted_again_when_its_container_was_killed(machine_lab: FreshLab) -> None:
    """`up` is refused while another lab has the GPU, and passes once its worker is killed."""
    first, second = machine_lab(**wanting(FIRST)), machine_lab(**wanting(FIRST))
    first.call("up").expect(0)
    answer = second.call("up")
    refused(answer, holder=first)
    assert f"labctl down -C {first.path}" in answer.err
    assert f"LAB_DEVICES={SECOND}" in answer.err
    assert second.labelled() == []
    (shown,) = second.call("devices", "--json").expect(0).json["hosts"]
    assert [device["holder"].startswith(f"lab `{first.name}`") for device in shown["devices"]] == [True, False]

    first.containers()["worker-0"].kill("SIGKILL")
    second.call("up").expect(0)
    refused(first.call("up"), holder=second)


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_a_node_started_by_hand_does_not_steal(machine_lab: FreshLab) -> None:
    """A stopped worker, started by docker, exits with 1 as another lab has its GPU."""
    first, second = machine_lab(**wanting(FIRST)), machine_lab(**wanting(FIRST))
    first.call("up").expect(0)
    worker = first.containers()["worker-0"]
    worker.stop()
    second.call("up").expect(0)
    worker.start()
    assert worker.wait(timeout=60)["StatusCode"] == 1
    line = worker.logs().decode().splitlines()[-1]
    assert line.startswith("device 0000:")
    assert second.name in line
    assert second.containers()["worker-0"].status == "running"


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_a_lab_is_not_in_its_own_way(machine_lab: FreshLab) -> None:
    """A second `up`, a restart and a recreation keep the lab's GPU; only `down` frees it."""
    first, second = machine_lab(**wanting(FIRST)), machine_lab(**wanting(FIRST))
    first.call("up").expect(0)
    first.call("up").expect(0)
    first.containers()["worker-0"].restart(timeout=5)
    first.call("up").expect(0)
    refused(second.call("up"), holder=first)
    made_of = first.identities()["worker-0"]
    first.configure(wanting(FIRST, LAB_SHM_SIZE="65m", LAB_IMAGE=NODE_IMAGE))
    first.call("up").expect(0)
    assert first.identities()["worker-0"] != made_of
    refused(second.call("up"), holder=first)
    first.call("down").expect(0)
    second.call("up").expect(0)


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_a_device_moves_from_node_to_node(machine_lab: FreshLab) -> None:
    """`up` passes after LAB_DEVICES and LAB_NODES give a GPU to the other node of the lab."""
    lab = machine_lab(**wanting(FIRST, SECOND))
    lab.call("up").expect(0)
    lab.configure(wanting(FIRST, SECOND, LAB_NODES="2", LAB_IMAGE=NODE_IMAGE))
    lab.call("up").expect(0)
    lab.configure(wanting(SECOND, FIRST, LAB_NODES="2", LAB_IMAGE=NODE_IMAGE))
    lab.call("up").expect(0)
    assert lab.containers()["worker-0"].labels["labctl.devices"] == SECOND


@pytest.mark.usefixtures("gpus")
def test_of_two_at_once_one_wins(machine_lab: FreshLab) -> None:
    """Of two concurrent `up` for a GPU one exits with 0, the other with 3 and no container."""
    labs = machine_lab(**wanting(FIRST)), machine_lab(**wanting(FIRST))
    with labs[0].start("up") as first, labs[1].start("up") as second:
        answers = first.answer(300), second.answer(300)
    winner = 0 if answers[0].code == 0 else 1
    answers[winner].expect(0)
    refused(answers[1 - winner], holder=labs[winner])
    assert labs[1 - winner].labelled() == []


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_labs_with_other_devices_are_left_alone(machine_lab: FreshLab) -> None:
    """Labs with the other GPU, or without any, come up beside the first."""
    machine_lab(**wanting(FIRST)).call("up").expect(0)
    machine_lab(**wanting(SECOND)).call("up").expect(0)
    machine_lab(LAB_NODES="1").call("up").expect(0)


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_a_lease_and_its_node_live_and_die_together(machine_lab: FreshLab) -> None:
    """The node's user cannot kill the lease's process; if root does, the node exits and frees the GPU."""
    first, second = machine_lab(**wanting(FIRST)), machine_lab(**wanting(FIRST))
    first.call("up").expect(0)
    holder = ["pkill", "-KILL", "-f", "labnode.py start"]
    first.containers()["worker-0"].exec_run(holder, user=str(UID))
    refused(second.call("up"), holder=first)
    first.containers()["worker-0"].exec_run(holder, user="0")
    wait_until(lambda: first.containers()["worker-0"].status == "exited", 120, "the node without a lease is gone")
    second.call("up").expect(0)


@pytest.fixture
def theirs(machine: Machine, machine_lab: FreshLab) -> Iterator[Lab]:
    """Yield a lab, not up, of uid 1234, on the same machine, with the first GPU."""
    group = machine.at("/run/docker.sock").stat().st_gid
    prefix = (*machine.prefix, "setpriv", f"--reuid={UID}", f"--regid={UID}", f"--groups={group}")
    home = Path(tempfile.mkdtemp(prefix="labctl-theirs-"))
    os.chown(home, UID, UID)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        settings = {"LAB_IMAGE": NODE_IMAGE, **wanting(FIRST)}
        lab = Lab.make(home / "lab", f"{machine_lab().name}-theirs", machine.engine, settings, prefix=prefix)
    for path in (lab.path, *lab.path.rglob("*")):
        os.chown(path, UID, UID)
    yield lab
    lab.destroy()
    shutil.rmtree(home)


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_two_people_share_a_machine(theirs: Lab, machine_lab: FreshLab) -> None:
    """A GPU goes back and forth between labs of two users; refusals name the other user."""
    mine = machine_lab(**wanting(FIRST))
    theirs.call("up").expect(0)
    answer = mine.call("up")
    refused(answer, holder=theirs)
    assert f"of user {UID} (worker-0," in answer.err
    theirs.containers()["worker-0"].kill("SIGKILL")
    mine.call("up").expect(0)
    refused(theirs.call("up"), holder=mine)
    mine.call("down").expect(0)
    theirs.call("up").expect(0)
