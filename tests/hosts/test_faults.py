"""A fault on one host: it is reported in time, the other hosts are unharmed, and `up` converges after the cure."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.doctoring import wrong
from support.harness import Answer, Running, wait_until
from support.rack.host import Host
from support.rack.rack import Rack, RackLab

from docker import DockerClient
from labctl.backends.docker.lab import cluster

pytestmark = pytest.mark.docker

SSH_PORT = 12345
# Seconds that `up` takes on a busy machine, besides waiting for a host that does not answer.
WORK = 30
# Seconds until a lost host is reported: 4 x 2 of silence, and 5 for processes that ignore TERM.
LOST = 15
# Generous limit for a busy machine; the run's cause shows that the lost host ended it, and no timeout.
BUSY = 120


@pytest.fixture(scope="module")
def lab(shared_rack: Rack, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RackLab]:
    """Yield a lab over three hosts, up; each test leaves it up."""
    made = shared_rack.lab(tmp_path_factory.mktemp("lab"), f"{family}-faults", shared_rack.hosts(3), {})
    made.call("up").expect(0)
    yield made
    shared_rack.clear()


def identities(lab: RackLab) -> dict[str, str]:
    """Return node -> container id of the running containers."""
    return {node: str(container.id) for node, container in lab.containers().items() if container.status == "running"}


def refused(lab: RackLab, host: str, reason: str) -> Answer:
    """Run `up`, which must exit with 3 in time and blame this host for this reason; return its answer."""
    answer = lab.call("up", "--json").expect(3)
    error = answer.json["error"]
    assert error["node"] == host
    assert reason.lower() in error["message"].lower()
    assert "hosts failed" not in error["message"]
    assert error["hint"]
    assert answer.seconds < cluster.REACHING + WORK
    return answer


def converges(lab: RackLab, kept: dict[str, str]) -> None:
    """Run `up`; assert that the lab is up and that the containers ``kept`` still run."""
    lab.call("up").expect(0)
    assert lab.call("status", "--json").json["state"] == "up"
    assert {node: identity for node, identity in identities(lab).items() if node in kept} == kept


def states(status: Any) -> dict[str, str]:
    """Return node -> state of a status document."""
    return {node["name"]: node["state"] for node in status["nodes"]}


def unharmed(lab: RackLab, but: str) -> dict[str, str]:
    """Return node -> container id of the running containers, without the node ``but``."""
    return {node: identity for node, identity in identities(lab).items() if node != but}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        pytest.param(Host.drop, "timed out", id="unreachable", marks=pytest.mark.slow),
        pytest.param(Host.stop_engine, "Docker", id="daemon-down", marks=pytest.mark.slow),
        pytest.param(Host.hang_engine, "does not answer", id="daemon-hangs", marks=pytest.mark.slow),
        pytest.param(Host.change_host_key, "host key", id="host-key-changed"),
        pytest.param(Host.keep_from_docker, "docker", id="no-right-to-docker", marks=pytest.mark.slow),
    ],
)
def test_a_host_in_trouble_is_named_and_the_others_are_unharmed(
    lab: RackLab, trouble: Callable[[Host], None], reason: str
) -> None:
    """Five faults of h2: `up` and `status` exit with 3 and name it; after the cure `up` converges."""
    kept = unharmed(lab, but="worker-1")
    host = lab.hosts[1]
    trouble(host)
    try:
        refused(lab, "h2", reason)
        status = lab.call("status", "--json").expect(3).json
        assert states(status) == {**dict.fromkeys(kept, "running"), "worker-1": "unreachable"}
        assert [(host["host"], reason.lower() in host["message"].lower()) for host in status["unreachable"]] == [
            ("h2", True)
        ]
        assert {node: container.status for node, container in lab.on(lab.hosts[0]).containers().items()} == {
            "launcher": "running",
            "worker-0": "running",
        }
    finally:
        host.cure()
    converges(lab, kept)


def test_a_key_that_a_host_does_not_take_is_named(lab: RackLab, shared_rack: Rack) -> None:
    """Another key for h3 in hosts.txt: `up` exits with 3, permission denied, no container changes."""
    kept = identities(lab)
    hosts = lab.path / "hosts.txt"
    right = hosts.read_text()
    first, second, third = lab.hosts
    hosts.write_text(f"{first.line()}\n{second.line()}\n{third.line(key=shared_rack.other_key)}\n")
    try:
        refused(lab, "h3", "permission denied for ann with the key")
    finally:
        hosts.write_text(right)
    assert identities(lab) == kept


def test_one_machine_by_two_names_is_refused_before_anything_is_done(lab: RackLab) -> None:
    """hosts.txt lists h2 twice: `up` exits with 2 and names both, no container changes."""
    kept = identities(lab)
    hosts = lab.path / "hosts.txt"
    right = hosts.read_text()
    hosts.write_text(f"{right}\nh2-again {lab.hosts[1].line(port='').partition(' ')[2]}\n")
    try:
        error = lab.call("up", "--json").expect(2).json["error"]
        assert "`h2-again` is the same machine as `h2` on line 2" in error["message"]
    finally:
        hosts.write_text(right)
    assert identities(lab) == kept


def test_a_host_with_another_persons_lab_of_this_name_is_left_alone(lab: RackLab, image: str) -> None:
    """Label the container as a lab's from another machine."""
    kept = identities(lab)
    labels = {"lab": lab.name, "node": "worker-9", "role": "worker", "owner": "bob@desk", "directory": "/home/bob/lab"}
    engine: DockerClient = lab.hosts[2].engine
    theirs = engine.containers.run(
        image,
        ["600"],
        entrypoint="sleep",
        detach=True,
        labels={f"labctl.{name}": value for name, value in labels.items()},
    )
    try:
        refused(lab, "h3", "bob@desk")
        theirs.reload()
        assert theirs.status == "running"
    finally:
        theirs.remove(force=True)
    assert identities(lab) == kept


