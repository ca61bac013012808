"""`up`, `status` and `down`: created, untouched and removed objects."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from support.harness import Lab, wait_until

pytestmark = pytest.mark.docker

FreshLab = Callable[..., Lab]


def host_mtu() -> int:
    """Return the MTU of the default route's interface; 1500 without such a route."""
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    default = sorted((int(route[6]), route[0]) for route in routes if route[1] == "00000000" == route[7])
    return int(Path(f"/sys/class/net/{default[0][1]}/mtu").read_text()) if default else 1500


def host_config(lab: Lab) -> dict[str, Any]:
    """Return node -> HostConfig of the lab's containers."""
    return {node: container.attrs["HostConfig"] for node, container in lab.containers().items()}


@contextmanager
def stranger(lab: Lab, image: str) -> Iterator[Container]:
    """Run a container with the label of the lab's compose project that belongs to no lab; yield it; remove it."""
    container = lab.engine.containers.run(
        image,
        entrypoint=["sleep", "3600"],
        detach=True,
        network_mode="none",
        labels={"com.docker.compose.project": f"labctl-{lab.name}", "com.docker.compose.service": "worker-9"},
    )
    try:
        yield container
    finally:
        container.remove(force=True)


@pytest.mark.smoke
def test_up_makes_one_launcher_and_the_workers_with_their_labels(lab: Lab) -> None:
    """Launcher and two workers run, with hostname and labels of lab and role."""
    containers = lab.containers()
    assert sorted(containers) == ["launcher", "worker-0", "worker-1"]
    for node, container in containers.items():
        assert container.status == "running"
        assert container.labels["labctl.lab"] == lab.name
        assert container.labels["labctl.role"] == ("launcher" if node == "launcher" else "worker")
        assert container.attrs["Config"]["Hostname"] == node


def test_the_lab_has_one_network_with_the_mtu_of_the_host(lab: Lab) -> None:
    """Bring a lab up: it has a bridge network, whose MTU and the containers' is that of the host's default route."""
    (network,) = lab.networks()
    assert network.attrs["Driver"] == "bridge"
    assert network.attrs["Options"]["com.docker.network.driver.mtu"] == str(host_mtu())
    for node in lab.containers():
        assert lab.inside(node, "cat", "/sys/class/net/eth0/mtu").strip() == str(host_mtu())


def test_containers_hold_no_more_privilege_than_sshd_needs(lab: Lab) -> None:
    """All capabilities but the listed ones are dropped; no-new-privileges, no devices."""
    granted = {
        "launcher": {"SETGID", "SETUID"},
        "worker-0": {"AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT"},
        "worker-1": {"AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT"},
    }
    for node, config in host_config(lab).items():
        assert config["CapDrop"] == ["ALL"]
        assert {capability.removeprefix("CAP_") for capability in config["CapAdd"]} == granted[node]
        assert not config["Privileged"]
        assert "no-new-privileges:true" in config["SecurityOpt"]
        assert not config["Devices"]
        assert config["PidMode"] == config["IpcMode"].replace("private", "") == config["UTSMode"] == ""
        assert "NoNewPrivs:\t1" in lab.inside(node, "cat", "/proc/self/status")


