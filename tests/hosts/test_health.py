"""Health of hosts with planted hardware and faults: by `labctl health`, before and during a run, and in lab.lock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import Answer, wait_until
from support.rack.host import Host
from support.rack.rack import Rack, RackLab

pytestmark = pytest.mark.docker

SMI = Path(__file__).parents[1] / "data/health/nvidia/h100.xml"
CARD = "/sys/devices/planted/0000:2a:00.0"
PORT = "/sys/class/infiniband/mlx5_0/ports/1"
RAIL = "/sys/class/net/rail0"
GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
NODE = "worker-2"


@pytest.fixture(scope="module")
def lab(shared_rack: Rack, family: str, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RackLab]:
    """Yield a lab on three hosts with planted GPUs and links, up, whose hosts were good."""
    hosts = shared_rack.hosts(3)
    settings = {
        "LAB_ACCELERATOR": "nvidia",
        "LAB_SLOTS": "2",
        "LAB_IMAGE": image,
        "LAB_PREFLIGHT": "on",
        "LAB_SHM_SIZE": "2g",
    }
    made = shared_rack.lab(tmp_path_factory.mktemp("lab"), f"{family}-health", hosts, settings)
    for host in made.hosts:
        host.plant_hardware(SMI.read_text(encoding="utf-8"))
    made.call("up").expect(0)
    first = made.call("health", "--json").expect(0)
    assert first.json["level"] == "ok", wrong(first)
    yield made
    shared_rack.clear()


def wrong(answer: Answer) -> list[tuple[str, str, str]]:
    """Return host, level and sentence of each finding that is bad or a remark."""
    return [
        (verdict["host"], condition["level"], f"{condition['item']}: {condition['text']}".removeprefix(": "))
        for verdict in answer.json["hosts"]
        for condition in verdict["conditions"]
        if condition["level"] in ("bad", "remark")
    ]


def write(path: str, text: str) -> Callable[[Host], Callable[[], object]]:
    """Return a fault that writes a file, whose cure writes what was there."""

    def plant(host: Host) -> Callable[[], object]:
        before = host.shell(f"cat {path}")
        host.shell(f"printf '%s\\n' '{text}' > {path}")
        return lambda: host.run("sh", "-c", f"cat > {path}", stdin=before)

    return plant


def kernel(line: str) -> Callable[[Host], Callable[[], object]]:
    """Return a fault that writes a kernel line, whose cure empties the log."""

    def plant(host: Host) -> Callable[[], object]:
        host.write_kernel_log(line)
        return host.write_kernel_log

    return plant


def smi(old: str, new: str) -> Callable[[Host], Callable[[], object]]:
    """Return a fault that changes what nvidia-smi prints of the last GPU."""

    def plant(host: Host) -> Callable[[], object]:
        before = SMI.read_text(encoding="utf-8")
        head, mark, last = before.rpartition("<gpu id=")
        assert old in last
        host.run("sh", "-c", "cat > /opt/smi.xml", stdin=f"{head}{mark}{last.replace(old, new, 1)}")
        return lambda: host.run("sh", "-c", "cat > /opt/smi.xml", stdin=before)

    return plant


def missing_card(host: Host) -> Callable[[], object]:
    """Take the last GPU out of nvidia-smi's list; the cure puts it back."""
    before = SMI.read_text(encoding="utf-8")
    host.run("sh", "-c", "cat > /opt/smi.xml", stdin=f"{before.rpartition('<gpu id=')[0]}</nvidia_smi_log>")
    return lambda: host.run("sh", "-c", "cat > /opt/smi.xml", stdin=before)


def slow_clock(host: Host) -> Callable[[], object]:
    """Set the clock ahead by three seconds; the cure sets it right."""
    host.program("date", '#!/bin/sh\nexec /usr/bin/date --date="3 seconds" "$@"\n')
    return lambda: host.run("rm", "/usr/local/bin/date")


def full_disk(host: Host) -> Callable[[], object]:
    """Fill /tmp; the cure frees it."""
    host.shell("mount -t tmpfs -o size=20m full /tmp && head -c 20m /dev/zero > /tmp/full")
    return lambda: host.run("umount", "/tmp")  # noqa: S108 - the folder to examine


def swap(host: Host) -> Callable[[], object]:
    """Show a swap file of which most is in use; the cure shows the host's own."""
    head = "Filename Type Size Used Priority"
    host.shell(f"printf '%s\\n' '{head}' '/swap file 83886040 79190798 -2' > /opt/swaps")
    host.run("mount", "--bind", "/opt/swaps", "/proc/swaps")
    return lambda: host.run("umount", "/proc/swaps")


