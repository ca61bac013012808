"""The sampler of nodes, with fictitious files and tools."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import made_up

from labctl.reports import samples

FOLDER = Path(__file__).parents[3] / "docker"
SOURCE = FOLDER / "sampler.py"
MIB = 1 << 20
# /proc/net/dev; the ninth number of a line is of what was sent.
NET = """\
Inter-| Receive                    |  Transmit
 face |bytes packets errs ...
    lo:     900 9 0 0 0 0 0 0     900 9 0 0 0 0 0 0
  eth0: 2097152 9 0 0 0 0 0 0 1048576 9 0 0 0 0 0 0
  eth1: 1048576 9 0 0 0 0 0 0 1048576 9 0 0 0 0 0 0
"""


def load(name: str) -> ModuleType:
    """Import this module of docker/ from its file."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the sampler with /proc, /sys and /dev below tmp_path, which are empty."""
    module = load("sampler")
    for name in ("PROC", "SYS", "DEV"):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    # As in a node, for the accelerators' files.
    monkeypatch.setitem(sys.modules, "sampler", module)
    return module


def write(root: Path, files: dict[str, str]) -> None:
    """Write these files below root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


GROUP_2 = {
    "cpu.stat": "usage_usec 2500000\nuser_usec 2000000\n",
    "memory.current": f"{300 * MIB}\n",
    "memory.stat": f"anon {150 * MIB}\ninactive_file {100 * MIB}\n",
    "io.stat": f"7:1 7:0 259:0 rbytes={3 * MIB} wbytes={MIB} rios=3\n8:0 rbytes={MIB} wbytes=0 rios=1\n",
}
GROUP_1 = {
    "cpuacct/cpuacct.usage": "2500000000\n",
    "memory/memory.usage_in_bytes": f"{300 * MIB}\n",
    "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {100 * MIB}\n",
    "blkio/blkio.throttle.io_service_bytes_recursive": f"259:0 Read {4 * MIB}\n259:0 Write {MIB}\nTotal {5 * MIB}\n",
}


@pytest.mark.parametrize(
    "group",
    [
        {"cgroup.controllers": "cpu io memory", **GROUP_2},
        {"cgroup.controllers": "cpu io memory", **{f"docker/3fa2/{name}": text for name, text in GROUP_2.items()}},
        GROUP_1,
    ],
    ids=["cgroup 2", "cgroup 2 of the whole machine", "cgroup 1"],
)
def test_a_container_uses_what_its_cgroup_says(sampler: ModuleType, tmp_path: Path, group: dict[str, str]) -> None:
    """Read the host's use from control groups of either version: cores, memory, disk and network."""
    write(tmp_path / "sys/fs/cgroup", group)
    nested = any(name.startswith("docker/") for name in group)
    write(tmp_path / "proc", {"net/dev": NET, "self/cgroup": f"0::/{'docker/3fa2' if nested else ''}\n"})
    assert sampler.host() == {
        "CPU (cores)": 2.5,
        "memory (MiB)": 200,
        "disk read (MiB/s)": 4,
        "disk written (MiB/s)": 1,
        "network received (MiB/s)": 3,
        "network sent (MiB/s)": 2,
    }


@pytest.mark.parametrize(
    ("name", "limit", "sampled"),
    [
        ("memory.max", str(512 * MIB), 512),
        ("memory.max", "max", None),
        ("memory/memory.limit_in_bytes", str(512 * MIB), 512),
        ("memory/memory.limit_in_bytes", str((1 << 63) - 4096), None),
    ],
)
def test_memory_has_a_limit_where_its_cgroup_has_one(
    sampler: ModuleType, tmp_path: Path, name: str, limit: str, sampled: float | None
) -> None:
    """Read the memory limit: in MiB, none for "max" or a huge number."""
    group = {"cgroup.controllers": "memory", **GROUP_2} if name == "memory.max" else GROUP_1
    write(tmp_path / "sys/fs/cgroup", {**group, name: limit})
    assert sampler.host().get("memory limit (MiB)") == sampled


def test_on_the_network_of_a_host_its_adapters_count_and_no_bridge(sampler: ModuleType, tmp_path: Path) -> None:
    """Read network of a host: adapters with a device, no bridge."""
    write(tmp_path, {"proc/net/dev": NET, "sys/class/net/eth0/device/vendor": "0x15b3"})
    assert sampler.network() == (2 * MIB, MIB)


