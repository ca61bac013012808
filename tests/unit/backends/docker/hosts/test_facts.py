"""Facts of a host from the survey script, compared with those of this machine's own functions."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import sysfs

from labctl import accelerators
from labctl.accelerators import observe
from labctl.backends.docker.hosts import facts as survey
from labctl.backends.docker.lab import cluster
from labctl.backends.docker.lab.device_requests import has_cdi
from labctl.config.inventory import parse
from labctl.errors import ConfigError, HostError
from labctl.model import Device
from labctl.system import hostdump, procfs

SHELLS = {"sh": ["sh"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
TOLD = """\
Last login: today
PS1 is unset
labctl survey
fact id
\tuid=1000(ada) gid=1001(people) groups=1001(people),998(docker)
fact home
\t/home/ada
fact ssh
\t192.0.2.7 51000 10.0.0.5 22
file proc/meminfo
     1\tMemTotal:       2048 kB

file etc/passwd
     1\troot:x:0:0::/root:/bin/sh
     2\tada:x:1000:1001:Ada,,,:/home/ada:/bin/bash

file etc/os-release
     1\tPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"

lines
     1\t==> /dev/null <==
     2\t
     3\t==> proc/sys/kernel/hostname <==
     4\tgpu-1
     5\t
     6\t==> proc/sys/kernel/osrelease <==
     7\t
     8\t==> sys/class/net/eth0/mtu <==
     9\t9000

folder run/lock
\t1777
file proc/net/route
     1\tIface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
     2\teth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
     3\teth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0

fact addresses
     1\t2: eth0    inet 10.0.0.5/24 brd 10.0.0.255 scope global eth0\\       valid_lft forever

