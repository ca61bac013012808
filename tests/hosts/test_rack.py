"""The rack: its faults are effective, and removed by the cure."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import RackLabs
from support.harness import wait_until
from support.rack.host import Host
from support.rack.rack import Rack

from docker import DockerClient

pytestmark = pytest.mark.docker


def refusal(rack: Rack, host: Host, *argv: str) -> str:
    """Run a command over ssh that must fail; return its stderr."""
    done = rack.ssh(host, *argv, check=False, patience=2)
    assert done.returncode != 0, done.stdout
    return done.stderr


def reachable(rack: Rack, host: Host) -> bool:
    """Return True if ssh to the host answers with its name."""
    return rack.ssh(host, "hostname").stdout == f"{host.name}\n"


def test_a_host_has_ssh_and_docker_and_no_more(rack: Rack, engine: DockerClient, image: str) -> None:
    """A shared host has ssh, an own engine with the node image, MTU 1400, and no python3, rsync or curl."""
    first, second = rack.hosts(2)
    assert rack.ssh(first, "id -un; hostname; docker images --quiet | wc -l").stdout.split() == ["ann", "h1", "1"]
    assert first.run("which", "python3", "rsync", "curl", check=False).stdout == ""
    assert first.engine.images.get(image).id == engine.images.get(image).id
    assert len({host.info()["ID"] for host in (first.engine, second.engine, engine)}) == 3
    assert first.shell("cat /sys/class/net/eth0/mtu") == "1400\n"


def test_what_a_test_left_is_gone_for_the_next(rack: Rack, image: str) -> None:
    """`rack.clear` removes containers, networks, tags and home files of a host."""
    (host,) = rack.hosts(1)
    host.engine.containers.run(image, ["5000"], entrypoint="sleep", network_mode="host", detach=True)
    host.engine.networks.create("left")
    host.engine.images.get(image).tag("left")
    rack.ssh(host, "mkdir -p .labctl/left && touch .labctl/left/file")
    rack.clear()
    assert host.engine.containers.list(all=True) == []
    assert host.engine.networks.list(["left"]) == []
    assert [image.tags for image in host.engine.images.list()] == [[f"{image}:latest"]]
    assert rack.ssh(host, "ls -A").stdout.split() == [".bash_logout", ".bashrc", ".profile", ".ssh"]


def test_hosts_of_a_test_have_an_empty_engine_and_go_with_it(rack: Rack) -> None:
    """`rack.make` makes a host with this user, uid and port; `rack.clear` removes it."""
    (host,) = rack.make("own", user="cy", uid=1234, port=2200)
    assert rack.ssh(host, "id -u; docker images --quiet").stdout == "1234\n"
    assert host.line(slots=4) == f"own address={host.address} user=cy port=2200 key={rack.key} slots=4"
    rack.clear()
    with pytest.raises(AssertionError, match="No such container"):
        host.run("true")


def test_the_keys_decide(rack: Rack) -> None:
    """Another client key, a changed or an unknown host key: ssh fails; `cure` restores the host key."""
    (host,) = rack.hosts(1)
    assert rack.ssh(host, "true", check=False, key=rack.other_key).returncode == 255
    host.change_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refusal(rack, host, "true")
    host.cure()
    assert reachable(rack, host)
    rack.known_hosts.write_text("")
    assert "No ED25519 host key is known" in refusal(rack, host, "true")


def test_dropped_packets_meet_silence(rack: Rack) -> None:
    """After `drop` ssh to h1 times out and h2 answers; `cure` restores it."""
    first, second = rack.hosts(2)
    first.drop()
    assert "timed out" in refusal(rack, first, "true")
    assert first.engine.ping()
    assert reachable(rack, second)
    first.cure()
    assert reachable(rack, first)


def test_a_full_disk_takes_not_a_byte(rack: Rack) -> None:
    """After `fill_disk` a write fails; `cure` makes room, and `clear` removes the file."""
    (host,) = rack.hosts(1)
    host.fill_disk()
    assert "No space left on device" in refusal(rack, host, "head -c 4096 /dev/zero > more")
    assert rack.ssh(host, "df --output=avail . | tail -1; echo there").stdout.split() == ["0", "there"]
    host.cure()
    rack.ssh(host, "head -c 1000000 /dev/zero > more")
    rack.clear()
    assert rack.ssh(host, "ls").stdout == ""


def test_an_engine_with_a_small_disk_has_no_room_for_an_image(rack: Rack, image: str) -> None:
    """After `small_engine_disk` an import fails; `cure` brings the old images back."""
    (host,) = rack.hosts(1)
    host.small_engine_disk("8m")
    assert host.engine.images.list() == []
    sent = host.run("sh", "-c", "head -c 16000000 /dev/zero > /tmp/big; tar -c /tmp/big | docker import -", check=False)
    assert "no space left on device" in sent.stderr
    host.cure()
    assert host.engine.images.get(image)


def test_a_stopped_engine_says_so_and_starts_again(rack: Rack, image: str) -> None:
    """After `stop_engine` docker cannot connect; `cure` starts the engine with its images."""
    (host,) = rack.hosts(1)
    host.stop_engine()
    assert "Cannot connect to the Docker daemon" in refusal(rack, host, "docker", "version")
    host.cure()
    assert host.engine.images.get(image)


def test_who_is_not_in_the_group_may_not_use_docker(rack: Rack) -> None:
    """After `keep_from_docker` the user gets `permission denied`; `cure` undoes it."""
    (host,) = rack.hosts(1)
    host.keep_from_docker()
    assert "permission denied" in refusal(rack, host, "docker", "version")
    host.cure()
    rack.ssh(host, "docker version")


def test_an_occupied_port_has_an_owner(rack: Rack) -> None:
    """`occupy` makes a listener of user bob on the port; `cure` ends it."""
    (host,) = rack.hosts(1)
    host.occupy(2222, "bob")
    held = "ss --listening --tcp --numeric --extended --no-header sport = :2222"
    assert f"uid:{host.run('id', '-u', 'bob').stdout.strip()} " in host.shell(held)
    host.cure()
    assert host.shell(held) == ""


def test_a_clock_that_is_ahead(rack: Rack) -> None:
    """`clock(300)` sets the host's clock 5 minutes ahead; `cure` sets it right."""
    (host,) = rack.hosts(1)
    host.clock(300)
    assert 295 < int(rack.ssh(host, "date +%s").stdout) - time.time() < 305
    host.cure()
    assert abs(int(rack.ssh(host, "date +%s").stdout) - time.time()) < 5