def test_a_run_is_refused_where_another_has_the_port_at_which_its_ranks_meet(lab: RackLab) -> None:
    """bob listens on 29500 of h2: a run with it exits with 3, one without passes."""
    lab.hosts[1].occupy(29500)
    try:
        # The rendezvous port is free on these hosts.
        lab.call("run", "hello", "--include", "worker-0@worker-2").expect(0)
        error = lab.call("run", "hello", "--include", "worker-1@worker-2", "--json").expect(3).json["error"]
        assert error["node"] == "h2"
        assert "h2: port 29500 (LAB_MASTER_PORT)" in error["message"]
        assert "in use (user bob)" in error["message"]
        assert "LAB_MASTER_PORT=29501" in error["hint"]
    finally:
        lab.hosts[1].cure()


@contextmanager
def away(lab: RackLab, *numbers: int, **fields: object) -> Iterator[None]:
    """In the block, let these hosts' lines in hosts.txt have port 1, where no sshd listens, or these fields."""
    hosts = lab.path / "hosts.txt"
    right = hosts.read_text()
    lines = [
        host.line(**(fields or {"port": 1})) if number in numbers else host.line()
        for number, host in enumerate(lab.hosts)
    ]
    hosts.write_text("\n".join(lines))
    try:
        yield
    finally:
        hosts.write_text(right)


def test_a_host_that_does_not_answer_is_named_by_all_that_looks_and_the_others_are_shown(
    lab: RackLab, shared_rack: Rack
) -> None:
    """status, config, doctor, logs and exec name h2 and its hint; h3 is used."""
    nobody = ipaddress.ip_network(shared_rack.network.attrs["IPAM"]["Config"][0]["Subnet"])[-4]
    with away(lab, 1, address=nobody):
        shown = lab.call("status").expect(3).out
        assert "worker-1  h2    unreachable" in shown
        assert "h2 (" in shown
        assert "unreachable: " in shown
        assert "hint: ping -c 3" in shown
    with away(lab, 1):
        rows = lab.call("config", "--json").expect(0).json["decided"]
        (decided,) = (row for row in rows if row["key"] == "accelerator")
        assert decided["value"] == "cpu"
        assert "on h1, h3; on h2 when last reached; h2 (" in decided["why"]
        findings = lab.call("doctor", "--node", "worker-1", "--json").expect(3).json["findings"]
        assert [(finding["node"], finding["code"]) for finding in wrong(findings)] == [("h2", "LAB-HOST-004")]
        assert {finding["node"] for finding in findings} == {"h2", "local"}
        for arguments in (("logs", "worker-1"), ("exec", "-n", "worker-1", "--", "true"), ("logs",)):
            answer = lab.call(*arguments).expect(3)
            assert "h2 (" in answer.err
            assert "hint: " in answer.err
        assert "worker-2-1  | " in answer.out
        lab.call("exec", "-n", "worker-2", "--", "true").expect(0)


def test_where_no_host_answers_each_is_named_and_nothing_is_claimed_of_any(lab: RackLab) -> None:
    """status is unknown, doctor finds each host, and config says accelerator unknown."""
    with away(lab, 0, 1, 2):
        status = lab.call("status", "--json").expect(3).json
        assert (status["state"], set(states(status).values())) == ("unknown", {"unreachable"})
        assert [host["host"] for host in status["unreachable"]] == ["h1", "h2", "h3"]
        findings = lab.call("doctor", "--json").expect(3).json["findings"]
        assert [finding["node"] for finding in findings if finding["level"] == "error"] == ["h1", "h2", "h3"]
        of_hosts = {"LAB-HOST-001", "LAB-ENGINE-001", "LAB-MOUNT-001", "LAB-DISK-002", "LAB-NET-006"}
        assert not of_hosts & {finding["code"] for finding in findings}
        for path in (lab.path / ".lab/facts").iterdir():
            path.unlink()
        rows = lab.call("config", "-s", "LAB_ACCELERATOR=auto", "--json").expect(0).json["decided"]
        (decided,) = (row for row in rows if row["key"] == "accelerator")
        assert decided["value"] == "unknown"
        assert all(f"{name} (" in decided["why"] for name in ("h1", "h2", "h3"))
    # `status` records the hosts' reports again.
    lab.call("status").expect(0)


