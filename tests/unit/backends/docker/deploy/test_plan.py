"""Plans compared whole, as ``--dry-run`` prints them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import IMAGE_ID, container, host, lab, node, observed, up

from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import plan
from labctl.backends.docker.deploy.steps import WriteFiles
from labctl.backends.state import ObservedState
from labctl.model import File, Lab

REACH = "reach worker-0, worker-1 over ssh within 60 s  [wait for SSH]"


def test_first_up_writes_makes_and_reaches() -> None:
    """With no containers: write the files, compose up both workers, reach them."""
    of = lab()
    assert up(of, ObservedState(image=IMAGE_ID), render.render(of)) == (
        "#1 write .lab/nodes/worker-0/compose.yml, .lab/nodes/worker-1/compose.yml, "
        ".lab/nodes/worker-0/launcher/config  [new or changed]\n"
        "#2 compose up worker-0, worker-1 (project labctl-demo)  "
        "[launcher missing; worker-0 missing; worker-1 missing]\n"
        f"#3 {REACH}"
    )


def test_nothing_changed_only_reaches() -> None:
    """With all as rendered the only step is to reach the workers."""
    assert up(lab(), observed(lab())) == f"#1 {REACH}"


def test_surplus_nodes_go_and_only_they() -> None:
    """Containers of worker-2 and worker-3, which are not in the lab, are removed."""
    current = observed(lab(4))
    now = observed(lab(2))
    current = replace(current, containers=(*now.containers, *current.containers[3:]))
    assert up(lab(2), current) == f"#1 remove worker-2, worker-3  [removed from .env]\n#2 {REACH}"


@pytest.mark.parametrize("state", ["paused", "dead", "removing"])
def test_a_stuck_container_is_made_anew(state: str) -> None:
    """A paused, dead or removing worker-1 is removed and made by compose up."""
    assert up(lab(), observed(lab(), worker_1={"state": state})) == (
        f"#1 remove worker-1  [cannot be used: {state}]\n"
        f"#2 compose up worker-0, worker-1 (project labctl-demo)  [worker-1 missing]\n"
        f"#3 {REACH}"
    )


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("device lost: nvidia-smi says `Unknown Error`", "device-lost"),
        ("sshd does not listen; `labctl up` recreates this node", "node-lost"),
    ],
)
def test_a_node_that_no_run_can_use_is_made_anew(reason: str, word: str) -> None:
    """An unhealthy worker-1 with a lost device or sshd is removed and made again."""
    text = up(lab(), observed(lab(), worker_1={"health": "unhealthy", "reason": reason}))
    assert f"remove worker-1  [cannot be used: {word}]" in text
    assert "[worker-1 missing]" in text


def test_a_node_that_was_too_busy_to_be_checked_is_left_alone() -> None:
    """A worker that is unhealthy because its health check timed out is not removed."""
    busy = {"health": "unhealthy", "reason": "Health check exceeded timeout (5s)"}
    assert up(lab(), observed(lab(), worker_1=busy)) == f"#1 {REACH}"


LIMITS = {"rendered_limits": "memory=1073741824 pids=8192 cpuset=0,1"}
ALTERED = {
    "not on network labctl-demo": {"network": "labctl-demo", "networks": ("bridge",)},
    "memory limit changed (docker update)": {"limits": (("memory", "536870912"), ("pids", "8192")), **LIMITS},
    "cpus limit changed (docker update)": {"limits": (("cpus", "1500000000 0 0"),), **LIMITS},
    "pids limit, cpuset limit changed (docker update)": {"limits": (("pids", "0"), ("cpuset", "0")), **LIMITS},
}


@pytest.mark.parametrize(("reason", "change"), ALTERED.items(), ids=ALTERED)
@pytest.mark.parametrize("state", ["running", "exited"])
def test_a_container_that_was_changed_behind_the_back_of_compose_is_recreated(
    reason: str, change: dict[str, Any], state: str
) -> None:
    """A worker with another network or limits than rendered is removed and made again, running or not."""
    current = observed(lab(), worker_1={"state": state, **change})
    assert up(lab(), current) == (
        f"#1 remove worker-1  [worker-1: {reason}]\n"
        f"#2 compose up worker-0, worker-1 (project labctl-demo)  [worker-1 missing]\n"
        f"#3 {REACH}"
    )
    if state == "running":
        assert plan.not_current(lab(), render.render(lab()), current, ("worker-0", "worker-1")) == [
            ("worker-1", reason)
        ]


@pytest.mark.parametrize(
    "change",
    [
        {"network": "labctl-demo", "networks": ("other", "labctl-demo")},
        {"limits": (("memory", "1073741824"), ("pids", "8192"), ("cpuset", "0,1")), **LIMITS},
        {"limits": (("pids", "8192"),), **LIMITS},
        {"limits": (("memory", "536870912"),)},
    ],
    ids=["another network", "as rendered", "the kernel lacks some", "unknown"],
)
def test_a_container_that_is_as_it_was_made_stays(change: dict[str, Any]) -> None:
    """A worker with its network among others, and limits as rendered or unknown, is not removed."""
    assert up(lab(), observed(lab(), worker_1=change)) == f"#1 {REACH}"


def test_a_paused_container_is_removed_for_that_alone() -> None:
    """A paused worker that also misses its network is removed with the cause `paused` alone."""
    text = up(lab(), observed(lab(), worker_1={"state": "paused", "network": "labctl-demo"}))
    assert text.splitlines()[0] == "#1 remove worker-1  [cannot be used: paused]"
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("state", ["exited", "created"])
def test_a_stopped_container_is_started(state: str) -> None:
    """A launcher that is exited or created is started by compose up."""
    assert up(lab(), observed(lab(), launcher={"state": state})) == (
        f"#1 compose up worker-0, worker-1 (project labctl-demo)  [launcher {state}]\n#2 {REACH}"
    )


def test_another_image_makes_every_container_anew() -> None:
    """With another image id compose up names all three containers as changed."""
    assert up(lab(), replace(observed(lab()), image="sha256:2222")) == (
        "#1 compose up worker-0, worker-1 (project labctl-demo)  "
        "[launcher image changed; worker-0 image changed; worker-1 image changed]\n"
        f"#2 {REACH}"
    )


def test_changed_settings_make_the_nodes_they_change_anew() -> None:
    """A changed cpuset of worker-1 writes its compose file and recreates it alone."""
    before, after = lab(), lab((node(0), node(1, cpuset=(1,))))
    changed = tuple(file for file in render.render(after) if file not in render.render(before))
    assert up(after, observed(before), changed) == (
        "#1 write .lab/nodes/worker-1/compose.yml  [new or changed]\n"
        "#2 compose up worker-0, worker-1 (project labctl-demo)  [worker-1 configuration changed]\n"
        f"#3 {REACH}"
    )


def test_a_new_node_comes_alone_and_the_launcher_is_told_of_it() -> None:
    """A third worker is made with the cause `missing`, and all three are reached."""
    text = up(lab(3), observed(lab(2)))
    assert "[worker-2 missing]" in text
    assert "reach worker-0, worker-1, worker-2" in text


def test_a_container_that_an_interrupted_renewal_left_under_another_name_is_made_anew() -> None:
    """A container named as compose names a replaced one is removed and made again."""
    text = up(lab(), observed(lab(), worker_1={"name": "0a1b2c_labctl-demo-worker-1-1"}))
    assert "remove worker-1  [cannot be used: left over from an interrupted recreate]" in text
    assert "[worker-1 missing]" in text


def test_nodes_whose_keys_are_gone_are_made_anew() -> None:
    """A node in `unusable` is removed with that cause and made again."""
    text = str(plan.up(lab(), render.render(lab()), observed(lab()), unusable={"worker-0": "its keys are gone"}))
    assert "remove worker-0  [cannot be used: its keys are gone]" in text
    assert "[worker-0 missing]" in text


def on_a_host() -> tuple[Lab, ObservedState]:
    """Return a lab on host red, over ssh, and its observed state when it is up."""
    of = lab((node(0, host="red"), node(1, host="red")), hosts=(host(name="red", directory="/home/ann/.labctl/demo"),))
    return of, replace(observed(of), host="red")


def test_a_host_that_has_all_files_gets_none() -> None:
    """With all files on the host the only step is to reach the workers."""
    assert up(*on_a_host()) == f"#1 {REACH}"


def test_files_go_to_a_host_that_lacks_them_and_only_folders_are_made_for_its_containers_otherwise() -> None:
    """A stale host gets files pushed; otherwise, with a missing container, only its folders are made."""
    of, current = on_a_host()
    send = "#1 push files of worker-0, worker-1 to red  [files missing on host]"
    assert str(plan.up(of, render.render(of), current, stale=("red",))) == f"{send}\n#2 {REACH}"
    fewer = replace(current, containers=current.containers[:2])
    assert up(of, fewer) == (
        "#1 make folders of worker-0, worker-1 on red  [files missing on host]\n"
        "#2 compose up worker-0, worker-1 (project labctl-demo) on red  [worker-1 missing]\n"
        f"#3 {REACH}"
    )


def test_containers_whose_files_are_gone_are_removed_before_others_are_sent() -> None:
    """A container whose files are gone is removed, then files are pushed, then it is made again."""
    of, current = on_a_host()
    lost = {"worker-1": "its files are gone"}
    assert str(plan.up(of, render.render(of), current, stale=("red",), unusable=lost)) == (
        "#1 remove worker-1 on red  [cannot be used: its files are gone]\n"
        "#2 push files of worker-0, worker-1 to red  [files missing on host]\n"
        "#3 compose up worker-0, worker-1 (project labctl-demo) on red  [worker-1 missing]\n"
        f"#4 {REACH}"
    )


def test_down_removes_what_carries_the_label() -> None:
    """down() removes all three containers and the network."""
    assert str(plan.down(observed(lab()))) == (
        "#1 remove launcher, worker-0, worker-1  [labctl down]\n#2 remove network labctl-demo  [labctl down]"
    )


def test_probes_are_left_to_the_labctl_that_is_at_work_and_removed_by_down() -> None:
    """up() leaves probe containers; down() removes them and their networks."""
    probes = (container("probe", role="probe"),)
    current = replace(observed(lab()), probes=probes, probe_networks=(("id", "labctl-demo-probe-1"),))
    assert up(lab(), current) == f"#1 {REACH}"
    assert "remove launcher, worker-0, worker-1, probe" in str(plan.down(current))
    assert "labctl-demo-probe-1" in str(plan.down(current))


def test_down_of_a_lab_that_never_was_does_nothing() -> None:
    """down() of an empty state is `nothing to do`."""
    assert str(plan.down(ObservedState())) == "nothing to do"


def test_down_removes_a_network_that_was_left_alone() -> None:
    """down() of a state with only a network removes it."""
    assert str(plan.down(ObservedState(networks=(("id", "labctl-demo"),)))) == (
        "#1 remove network labctl-demo  [labctl down]"
    )


def test_down_removes_what_was_sent_to_a_host_by_whatever_name() -> None:
    """down() fetches results from each directory on a host, then removes that directory."""
    current = ObservedState(parts=(ObservedState(host="h1"), ObservedState(host="h2")))
    assert str(plan.down(current, {"h2": ("/home/ann/.labctl/demo.h2", "/home/ann/.labctl/demo.old")})) == (
        "#1 fetch results left in /home/ann/.labctl/demo.h2/runs on h2  [labctl down]\n"
        "#2 remove /home/ann/.labctl/demo.h2 on h2  [labctl down]\n"
        "#3 fetch results left in /home/ann/.labctl/demo.old/runs on h2  [labctl down]\n"
        "#4 remove /home/ann/.labctl/demo.old on h2  [labctl down]"
    )


def test_down_does_not_ask_whose_the_containers_are() -> None:
    """down() removes a container that another directory made."""
    current = ObservedState(containers=(container("worker-9", directory="/elsewhere"),))
    assert str(plan.down(current)) == "#1 remove worker-9  [labctl down]"


def test_down_leaves_images_unless_asked_and_takes_none_that_is_not_there() -> None:
    """down() keeps images; with `image` it removes it from the host that has it, and not from the other."""
    on_hosts = ObservedState(parts=(ObservedState(host="red", image=IMAGE_ID), ObservedState(host="blue")))
    assert str(plan.down(on_hosts)) == "nothing to do"
    assert str(plan.down(on_hosts, image="labctl/cpu")) == "#1 remove image labctl/cpu on red  [labctl down --images]"


def test_clean_removes_the_state_at_last_and_down_the_records_of_hosts() -> None:
    """clean removes the state last; down removes the records of hosts."""
    on_hosts = ObservedState(parts=(ObservedState(host="red"), ObservedState(host="blue")))
    steps = plan.down(on_hosts, records={"red": (".lab/hosts/red@X",), "blue": ()}, state=".lab")
    assert str(steps) == "#1 remove .lab/hosts/red@X  [labctl down]\n#2 remove .lab  [labctl clean]"


def test_what_a_file_holds_is_in_no_text() -> None:
    """The content of a file to write is neither in the step's text nor in its repr."""
    secret = File(path="secrets/hf_token", content="CANARY")
    step = WriteFiles(files=(secret,), cause="new or changed")
    assert "CANARY" not in f"{step}{step!r}"