def test_sshd_can_be_told_to_refuse(rack: Rack) -> None:
    """`sshd(AllowUsers=...)` refuses the user; `cure` restores sshd's configuration."""
    (host,) = rack.hosts(1)
    host.sshd(AllowUsers="bob")
    assert "Permission denied" in refusal(rack, host, "true")
    host.cure()
    assert reachable(rack, host)


def test_a_lab_is_watched_on_all_hosts_that_answer(rack_lab: RackLabs, image: str) -> None:
    """containers() and labelled() cover both hosts, and skip one whose engine is stopped."""
    lab = rack_lab(2)
    first, second = lab.hosts
    for number, host in enumerate(lab.hosts):
        labels = {"labctl.lab": lab.name, "labctl.node": f"worker-{number}"}
        host.engine.containers.run(image, ["5000"], entrypoint="sleep", init=True, labels=labels, detach=True)
    assert sorted(lab.containers()) == lab.labelled() == ["worker-0", "worker-1"]
    assert (lab.path / "hosts.txt").read_text() == f"{first.line()}\n{second.line()}\n"
    second.stop_engine()
    assert lab.labelled() == ["worker-0"]


def test_a_dead_host_comes_back_with_its_disks(rack: Rack, image: str) -> None:
    """`kill` makes ssh fail; `cure` brings the host back with its exited container and file."""
    (host,) = rack.hosts(1)
    host.engine.containers.run(image, ["5000"], entrypoint="sleep", network_mode="host", detach=True)
    rack.ssh(host, "echo kept > file")
    host.kill()
    assert refusal(rack, host, "true")
    host.cure()
    assert [container.status for container in host.engine.containers.list(all=True)] == ["exited"]
    assert rack.ssh(host, "cat file").stdout == "kept\n"


def test_traffic_is_counted_and_a_second_interface_is_another(rack: Rack) -> None:
    """`traffic` counts received bytes; `second_interface` adds an address on an own interface."""
    first, second = rack.hosts(2)
    before = second.traffic()
    rack.ssh(second, "cat > /dev/null", stdin="x" * 1_000_000)
    assert second.traffic().received - before.received > 1_000_000
    addresses = [host.second_interface(rack.fabric) for host in (first, second)]
    assert first.interface(addresses[0]) not in ("", "eth0")
    assert addresses[1] not in {first.address, second.address, addresses[0]}


def test_a_slow_line_lets_through_what_it_says(rack: Rack) -> None:
    """1.2 MB at 8 Mbit/s take more than 0.8 s, from the host and to it."""
    first, second = rack.hosts(2)
    first.slow("8mbit")
    rack.slow_uplink("8mbit")
    began = time.monotonic()
    assert len(rack.ssh(first, "head -c 1200000 /dev/zero | tr '\\0' x").stdout) == 1_200_000
    assert time.monotonic() - began > 0.8
    began = time.monotonic()
    rack.ssh(second, "cat > /dev/null", stdin="x" * 1_200_000)
    assert time.monotonic() - began > 0.8


def test_a_connection_that_is_hung_up_ends_in_the_middle(rack: Rack) -> None:
    """`hang_up` ends an ssh session with 255, and the next one works."""
    (host,) = rack.hosts(1)
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(rack.ssh, host, "sleep 50", check=False)
        wait_until(lambda: host.run("pgrep", "-u", "ann", "-x", "sleep", check=False).stdout, 120, "it sleeps")
        host.hang_up()
        assert asleep.result(40).returncode == 255
    assert reachable(rack, host)


def test_a_program_is_there_only_where_it_was_given(rack: Rack) -> None:
    """`program("rsync")` installs a working rsync on the host."""
    (host,) = rack.hosts(1)
    host.program("rsync")
    assert "rsync  version" in rack.ssh(host, "rsync --version").stdout