file proc/net/tcp
\t0: 00000000:3039 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 7126 1
\t1: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 7127 1
file proc/net/tcp6
\t0: 00000000000000000000000000000000:0BB8 00000000000000000000000000000000:0000 0A 0:0 00:0 0 4242 0 7128 1
fact socket /var/run/docker.sock
\t
fact docker
\t/data/docker
fact free docker
\t1000 4096
fact free home
\t
nodes
fact clock
\t1700000300.5
end
ready
"""


def shell(name: str) -> list[str]:
    """Return the command of this shell; skip the test if it is not installed."""
    argv = SHELLS[name]
    if not shutil.which(argv[0]):
        pytest.skip(f"no {argv[0]} on this machine")
    return argv


def run(*argv: str, **environment: str) -> str:
    """Run a command with these variables; return its stdout; fail if it exits with an error or writes to stderr."""
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    assert done.stderr == ""
    return done.stdout


def ask(root: Path | str = "/", by: str = "sh", **environment: str) -> hostdump.HostDump:
    """Run the survey script with shell ``by`` on the files below ``root``; return the facts that it reports."""
    return hostdump.read(run(*shell(by), "-c", survey.script(), "sh", str(root), **environment), "gpu-1")


# --- what the script tells -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", SHELLS)
def test_this_machine_is_told_as_it_is_seen_from_within(tmp_path: Path, by: str) -> None:
    """The survey of this machine, read by each shell, gives the same accelerator and host as observe()."""
    dump = ask(by=by)
    accelerator, observed = cluster.observe("auto", dump)
    assert (accelerator, replace(observed, name="local", home="")) == observe("auto")
    assert (observed.name, observed.home) == ("gpu-1", os.environ["HOME"])


def nvidia(root: Path) -> None:
    """Write the sysfs of three NVIDIA GPUs, two NUMA nodes and two InfiniBand cards."""
    sysfs.cores(root, "0-7")
    for index, address in enumerate(("0000:c1:00.0", "0000:0b:00.0", "10000:01:00.0")):
        sysfs.nvidia(root, address, index, numa=index % 2, cores="0-3" if index % 2 else "4-11")
    sysfs.put(root / "sys/module/nvidia/version", "550.54.15\n")
    for node in range(2):
        sysfs.put(root / f"sys/devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}\n")
        sysfs.put(root / f"dev/infiniband/uverbs{node}")
        card = root / f"sys/class/infiniband/mlx5_{node}"
        sysfs.put(card / "ports/1/link_layer", "InfiniBand\n")
        sysfs.put(card / "ports/1/state", "4: ACTIVE\n")
        (card / f"device/net/ib{node}").mkdir(parents=True)


def gaudis(root: Path) -> None:
    """Write the sysfs of three Gaudis, one of them lost, and of an NPU."""
    sysfs.gaudi(root, 0, "0000:00:0b.0", driver="intel_vpu", vendor="0x8086")
    for index in (1, 2, 10):
        attributes = {
            "module_id": str(index),
            "device_type": "GAUDI2",
            "status": "Operational" if index < 10 else "Lost",
        }
        sysfs.gaudi(root, index, f"0000:{index + 16}:00.0", numa=0, told=attributes)
    sysfs.put(root / "sys/module/habanalabs/version", "1.18.0-ee698fb\n")
    sysfs.put(root / "etc/gaudinet.json", "{}")


def intel(root: Path) -> None:
    """Write the sysfs of three Intel GPUs, two of which report their memory."""
    sysfs.render_node(root, 128, "0000:00:02.0", driver="i915")
    folder = sysfs.render_node(root, 129, "0000:4d:00.0", numa=0, cores="0")
    sysfs.put(folder / "tile0/physical_vram_size_bytes", f"{8 << 30}\n")
    sysfs.put(sysfs.render_node(root, 130, "0000:5d:00.0", driver="i915") / "drm/card2/lmem_total_bytes", "1024\n")
    sysfs.put(root / "sys/module/xe/version", "1.2.3\n")
    sysfs.put(root / "proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
    sysfs.put(root / "proc/meminfo", "MemTotal: 2048 kB\n")
    sysfs.put(root / "proc/cpuinfo", "processor : 0\nflags : fpu avx2\n")


def broken(root: Path) -> None:
    """Write the sysfs of cards without the right driver, of broken links and unreadable attributes."""
    sysfs.card(root, "0000:3b:00.0", "0x10de", driver="nouveau")
    sysfs.card(root, "0000:3c:00.0", "0x1da3")
    sysfs.card(root, "0000:3d:00.0", "0x1002", kind="0x040300")
    sysfs.put(root / "dev/accel/accel0")
    sysfs.link(root / "sys/class/accel/accel0/device", root / "gone")
    sysfs.link(root / "dev/dri/by-path/pci-0000:03:00.0-render", Path("../renderD200"))
    folder = sysfs.gaudi(root, 1, "0000:19:00.0")
    (folder / "status").mkdir()
    sysfs.put(folder / "module_id")


@pytest.mark.parametrize("by", SHELLS)
@pytest.mark.parametrize("plant", [nvidia, gaudis, intel, broken])
def test_devices_are_detected_from_what_was_told(tmp_path: Path, plant: Callable[[Path], None], by: str) -> None:
    """The survey of NVIDIA, Gaudi, Intel and broken cards, by each shell, gives the same as a local look."""
    remote = tmp_path / "there"
    plant(remote)
    dump = ask(remote, by)
    # Names of groups are asked of this machine, wherever its files are.
    dump.files.pop("etc/group", None)
    accelerator, observed = cluster.observe("auto", dump)
    assert (accelerator, replace(observed, name="local", home="")) == observe("auto", remote)
    assert accelerators.find_all(dump.root) == accelerators.find_all(remote) != {}
    assert accelerators.remarks(dump.root) == accelerators.remarks(remote)
    assert procfs.fabrics(dump.root) == procfs.fabrics(remote)


def test_the_groups_of_device_files_are_the_hosts_own(tmp_path: Path) -> None:
    """observe() adds the groups of a device file, of video and of render as on the host."""
    intel(tmp_path / "there")
    dump = ask(tmp_path / "there")
    dump.nodes["dev/dri/renderD129"] = 4242
    dump.files["etc/group"] = "video:x:44:\nrender:x:109:\n"
    _, observed = cluster.observe("intel", dump)
    assert {44, 109, 4242} <= set(observed.groups)


def test_who_listens_where_is_told(tmp_path: Path) -> None:
    """Listening ports, of any address, have their user's name; the port of a connection is not among them."""
    with socket.create_server(("127.0.0.1", 0)) as four, socket.create_server(("127.0.0.1", 0)) as taken:
        port, other = four.getsockname()[1], taken.getsockname()[1]
        # A connection is no listener, though it has a port of its own.
        with socket.create_connection(("127.0.0.1", other)) as connection:
            ports = ask().facts_at(0).ports
            assert {port, other} <= set(ports)
            assert connection.getsockname()[1] not in ports
    assert ports[port] == pwd.getpwuid(os.getuid()).pw_name