def test_what_cannot_be_read_has_no_value(sampler: ModuleType) -> None:
    """Read without any file: every value is None."""
    assert set(sampler.host().values()) == {None}


def test_a_device_of_nvidia_has_what_its_library_knows(sampler: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read NVIDIA devices from a stand-in library: its values, None where not supported; None without the library."""

    class NVMLError(Exception):
        pass

    def not_supported(*_: object) -> float:
        """Raise NVMLError."""
        raise NVMLError

    library = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=90 + device),
        nvmlMemory_v2=2,
        nvmlDeviceGetMemoryInfo=lambda _, version=1: SimpleNamespace(used={1: 900, 2: 512}[version] * MIB),
        nvmlDeviceGetTemperature=lambda *_: 61,
        nvmlDeviceGetPowerUsage=lambda _: 412_500,
        nvmlDeviceGetClockInfo=lambda *_: 1980,
        nvmlDeviceGetTotalEccErrors=not_supported,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 4 | 1,
        nvmlClocksThrottleReasonGpuIdle=1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    module = load("nvidia_sampler")
    (_, values), (_, second) = module.devices()()
    assert values == {
        "utilisation (%)": 90,
        "memory (MiB)": 512,
        "temperature (°C)": 61,
        "power (W)": 412.5,
        "SM clock (MHz)": 1980,
        "uncorrected ECC errors (count)": None,
        "throttle reasons (bit mask)": 4,
    }
    assert (second.keys(), second["utilisation (%)"]) == (values.keys(), 91)
    library.nvmlInit = not_supported
    assert module.devices() is None


@pytest.fixture
def gaudi(sampler: ModuleType) -> ModuleType:
    """Return habana_sampler."""
    return load("habana_sampler")


@pytest.fixture
def tools(gaudi: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put tmp_path/bin on PATH and record started programs; return tmp_path, and kill them at the end."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        """Start the program and record it."""
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(gaudi, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    yield tmp_path
    for child in started:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def tool(folder: Path, script: str) -> None:
    """Write hl-smi with this shell script."""
    write(folder, {"bin/hl-smi": f"#!/bin/sh\n{script}\n"})
    (folder / "bin/hl-smi").chmod(0o755)


def test_a_gaudi_has_what_its_tool_says(gaudi: ModuleType, tools: Path) -> None:
    """Read Gaudis from hl-smi: eight values each, None for N/A."""
    devices = ("0, 71, 5000, 45, 210, 1650, 0, N/A, 0", "7, 0, 768, 30, 90, 200, 1, 0, 0")
    query = "index,utilization.aip,memory.used,temperature.aip,power.draw,clocks.current.soc"
    tool(tools, f'case "$2" in {query},*) printf "{devices[0]}\\n{devices[1]}\\n";; esac')
    values = dict(gaudi.devices()())
    assert values.keys() == {"0", "7"}
    assert (values["0"]["utilisation (%)"], values["0"]["power violations (as hl-smi has them)"]) == (71, None)
    assert (values["7"]["memory (MiB)"], values["7"]["uncorrected ECC errors (count)"]) == (768, 1)
    assert len(values["7"]) == 8


def test_a_tool_is_waited_for_once_and_has_no_value_until_it_has_answered_again(gaudi: ModuleType, tools: Path) -> None:
    """Read while hl-smi runs: [] until it has answered again."""
    os.mkfifo(tools / "next")
    # Each but the first waits until the test has it answer.
    answer = "touch second; echo 0, 71, 5000, 45, 210, 1650, 0, 0, 0"
    tool(tools, f"cd {tools}; [ ! -e second ] || read -r _ < next; {answer}")
    read = gaudi.devices()
    assert dict(read())["0"]["utilisation (%)"] == 71
    assert read() == read() == []
    (tools / "next").write_text("")
    deadline = time.monotonic() + 60
    while not (values := dict(read())) and time.monotonic() < deadline:
        pass
    assert values["0"]["utilisation (%)"] == 71


def test_a_tool_that_does_not_answer_leaves_the_node_without_devices(
    gaudi: ModuleType, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let hl-smi hang at the start: devices() is None."""
    monkeypatch.setattr(gaudi, "TOOL_LIMIT", 0.05)
    tool(tools, "exec sleep 60")
    assert gaudi.devices() is None


@pytest.mark.parametrize(
    ("clock", "throttled"),
    [
        ("drm/card1/gt/gt0/rps_act_freq_mhz", "drm/card1/gt/gt0/throttle_reason_status"),
        ("tile0/gt0/freq0/act_freq", "tile0/gt0/freq0/throttle/status"),
    ],
    ids=["i915", "xe"],
)
def test_an_intel_gpu_has_what_its_driver_says(sampler: ModuleType, tmp_path: Path, clock: str, throttled: str) -> None:
    """Read an Intel GPU of the node from sysfs of i915 or xe: four values, energy as a total."""
    known = {
        "vendor": "0x8086\n",
        "hwmon/hwmon3/energy1_input": "5000000\n",
        "hwmon/hwmon3/temp2_input": "58000\n",
        clock: "1550\n",
        throttled: "1\n",
    }
    other = {"class/drm/renderD128/device/vendor": "0x1002\n"}
    write(tmp_path / "sys", {**other, **{f"class/drm/renderD129/device/{name}": text for name, text in known.items()}})
    # The machine has one more, which is not this node's.
    write(tmp_path / "sys/class/drm/renderD130/device", {"vendor": "0x8086\n"})
    write(tmp_path / "dev/dri", {"renderD128": "", "renderD129": ""})
    ((_, values),) = load("intel_sampler").devices()()
    assert values == {
        "temperature (°C)": 58,
        "power (W)": 5,
        "GT clock (MHz)": 1550,
        "throttled (0 or 1)": 1,
    }
    assert isinstance(values["power (W)"], sampler.Total)


@pytest.mark.parametrize("name", [path.stem for path in FOLDER.glob("*_sampler.py")])
def test_an_accelerator_without_devices_has_no_columns(
    sampler: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ask each accelerator without devices: None."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load(name).devices() is None


class Clock:
    """A clock that advances only while the sampler waits or reads."""

    def __init__(self, sampler: ModuleType, monkeypatch: pytest.MonkeyPatch, *, last: float) -> None:
        """Replace the sampler's clock and input, which closes after ``last`` seconds."""
        self.now = self.cpu = 0.0
        monkeypatch.setattr(sampler.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(sampler.time, "time", lambda: 1000 + self.now)
        monkeypatch.setattr(sampler, "cpu_seconds", lambda: self.cpu)
        monkeypatch.setattr(sampler, "stdin_closes", lambda seconds: self.passed(max(0, seconds)) > last)

    def passed(self, seconds: float) -> float:
        """Advance the clock; return its time."""
        self.now += seconds
        return self.now


def table(rows: Iterator[list[object]]) -> list[list[str]]:
    """Return the rows with their cells as text."""
    return [[str(cell) for cell in row] for row in rows]


def test_totals_are_rates_over_the_time_since_the_last_sample(
    sampler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample totals: rates per second; empty after a missing or falling total."""
    clock = Clock(sampler, monkeypatch, last=3)
    totals = iter([10.0, 12.0, None, 1.0])
    read = (lambda: {"disk read (MiB/s)": sampler.total(next(totals), 1), "memory (MiB)": 100 + clock.now},)
    assert table(sampler.rows(read, 990)) == [
        ["seconds (s)", "lost samples (count)", "disk read (MiB/s)", "memory (MiB)"],
        ["11.000", "0", "2.0", "101.0"],
        ["12.000", "0", "", "102.0"],
        ["13.000", "0", "", "103.0"],
    ]


def test_samples_that_their_time_passed_by_are_counted_and_not_made_up(
    sampler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a sample take 5.5 s: four are counted as lost, none is made up."""
    clock = Clock(sampler, monkeypatch, last=9)

    def read() -> dict[str, float]:
        """Advance the clock once; return it as a total."""
        # The second sample takes as long as five.
        clock.passed(5.5 if clock.now == 1 else 0)
        return {"CPU (cores)": sampler.Total(clock.now)}

    _, *rows = table(sampler.rows((read,), 1000))
    assert [row[:2] for row in rows] == [["1.000", "0"], ["6.500", "4"], ["7.000", "0"], ["8.000", "0"], ["9.000", "0"]]
    assert {row[2] for row in rows[1:]} <= {"1.0", "0.0"}


def test_samples_that_take_more_than_a_hundredth_of_a_core_come_later_and_none_is_lost(
    sampler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let samples cost 0.04 s of processor time: one every 4 s, none lost."""
    clock = Clock(sampler, monkeypatch, last=12)

    def read() -> dict[str, float]:
        """Use 0.04 s of processor time; return no values."""
        clock.cpu += 0.04
        return {}

    assert [row[:2] for row in table(sampler.rows((read,), 1000))[1:]] == [
        ["4.000", "0"],
        ["8.000", "0"],
        ["12.000", "0"],
    ]


def sampled(source: Path, run: Path, began: float) -> list[str]:
    """Run a sampler, close its input after two lines; return all lines of its table."""
    table = run / "samples/worker-0.csv"
    table.parent.mkdir(parents=True)
    os.mkfifo(table)
    pipe, argv = subprocess.PIPE, [sys.executable, "-I", str(source), str(run), str(began), "worker-0"]
    with subprocess.Popen(argv, stdin=pipe, stderr=pipe) as process:
        with table.open() as stream:
            lines = [stream.readline(), stream.readline()]
            assert process.stdin
            process.stdin.close()
            lines += stream
        assert process.wait(60) == 0
        assert process.stderr
        assert process.stderr.read() == b""
    return lines


def test_a_sampler_writes_until_its_input_ends_what_a_report_reads(tmp_path: Path) -> None:
    """Run the sampler: reports read what it wrote, with the seconds since the run began."""
    lines = sampled(SOURCE, tmp_path / "run", time.time() - 5)
    write(tmp_path, {"samples/worker-0.csv": "".join(lines)})
    tracks = {track.what: track for track in samples.read(tmp_path)}
    assert tracks["lost samples"].points[0] == pytest.approx((6, 0), abs=3)
    assert (tracks["network received"].unit, tracks["network received"].node) == ("MiB/s", "worker-0")


def test_an_accelerators_devices_are_sampled_by_its_file_beside_the_sampler(tmp_path: Path) -> None:
    """Run the sampler beside a made-up accelerator's file: its devices are the last columns."""
    for path in (SOURCE, made_up.FOLDER / "docker/zeta_sampler.py"):
        (tmp_path / path.name).symlink_to(path)
    head, row, *_ = (line.rstrip("\n").split(",") for line in sampled(tmp_path / SOURCE.name, tmp_path / "run", 0))
    assert head[-2:] == ["device 0 energy (J/s)", "device 4 energy (J/s)"]
    assert row[-2:] == ["0.0", "0.0"], "a number that only grows is a rate"


def test_of_a_run_that_is_over_nothing_is_written(tmp_path: Path) -> None:
    """Run the sampler without its table: it writes nothing."""
    argv = [sys.executable, "-I", str(SOURCE), str(tmp_path), "0", "worker-0"]
    subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_share_in_collectives_is_that_of_the_rank_that_waits_least_once_all_have_told(
    sampler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask two ranks of this run and node once a second: a share only while both have told twice, never above one."""
    node = os.uname().nodename
    lines = [f"00: 00000002 00000000 00010000 0001 01 9 @labctl/r1/{node}/{pid}" for pid in (7, 8)]
    others = (f"@labctl/r2/{node}/9", f"@labctl/r1/other-{node}/9", "/run/x")
    lines += [f"00: 2 0 1 1 1 9 {other}" for other in others]
    write(tmp_path / "proc", {"net/unix": "Num RefCount\n" + "\n".join(lines) + "\n"})
    monkeypatch.setenv("LABCTL_RUN_ID", "r1")
    told: dict[int, list[float | None]] = {7: [10, 10.9, None, 12.7, 13.6], 8: [3, 3.1, 3.2, 3.3, 3.4]}
    monkeypatch.setattr(sampler, "seconds_waited", lambda _, pid: told[pid].pop(0))
    clock = iter(range(100))
    monkeypatch.setattr(sampler.time, "monotonic", lambda: next(clock) // 2)
    ranks = sampler.Ranks()
    shares = [ranks()["in collectives (share)"] for _ in range(5)]
    assert shares == [None, pytest.approx(0.1), None, None, pytest.approx(0.1)]