FAULTS = {
    "pcie-width": (write(f"{CARD}/current_link_width", "8"), "bad", "PCIe width 8, 16 on 5 others"),
    "missing-card": (missing_card, "bad", "1, 2 on 2 others"),
    "xid-79": (kernel("NVRM: Xid (PCI:0000:2a:00): 79, pid=1, GPU has fallen off the bus."), "bad", "off the bus"),
    "xid-13": (kernel("NVRM: Xid (PCI:0000:2a:00): 13, pid=1, Graphics Exception"), "remark", "Xid 13"),
    "ecc": (smi("<dram_uncorrectable>0<", "<dram_uncorrectable>3<"), "bad", "uncorrectable ECC errors 3"),
    "link-down": (write(f"{PORT}/state", "1: DOWN"), "bad", "DOWN"),
    "link-flap": (write(f"{PORT}/counters/link_downed", "2"), "bad", "link_downed +2"),
    "carrier": (write(f"{RAIL}/carrier_changes", "8"), "bad", "carrier_changes +6"),
    "half-speed": (write(f"{RAIL}/speed", "50000"), "bad", "50000"),
    "clock": (slow_clock, "bad", "s ahead of that of other nodes"),
    "full-disk": (full_disk, "bad", "free space"),
    "swap": (swap, "remark", "swap in use"),
    "governor": (write(GOVERNOR, "powersave"), "remark", "powersave"),
    "io-error": (kernel("blk_update_request: I/O error, dev sda, sector 4096 op 0x0:(READ)"), "bad", "sda"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_on_its_host_alone(lab: RackLab, name: str) -> None:
    """`health` exits with 3 for a bad host and 0 for a remark, names the host and the finding, and no other host."""
    plant, level, text = FAULTS[name]
    cure = plant(lab.hosts[2])
    try:
        answer = lab.call("health", "--json").expect(3 if level == "bad" else 0)
        findings = wrong(answer)
        assert {host for host, _, _ in findings} == {"h3"}, findings
        assert any(found == level and text in sentence for _, found, sentence in findings), findings
    finally:
        cure()
    healed = lab.call("health", "--json").expect(0)
    assert not [each for each in wrong(healed) if each[1] == "bad"]


def test_a_bad_node_stops_a_run_and_a_batch_leaves_it_out(lab: RackLab) -> None:
    """`run` exits with 3 with node, finding and the option to type, which works; `batch` skips the node's job."""
    cure = write(f"{CARD}/current_link_width", "8")(lab.hosts[2])
    try:
        refused = lab.call("run", "hello-mpi").expect(3)
        assert f"{NODE}: GPU 1 (0000:2a:00.0): PCIe width 8, 16 on 5 others" in refused.err
        assert f"--exclude {NODE}" in refused.err
        lab.call("run", "hello-mpi", "--exclude", NODE).expect(0)
        folder = lab.path / "sets/3x1"
        folder.mkdir(parents=True)
        for node in ("worker-0", NODE):
            (folder / f"hostfile_{node}").write_text(f"{node} slots=2\n")
        batch = lab.call("batch", "hello-mpi", str(folder), "--json")
        assert f"{NODE} is left out: GPU 1 (0000:2a:00.0): PCIe width 8" in batch.err
        verdicts = {job["job"]: job["verdict"] for job in batch.json["batch"]["jobs"]}
        assert verdicts == {"worker-0": "PASS", NODE: "ERROR"}
        warned = lab.call("run", "hello-mpi", "-s", "LAB_PREFLIGHT=warn").expect(0)
        assert "PCIe width 8" in warned.err
    finally:
        cure()


def test_what_changes_during_a_run_is_in_its_record_and_its_message(lab: RackLab, tmp_path: Path) -> None:
    """A flap, an Xid and a clock that are planted while a run goes on are told of it; a fault from before is not."""
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    host = lab.hosts[2]
    with lab.start("run", "--script", str(script), "--timeout", "20s") as running:
        wait_until(lambda: "begun" in running.err, 60, "the run prints")
        cures = [FAULTS[name][0](host) for name in ("link-flap", "xid-79", "clock")]
        running.answer(120)
    for cure in cures:
        cure()
    (record,) = (path for path in (lab.path / "runs").glob("*/result.json") if "waits" in path.parent.name)
    result: dict[str, Any] = json.loads(record.read_text())
    assert f"{NODE} mlx5_0/1: link_downed +2 during the run" in result["message"]
    changes = "; ".join(result["node_changes"])
    for text in ("link_downed +2", "off the bus", "clock jumped"):
        assert text in changes
    assert "worker-0" not in changes


def test_a_changed_host_is_named_by_verify_and_by_health(lab: RackLab) -> None:
    """Memory, a network port and the driver's version that change after `freeze` are named by both."""
    lab.call("freeze").expect(0)
    host = lab.hosts[1]
    before = SMI.read_text(encoding="utf-8")
    host.run("sh", "-c", "cat > /opt/smi.xml", stdin=before.replace("580.95.05", "590.10"))
    host.shell(f"mv {RAIL} /opt/rail0")
    try:
        drift = {(each["where"], each["what"]): each["now"] for each in lab.call("verify", "--json").json["drift"]}
        findings = "; ".join(sentence for name, _, sentence in wrong(lab.call("health", "--json")) if name == "h2")
        assert drift[("h2", "hardware NVIDIA driver")] == "590.10"
        assert ("h2", "hardware rail0 driver") in drift
        assert "NVIDIA driver 590.10, 580.95.05" in findings
        assert "rail0: is gone" in findings
    finally:
        host.run("sh", "-c", "cat > /opt/smi.xml", stdin=before)
        host.shell(f"mv /opt/rail0 {RAIL}")
