from __future__ import annotations

import grp
import os
from pathlib import Path

from labctl.system import files, procfs

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t010200C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


def put(root: Path, path: str, text: str) -> None:
    """Write the file below root."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_mtu_is_that_of_the_default_route_with_the_lowest_metric(tmp_path: Path) -> None:
    """Read the MTU: that of the default route with the lowest metric."""
    put(tmp_path, "proc/net/route", ROUTES)
    put(tmp_path, "sys/class/net/eth0/mtu", "1400\n")
    put(tmp_path, "sys/class/net/wlan0/mtu", "1500\n")
    assert procfs.default_mtu(tmp_path) == 1400


def test_mtu_without_a_default_route(tmp_path: Path) -> None:
    """Read the MTU without a default route: 1500."""
    put(tmp_path, "proc/net/route", "".join(line for line in ROUTES.splitlines(True) if "010200C0" not in line))
    assert procfs.default_mtu(tmp_path) == 1500
    assert procfs.default_mtu(tmp_path / "nothing") == 1500


def test_memory_in_bytes(tmp_path: Path) -> None:
    """Read meminfo: total and available memory in bytes."""
    put(tmp_path, "proc/meminfo", "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:    1024 kB\n")
    assert (procfs.memory(tmp_path), procfs.memory_available(tmp_path)) == (2048 * 1024, 1024 * 1024)


def test_load_average_and_cores(tmp_path: Path) -> None:
    """Read load average and online cores: 0 for invalid or missing files."""
    put(tmp_path, "proc/loadavg", "5.28 2.10 0.93 3/345 4711\n")
    put(tmp_path, "sys/devices/system/cpu/online", "0-1,4\n")
    assert (procfs.load_average(tmp_path), procfs.online(tmp_path)) == (5.28, 3)
    put(tmp_path, "proc/loadavg", "many\n")
    assert procfs.load_average(tmp_path) == 0
    assert (procfs.load_average(tmp_path / "nothing"), procfs.online(tmp_path / "nothing")) == (0, 0)


def test_bf16_is_an_instruction_of_some_processors(tmp_path: Path) -> None:
    """Read cpuinfo: bf16 by its flags, True where no flags are listed."""
    for line, has in {
        "flags\t\t: fpu avx2 avx512_bf16": True,
        "flags\t\t: fpu amx_bf16 amx_tile": True,
        "Features\t: fp asimd bf16": True,
        "flags\t\t: fpu avx2 avx512f": False,
        "Features\t: fp asimd": False,
        "hart\t\t: 0": True,
    }.items():
        put(tmp_path, "proc/cpuinfo", f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
        assert procfs.has_bf16(tmp_path) is has
    assert procfs.has_bf16(tmp_path / "nothing")


def test_the_processor_is_named_where_the_kernel_names_it(tmp_path: Path) -> None:
    """Read cpuinfo: the first model name, else ""."""
    put(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9554\n\nmodel name\t: another\n")
    assert procfs.processor(tmp_path) == "AMD EPYC 9554"
    assert procfs.processor(tmp_path / "nothing") == ""


def test_os_release(tmp_path: Path) -> None:
    """Read os-release: keys and unquoted values, {} without it."""
    put(tmp_path, "etc/os-release", '# who\nID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n\nVERSION_ID=\n')
    expected = {"ID": "debian", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)", "VERSION_ID": ""}
    assert procfs.os_release(tmp_path) == expected
    assert procfs.os_release(tmp_path / "nothing") == {}


def test_systemd_only_where_it_runs(tmp_path: Path) -> None:
    """Ask for systemd: True if /run/systemd/system exists."""
    assert not procfs.has_systemd(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert procfs.has_systemd(tmp_path)


def test_locks_lie_where_everyone_may_make_them_and_none_may_remove_anothers(tmp_path: Path) -> None:
    """Choose the lock directory: /run/lock only if everyone may write and it is sticky, else /tmp."""
    assert procfs.lock_directory(tmp_path) == str(tmp_path / "tmp")
    (tmp_path / "run/lock").mkdir(parents=True)
    for mode in (0o755, 0o777):
        (tmp_path / "run/lock").chmod(mode)
        assert procfs.lock_directory(tmp_path) == str(tmp_path / "tmp")
    (tmp_path / "run/lock").chmod(0o1777)
    assert procfs.lock_directory(tmp_path) == str(tmp_path / "run/lock")


def test_cores_that_may_be_used_are_those_that_are_there_too(tmp_path: Path) -> None:
    """Read usable cores: allowed and online ones."""
    put(tmp_path, "proc/self/status", "Cpus_allowed:\tff\nCpus_allowed_list:\t2-3,6-127\n")
    put(tmp_path, "sys/devices/system/cpu/online", "0-7\n")
    assert procfs.cpus(tmp_path) == (2, 3, 6, 7)


def test_the_files_of_this_host_tell_its_cores_as_the_kernel_does(tmp_path: Path) -> None:
    """Read cores from copies of this machine's files: the same as from the files."""
    for path in ("proc/self/status", "sys/devices/system/cpu/online"):
        put(tmp_path, path, procfs.read(Path("/", path)))
    assert procfs.cpus(tmp_path) == procfs.cpus()


def test_this_host() -> None:
    """Read this machine: its cores, memory and groups."""
    assert set(procfs.cpus()) == os.sched_getaffinity(0)
    assert procfs.memory() >= procfs.memory_available() > 0
    assert procfs.groups(grp.getgrgid(0).gr_name, "no-such-group") == (0,)


def test_packaged_files_are_found() -> None:
    """Ask for a packaged file: it exists."""
    assert files.path("docker", "cpu.Dockerfile").is_file()