@pytest.mark.slow
def test_down_names_a_host_that_it_cannot_reach_and_cleans_the_others(lab: RackLab) -> None:
    """h2 is silent: `down` exits with 3, h1 and h3 are empty; after the cure h2 too."""
    lab.hosts[1].drop()
    try:
        assert lab.call("down", "--json").expect(3).json["error"]["node"] == "h2"
        assert lab.on(lab.hosts[0]).containers() == lab.on(lab.hosts[2]).containers() == {}
        shown = lab.call("status", "--json").expect(3).json
        assert (shown["state"], states(shown)) == ("unknown", {"worker-1": "unreachable"})
    finally:
        lab.hosts[1].cure()
    lab.call("down").expect(0)
    assert lab.labelled() == []
    lab.call("up").expect(0)


def ranks_up(lab: RackLab, run: Running, before: set[str]) -> str | None:
    """Return the id of a new run once its three ranks have printed; None before; fail if labctl has ended."""
    assert run.process.poll() is None, run.out + run.err
    logs = {path.parent.name: path.read_text() for path in lab.path.glob("runs/*/output.log")}
    return next((name for name in logs.keys() - before if logs[name].count("does not listen") == 3), None)


def left_of(lab: RackLab, run_id: str) -> list[str]:
    """List the nodes in whose running containers a process of this run is left, sorted."""
    search = ["sh", "-c", 'grep -slaF -- "$0" /proc/[0-9]*/environ', f"LABCTL_RUN_ID={run_id}"]
    running = {node: container for node, container in lab.containers().items() if container.status == "running"}
    return sorted(node for node, container in running.items() if container.exec_run(search, user="1000:1000").output)


@pytest.mark.parametrize(
    ("number", "trouble", "limit"),
    [
        pytest.param(2, Host.kill, BUSY, id="a-workers-host-dies"),
        pytest.param(2, Host.drop, LOST, id="a-workers-host-falls-silent", marks=pytest.mark.slow),
        pytest.param(2, Host.stop_engine, BUSY, id="a-workers-engine-stops", marks=pytest.mark.slow),
        pytest.param(0, Host.kill, BUSY, id="the-launchers-host-dies", marks=pytest.mark.slow),
        pytest.param(0, Host.drop, BUSY, id="the-launchers-host-falls-silent", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_is_lost_ends_the_run_and_up_heals_it_once_it_is_back(
    lab: RackLab, number: int, trouble: Callable[[Host], None], limit: float
) -> None:
    """Exit code 4, node-lost, where the run's files stay; later `up` converges."""
    kept = identities(lab)
    host = lab.hosts[number]
    remaining = replace(lab, hosts=tuple(other for other in lab.hosts if other is not host))
    before = set(lab.run_ids())
    with lab.start("run", "stubborn", "--launcher", "deepspeed", "--json") as run:
        run_id = wait_until(lambda: ranks_up(lab, run, before), 120, "three ranks run")
        assert left_of(lab, run_id) == ["launcher", "worker-0", "worker-1", "worker-2"]
        trouble(host)
        began = time.monotonic()
        try:
            answer = run.answer(BUSY).expect(4)
            result = answer.json
            ended = time.monotonic()
            assert left_of(remaining, run_id) == []
        finally:
            host.cure()
    assert (result["verdict"], result["cause"]) == ("ERROR", "node-lost")
    kept_there = {host.name: f"{host.home}/.labctl/{lab.name}.{host.name}/runs/.outputs/{run_id}" for host in lab.hosts}
    # ssh still fetches the files if only the engine has failed.
    stays = trouble is not Host.stop_engine
    assert (f"files of the run stay on {host.name} in {kept_there[host.name]}" in answer.err) is stays
    assert bool(host.shell('[ ! -e "$1" ] || echo there', kept_there[host.name])) is stays
    assert [host.shell('[ ! -e "$1" ] || echo there', kept_there[host.name]) for host in remaining.hosts] == ["", ""]
    assert f"worker-{number}" in result["message"] or f"host {host.name}" in result["message"]
    assert ended - began < limit
    converges(lab, kept)
    lab.call("run", "hello").expect(0)
    assert left_of(lab, run_id) == []
    assert host.shell('[ ! -e "$1" ] || echo there', kept_there[host.name]) == ""


def test_ctrl_c_ends_a_run_on_all_hosts(lab: RackLab) -> None:
    """Ctrl-C: exit code 130, interrupted, and no process of the run is left on three hosts."""
    before = set(lab.run_ids())
    with lab.start("run", "stubborn", "--json") as run:
        run_id = wait_until(lambda: ranks_up(lab, run, before), 120, "three ranks run")
        run.press()
        assert run.answer(BUSY).expect(130).json["cause"] == "interrupted"
    assert left_of(lab, run_id) == []