def test_space_is_that_of_the_home_directorys_disk_or_of_where_it_would_be(tmp_path: Path) -> None:
    """home_free is that of the file system of HOME, or of its nearest existing parent."""
    for home in (tmp_path, tmp_path / "not/there", Path("/dev/shm/not/there")):  # noqa: S108 - a file system of its own
        disk = next(parent for parent in home.parents if parent.exists())
        assert ask(HOME=str(home)).facts_at(0).home_free == pytest.approx(shutil.disk_usage(disk).free, rel=0.1)


def test_the_clock_is_told_last_and_compared_with_this_ones() -> None:
    """The skew of the survey's clock to a time 300 s ago is 300 s."""
    before = time.time()
    survey = ask()
    skew = survey.facts_at(before - 300).skew
    assert 300 <= skew <= 300 + time.time() - before


def test_a_large_host_tells_all_in_a_second(tmp_path: Path) -> None:
    """The survey of eleven GPUs and 500 other cards takes less than a second of processor time."""
    nvidia(tmp_path)
    for index in range(16, 24):
        sysfs.nvidia(tmp_path, f"0000:{index}:00.0", index, numa=0, cores="0-127")
        sysfs.render_node(tmp_path, 112 + index, f"0001:{index}:00.0")
    for index in range(500):
        sysfs.card(tmp_path, f"0002:{index // 8:02x}:{index % 8:02x}.0", "0x8086", kind="0x060400")
    before = os.times()
    ask(tmp_path)
    after = os.times()
    assert sum(after[2:4]) - sum(before[2:4]) < 1, "processor time of the script and of all that it starts"


# --- reading it ----------------------------------------------------------------------------------------------


def test_facts_are_read_off_what_was_told(tmp_path: Path) -> None:
    """A planted survey gives its user, ports with owners, addresses, memory, MTU and clock skew."""
    dump = hostdump.read(TOLD, "gpu-1")
    facts = dump.facts_at(1_700_000_000)
    assert (facts.user, facts.uid, facts.home) == ("ada", 1000, "/home/ada")
    assert (facts.skew, facts.home_free) == (300.5, None)
    assert facts.ports == {12345: "ada", 22: "root", 3000: "user 4242"}
    assert facts.listening == {12345: ("0.0.0.0",), 22: ("127.0.0.1",), 3000: ("::",)}  # noqa: S104 - no binding
    assert dump.network.addresses == (("eth0", "10.0.0.5"),)
    assert (dump.network.interfaces, dump.network.reached_by) == (("eth0",), "eth0")
    _, observed = cluster.observe("auto", dump)
    assert (observed.uid, observed.gid, observed.memory, observed.mtu, observed.locks) == (
        1000,
        1001,
        2 << 20,
        9000,
        "/run/lock",
    )