def test_containers_have_an_init_bounded_logs_and_bounded_processes(lab: Lab) -> None:
    """Each container has an init, 3 logs of 10 MB, 8192 processes and 64 MiB of /dev/shm."""
    for config in host_config(lab).values():
        assert config["Init"] is True
        assert config["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}}
        assert config["PidsLimit"] == 8192
        assert config["ShmSize"] == 64 * 2**20


def test_nothing_is_published_and_the_docker_socket_stays_outside(lab: Lab) -> None:
    """No container publishes a port or mounts docker.sock."""
    for container in lab.containers().values():
        assert not container.attrs["HostConfig"]["PortBindings"]
        assert not any(container.attrs["NetworkSettings"]["Ports"].values())
        assert not [mount for mount in container.attrs["Mounts"] if "docker.sock" in mount["Source"]]


def test_workers_share_the_cores_without_overlap(lab: Lab) -> None:
    """Each worker has CPUs of its own; skip the test with a single CPU."""
    shares = [
        set(lab.inside(node, "python", "-c", "import os; print(*os.sched_getaffinity(0))").split())
        for node in ("worker-0", "worker-1")
    ]
    if len(set.union(*shares)) < 2:
        pytest.skip("one core cannot be shared without overlap")
    assert all(shares)
    assert not any(one & other for one, other in combinations(shares, 2))


@pytest.mark.smoke
def test_a_second_up_touches_no_container(lab: Lab) -> None:
    """A second `up` keeps all containers."""
    before = lab.identities()
    lab.call("up").expect(0)
    assert lab.identities() == before


def test_up_with_fewer_nodes_removes_its_own_surplus_and_nothing_else(lab: Lab, image: str) -> None:
    """LAB_NODES=1 removes worker-1, and not a foreign container of the same project."""
    with stranger(lab, image) as container:
        lab.call("up", "--setting", "LAB_NODES=1").expect(0)
        assert sorted(lab.containers()) == ["launcher", "worker-0"]
        lab.call("up").expect(0)
        assert sorted(lab.containers()) == ["launcher", "worker-0", "worker-1"]
        container.reload()
        assert container.status == "running"


def test_a_worker_that_was_removed_comes_back_alone(lab: Lab) -> None:
    """Remove worker-1 by hand: status is partial, and `up` recreates it and keeps the others."""
    before = lab.identities()
    lab.containers()["worker-1"].remove(force=True)
    assert lab.call("status", "--json").expect(0).json["state"] == "partial"
    lab.call("up").expect(0)
    after = lab.identities()
    assert after.pop("worker-1") != before.pop("worker-1")
    assert after == before


def test_a_worker_that_was_stopped_is_started_again(lab: Lab) -> None:
    """Kill worker-0: `up` starts it and keeps the others."""
    before = lab.identities()
    lab.containers()["worker-0"].kill()
    lab.call("up").expect(0)
    after = lab.identities()
    assert lab.containers()["worker-0"].status == "running"
    assert {node: after[node] for node in ("launcher", "worker-1")} == {
        node: before[node] for node in ("launcher", "worker-1")
    }


def test_status_says_what_docker_says(lab: Lab) -> None:
    """`status --json` lists name, role, host, state, slots and health of each node."""
    document = lab.call("status", "--json").expect(0).json
    assert document["schema"] == 1
    assert (document["lab"], document["state"]) == (lab.name, "up")
    shown = [tuple(node[key] for key in ("name", "role", "host", "state", "slots")) for node in document["nodes"]]
    assert shown == [
        ("launcher", "launcher", "local", "running", 0),
        ("worker-0", "worker", "local", "running", 1),
        ("worker-1", "worker", "local", "running", 1),
    ]
    health = {node["name"]: node["health"] for node in document["nodes"]}
    assert health["launcher"] is None
    assert {health["worker-0"], health["worker-1"]} <= {"starting", "healthy"}


@pytest.mark.parametrize("command", [("status", "--json"), ("up", "--dry-run"), ("down", "--dry-run")], ids=" ".join)
def test_looking_changes_nothing(lab: Lab, command: tuple[str, ...]) -> None:
    """status and dry runs of up and down change no container, network or time of a file in .lab/nodes."""

    def state() -> object:
        """Return containers, networks and the modification times of files in .lab/nodes."""
        files = {path: path.stat().st_mtime_ns for path in (lab.path / ".lab/nodes").rglob("*")}
        return lab.identities(), [network.id for network in lab.networks()], files

    before = state()
    lab.call(*command).expect(0)
    assert state() == before


def test_a_dry_run_of_up_on_a_lab_that_is_down_makes_nothing(fresh_lab: FreshLab) -> None:
    """The plan names worker-1; no container, network or file is made."""
    lab = fresh_lab()
    answer = lab.call("up", "--dry-run", "--json").expect(0)
    assert "worker-1" in "\n".join(answer.json["plan"])
    assert not lab.labelled()
    assert not (lab.path / ".lab/nodes").exists()


@pytest.mark.smoke
def test_down_twice_and_with_the_state_directory_deleted(fresh_lab: FreshLab, image: str) -> None:
    """`down` exits with 0 the second time and without .lab too, and removes all of the lab and nothing foreign."""
    lab = fresh_lab(LAB_NODES="1")
    lab.call("up").expect(0)
    with stranger(lab, image) as container:
        lab.call("down").expect(0)
        assert not lab.labelled()
        lab.call("down").expect(0)
        lab.call("up").expect(0)
        assert lab.labelled()
        shutil.rmtree(lab.path / ".lab")
        lab.call("down").expect(0)
        assert not lab.labelled()
        container.reload()
        assert container.status == "running"


def test_clean_removes_keys_and_rendered_files_but_no_run(fresh_lab: FreshLab) -> None:
    """`clean` removes containers and .lab, and keeps the runs."""
    lab = fresh_lab(LAB_NODES="1")
    lab.call("up").expect(0)
    (lab.path / "runs/kept").mkdir(parents=True)
    lab.call("clean").expect(0)
    assert not lab.labelled()
    assert not (lab.path / ".lab").exists()
    assert lab.run_ids() == ["kept"]


@pytest.mark.smoke
@pytest.mark.parametrize("node", ["worker-0", "worker-1"])
def test_the_files_of_a_node_work_by_hand(lab: Lab, node: str) -> None:
    """`docker compose config -q` accepts a node's compose.yml without a word."""
    done = subprocess.run(
        ["docker", "compose", "-f", f".lab/nodes/{node}/compose.yml", "config", "-q"],
        cwd=lab.path,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_private_files_are_for_their_owner_alone(lab: Lab) -> None:
    """No file in .lab has permissions for group or others, except within the caches of runs."""
    cache = lab.path / ".lab/cache"
    for path in (lab.path / ".lab").rglob("*"):
        # Compiled files of runs keep their own modes; their folders are private.
        if path.is_relative_to(cache) and path.parent not in (cache, cache.parent):
            continue
        assert path.stat().st_mode & 0o077 == 0, path


def test_workers_become_healthy(lab: Lab) -> None:
    """Both workers' health checks are healthy within 120 s."""

    def health() -> set[str]:
        """Return the health states of the workers' containers."""
        return {
            container.attrs["State"]["Health"]["Status"]
            for node, container in lab.containers().items()
            if node != "launcher"
        }

    wait_until(lambda: health() == {"healthy"}, 120, "every worker is healthy")


def test_shared_memory_is_as_large_as_the_settings_say(lab: Lab) -> None:
    """60 MiB fit into worker-1's /dev/shm, 70 MiB do not."""
    fill = "dd if=/dev/zero of=/dev/shm/filled bs=1M count=$1 status=none; code=$?; rm /dev/shm/filled; exit $code"
    enough = lab.call("exec", "-n", "worker-1", "--", "sh", "-c", fill, "sh", "60")
    too_much = lab.call("exec", "-n", "worker-1", "--", "sh", "-c", fill, "sh", "70")
    assert (enough.code, too_much.code) == (0, 1)
    assert "No space left on device" in too_much.err


def test_limits_of_the_compose_file_hold_in_a_container_and_over_ssh(lab: Lab) -> None:
    """ulimit of stack, files and locked memory equals the container's, in exec and ssh."""
    limits = {limit["Name"]: limit for limit in lab.containers()["worker-1"].attrs["HostConfig"]["Ulimits"]}
    assert "stack" in limits
    for name, (flag, unit) in {"stack": ("s", 1024), "nofile": ("n", 1), "memlock": ("l", 1024)}.items():
        if name not in limits:
            continue  # This machine cannot raise it, which is enough for this lab.
        for way in (("-n", "worker-1", "--", "sh", "-c"), ("--", "ssh", "worker-1")):
            values = lab.call("exec", *way, f"ulimit -S{flag}; ulimit -H{flag}").expect(0).out.split()
            expected = [limits[name]["Soft"], limits[name]["Hard"]]
            assert [-1 if value == "unlimited" else int(value) * unit for value in values] == expected