@pytest.mark.parametrize("folder", ["/etc/cdi", "/var/run/cdi"])
def test_an_engines_folders_of_cdi_devices_are_the_hosts(tmp_path: Path, folder: str) -> None:
    """A CDI file in the host's /etc or /run is in the survey, and has_cdi() finds it only in the engine's folders."""
    (tmp_path / "run/cdi").mkdir(parents=True)
    sysfs.link(tmp_path / "var/run", tmp_path / "run")
    text = 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n  containerEdits: {}\n'
    sysfs.put(tmp_path / folder.strip("/") / "nvidia.yaml", text)
    dump = ask(tmp_path)
    (path,) = (dump.root / folder).glob("*")
    assert (path.name, path.read_text()) == ("nvidia.yaml", text)
    gpus = (Device(id="0", path="/dev/nvidia0"),)
    assert has_cdi({"CDISpecDirs": ["/nowhere", folder]}, "nvidia.com/gpu", gpus, dump.root)
    assert not has_cdi({"CDISpecDirs": ["/nowhere"]}, "nvidia.com/gpu", gpus, dump.root)


@pytest.mark.parametrize(
    ("text", "last"),
    [("", "no output"), ("This account is not available.", "This account"), (TOLD[:400], "the text ends with")],
    ids=["nothing", "no shell", "cut off"],
)
def test_half_a_text_is_refused_with_its_end(text: str, last: str) -> None:
    """An empty, foreign or cut-off survey raises HostError of the host, with its last text."""
    with pytest.raises(HostError, match=last) as caught:
        hostdump.read(text, "gpu-1")
    assert (caught.value.node, "gpu-1" in caught.value.message) == ("gpu-1", True)


def test_no_path_leads_out_of_what_was_told(tmp_path: Path) -> None:
    """Absolute paths, `..` and links of the survey lead to no file of this machine."""
    (tmp_path / "secret").write_text("x")
    dump = hostdump.read("labctl survey\nlink sys/x\n\t../../etc\nend\n", "gpu-1")
    for path in (f"{tmp_path}/secret", f"../../{tmp_path}/secret", "sys/x/passwd"):
        assert not (dump.root / path).exists()
        with pytest.raises(FileNotFoundError):
            (dump.root / path).read_text()


@pytest.mark.parametrize(
    "entry",
    ["folder a\n\tabc", "nodes\n\tx", "fact id\n\tuid=1(a) gid=1(a)"],
    ids=["mode", "group", "no home"],
)
def test_a_host_that_tells_what_cannot_be_is_named(tmp_path: Path, entry: str) -> None:
    """A survey with an invalid mode, group or without home raises HostError of the host."""

    def use() -> None:
        """Read a survey with this entry and its facts."""
        dump = hostdump.read(f"labctl survey\n{entry}\nend\n", "gpu-1")
        dump.facts_at(0)

    with pytest.raises(HostError, match="facts from gpu-1 are invalid") as caught:
        use()
    assert caught.value.node == "gpu-1"


def test_a_host_without_the_wanted_devices_is_named(tmp_path: Path) -> None:
    """observe() of nvidia on a host without one raises HostError of the host."""
    dump = hostdump.read(TOLD, "gpu-1")
    with pytest.raises(HostError, match="no nvidia device") as caught:
        cluster.observe("nvidia", dump)
    assert caught.value.node == "gpu-1"


def test_two_names_of_one_machine_are_refused_with_both(tmp_path: Path) -> None:
    """Hosts with the same boot id and engine id raise ConfigError; with one of them equal they pass.

    A copied machine has the same engine id, and a container its neighbour's kernel.
    """

    def booted(name: str, boot: str) -> hostdump.HostDump:
        """Return the survey of a root with this boot id."""
        root = tmp_path / name
        sysfs.put(root / "proc/sys/kernel/random/boot_id", f"{boot}\n")
        return ask(root)

    hosts = parse("a\nb\nc\nd address=10.0.0.5\n", "hosts.txt")
    dumps = {"a": booted("a", "1"), "b": booted("b", "2"), "c": booted("c", "1"), "d": booted("d", "2")}
    survey.require_distinct(hosts, dumps, {"a": "X", "b": "X", "c": "Y"})
    with pytest.raises(ConfigError, match=r"^hosts\.txt:4: `d` is the same machine as `b` on line 2$"):
        survey.require_distinct(hosts, dumps, {"a": "X", "b": "X", "c": "Y", "d": "X"})
