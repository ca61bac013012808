"""Processors, their clocks and errors, the kernel that runs on them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from labctl.health import rules
from labctl.health.examine import MACHINE
from labctl.health.memory import GIB, blocks_size
from labctl.health.model import Answer, Check, Evidence, LineCheck, Reading, Subject
from labctl.system import procfs
from labctl.system.hostdump import HostDump
from labctl.system.hostpath import HostPath

CPU = "sys/devices/system/cpu"
CLOCKSOURCE = "sys/devices/system/clocksource/clocksource0"
EDAC = "sys/devices/system/edac/mc"
NODES = "sys/devices/system/node"
FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "hyperv_clocksource")
"""Clocks that are read without leaving the processor. Source: Documentation/timers/timekeeping.rst, virt/kvm/x86."""
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
LAPTOPS = ("8", "9", "10", "14", "30", "31", "32")
"""Kinds of chassis that get hot in ordinary use, and that a person carries away from their cables.

Source: SMBIOS 3.6, table 17, as in chassis_type.
"""
_UNCORRECTED = 1 << 61
"""Bit UC of a bank's status. Source: Intel SDM volume 3B, "IA32_MCi_STATUS MSRs"; AMD64 manual volume 2."""

# /proc/cpuinfo has the same block for each core; files of which each core has one are counted by their text.
SCRIPT = f"""\
counted() {{
    printf 'fact %s\\n' "$1"
    shift
    cat "$@" 2> /dev/null | sort | uniq -c | body
}}
if [ -r proc/cpuinfo ]; then
    printf 'file proc/cpuinfo\\n'
    sed '/^$/q' proc/cpuinfo | body
fi
lines etc/machine-id proc/sys/kernel/osrelease sys/class/dmi/id/chassis_type {CPU}/online {CPU}/offline {CPU}/present \\
    {CLOCKSOURCE}/available_clocksource {CLOCKSOURCE}/current_clocksource {EDAC}/mc*/ce_count {EDAC}/mc*/ue_count \\
    {NODES}/online {NODES}/node[0-9]*/meminfo sys/devices/system/memory/block_size_bytes
counted packages {CPU}/cpu[0-9]*/topology/physical_package_id
counted governors {CPU}/cpu[0-9]*/cpufreq/scaling_governor
counted 'core throttling' {CPU}/cpu[0-9]*/thermal_throttle/core_throttle_count
counted 'package throttling' {CPU}/cpu[0-9]*/thermal_throttle/package_throttle_count
fact 'huge pages' "$(sed -n 's/^HugePages_Total: *//p' proc/meminfo 2> /dev/null)"
for node in {NODES}/node[0-9]*; do
    set -- "$node"/memory[0-9]*
    [ ! -e "$1" ] || fact "blocks of ${{node##*/}}" $#
done
"""


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield what a node reports of its processors."""
    yield from _machine(dump)
    yield from _model(dump)
    yield from _cores(dump)
    yield from _nodes(dump)
    yield from _ways(dump)
    yield from _errors(dump.root)
    yield from _throttling(dump)


# --- readings ------------------------------------------------------------------------------------------------


def _machine(dump: HostDump) -> Iterator[Reading]:
    """Yield a name of the machine that no other has: each single machine is the host ``local`` of its lab.

    Its id is confidential, a hash of it is not. Source: machine-id(5).
    """
    text = procfs.read(dump.root / "etc/machine-id").strip()
    if re.fullmatch("[0-9a-f]{32}", text):
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        yield Reading(name=MACHINE, value=digest, source="sha256sum /etc/machine-id", kind="fact")


def _model(dump: HostDump) -> Iterator[Reading]:
    """Yield the processor's model and microcode, and the kernel's release."""
    source = "/proc/cpuinfo"
    fields = _fields(procfs.read(dump.root / "proc/cpuinfo"))
    arm = " ".join(filter(None, (fields.get("CPU implementer"), fields.get("CPU part"))))
    model = fields.get("model name") or (f"Arm {arm}" if arm else None)
    yield Reading(name="processor", value=model, source=source, kind="fact", why="" if model else "it has no model")
    if "microcode" in fields:
        yield Reading(name="microcode", value=fields["microcode"], source=source, kind="fact")
    release = procfs.read(dump.root / "proc/sys/kernel/osrelease").strip()
    if release:
        yield Reading(name="kernel", value=release, source="uname -r", kind="fact")


def _fields(text: str) -> dict[str, str]:
    """Return the fields of the first block of /proc/cpuinfo."""
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines if value.strip()}


def _cores(dump: HostDump) -> Iterator[Reading]:
    """Yield the sockets, the cores that are online, and those that are present but not online."""
    packages = _counts(dump.facts.get("packages", ""))
    if packages:
        source = f"/{CPU}/cpu*/topology/physical_package_id"
        yield Reading(name="sockets", value=len(packages), source=source, kind="fact")
    online = procfs.parse_cpulist(procfs.read(dump.root / CPU / "online"))
    if not online:
        return
    yield Reading(name="cores", value=len(online), source=f"/{CPU}/online", kind="fact")
    # A virtual machine also lists cores as offline that it might get.
    present = procfs.parse_cpulist(procfs.read(dump.root / CPU / "present"))
    offline = [str(core) for core in present if core not in set(online)]
    yield Reading(name="offline cores", value=", ".join(offline), source=f"/{CPU}/offline")


def _nodes(dump: HostDump) -> Iterator[Reading]:
    """Yield the NUMA nodes, and the memory of each."""
    nodes = procfs.parse_cpulist(procfs.read(dump.root / NODES / "online"))
    if not nodes:
        return
    yield Reading(name="NUMA nodes", value=len(nodes), source=f"/{NODES}/online", kind="fact")
    for node in nodes:
        size = blocks_size(dump, f"blocks of node{node}") or _node_memory(dump.root / NODES / f"node{node}/meminfo")
        yield Reading(
            name="NUMA memory",
            value=round(size / GIB),
            source=f"/{NODES}/node{node}",
            item=f"NUMA node {node}",
            unit="GiB",
            kind="fact",
        )


def _node_memory(path: HostPath) -> int:
    """Return a NUMA node's memory in bytes, from ``Node 0 MemTotal: 24684092 kB``; 0 if unknown."""
    match = re.search(r"MemTotal:\s+(\d+) kB", procfs.read(path))
    return int(match[1]) * 1024 if match else 0


def _ways(dump: HostDump) -> Iterator[Reading]:
    """Yield how the processors are run: governor, clock source and reserved huge pages."""
    governors = _counts(dump.facts.get("governors", ""))
    if governors:
        source = f"/{CPU}/cpu*/cpufreq/scaling_governor"
        yield Reading(name="governor", value=", ".join(sorted(governors)), source=source)
    clock = procfs.read(dump.root / CLOCKSOURCE / "current_clocksource").strip()
    if clock:
        available = procfs.read(dump.root / CLOCKSOURCE / "available_clocksource").split()
        value = clock + _faster(clock, available)
        yield Reading(name="clock source", value=value, source=f"/{CLOCKSOURCE}/current_clocksource")
    pages = dump.facts.get("huge pages", "")
    if pages.isdecimal():
        yield Reading(name="huge pages", value=int(pages), source="/proc/meminfo")


def _faster(clock: str, available: list[str]) -> str:
    """Return `` (tsc is available)`` if a slow clock is used although a fast one is available; else empty.

    The kernel's first choice is not asked for: on Xen, Amazon advises against it.
    """
    fast = next((name for name in available if name in FAST_CLOCKS), "")
    return f" ({fast} is available)" if fast and clock in SLOW_CLOCKS else ""


def _errors(root: HostPath) -> Iterator[Reading]:
    """Yield the counters of memory errors that each memory controller corrected, and could not correct.

    Source: Documentation/admin-guide/RAS of the kernel, "Error Detection And Correction".
    """
    names = (("ue_count", "uncorrectable memory errors"), ("ce_count", "corrected memory errors"))
    for folder in sorted((root / EDAC).glob("mc[0-9]*"), key=lambda path: int(path.name[2:])):
        for file, name in names:
            text = procfs.read(folder / file).strip()
            if text:
                item = f"memory controller {folder.name[2:]}"
                yield Reading(name=name, value=int(text), source=f"{folder}/{file}", item=item, kind="counter")


def _throttling(dump: HostDump) -> Iterator[Reading]:
    """Yield how often the processors were slowed because of heat; nothing on a laptop, whose are in ordinary use.

    Source: Documentation/admin-guide/thermal and arch/x86 therm_throt.c of the kernel.
    """
    if procfs.read(dump.root / "sys/class/dmi/id/chassis_type").strip() in LAPTOPS:
        return
    for level in ("core", "package"):
        counts = _counts(dump.facts.get(f"{level} throttling", ""))
        if counts:
            total = sum(int(text) * cores for text, cores in counts.items())
            source = f"/{CPU}/cpu*/thermal_throttle/{level}_throttle_count"
            yield Reading(name=f"{level} throttling because of heat", value=total, source=source, kind="counter")


def _counts(text: str) -> dict[str, int]:
    """Parse output of ``uniq -c``: how many cores have each text."""
    lines = (line.split(None, 1) for line in text.splitlines())
    return {words[1].strip(): int(words[0]) for words in lines if len(words) == 2}


# --- checks --------------------------------------------------------------------------------------------------


def newly_offline(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge cores that were online before as a remark."""
    if evidence.before is None:
        return None
    before = str(evidence.before).split(", ")
    lost = [core for core in str(reading.value).split(", ") if core and core not in before]
    return Answer("remark", f"cores {', '.join(lost)} are offline, they were online before") if lost else None


def slow_governor(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge another governor as a remark where most neighbours have ``performance``.

    Alone it says little: intel_pstate's ``powersave`` scales with load.
    Source: Documentation/admin-guide/pm/intel_pstate.rst.
    """
    usual = rules.usual_value(evidence.neighbours)
    return rules.unlike_neighbours(reading, evidence) if usual == "performance" else None


def clock_source(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a slow clock as a remark if a fast one is available, and another one than most neighbours have."""
    if str(reading.value).endswith("is available)"):
        return Answer("remark", f"clock source is {reading.value}")
    return rules.unlike_neighbours(reading, evidence)


def machine_check(match: re.Match[str]) -> Answer:
    """Judge a bank of a machine check by its status: an uncorrected error is bad."""
    bank, status = match[1], int(match[2], 16)
    if status & _UNCORRECTED:
        return Answer("bad", f"machine check: uncorrected error in bank {bank}")
    return Answer("remark", f"machine check: corrected error in bank {bank}")


SERVICE = ("end the runs on the node", "{sudo}ras-mc-ctl --errors", "have the memory or processor replaced")
COMPARE = ("compare the firmware's settings with those of the other nodes",)
SUBJECT = Subject(
    name="CPU",
    script=SCRIPT,
    readings=readings,
    checks=(
        Check(
            name="cores",
            reading="cores",
            judge=rules.less_than_neighbours,
            steps=("cat /sys/devices/system/cpu/offline", *COMPARE),
        ),
        Check(name="sockets", reading="sockets", judge=rules.less_than_neighbours, steps=COMPARE),
        Check(
            name="offline-cores",
            reading="offline cores",
            judge=newly_offline,
            steps=("echo 1 | {sudo}tee /sys/devices/system/cpu/cpuN/online", "restart the node"),
        ),
        Check(name="numa", reading="NUMA nodes", judge=rules.unlike_neighbours, steps=COMPARE),
        Check(
            name="governor",
            reading="governor",
            judge=slow_governor,
            steps=("echo performance | {sudo}tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",),
        ),
        Check(
            name="clock-source",
            reading="clock source",
            judge=clock_source,
            steps=("{sudo}dmesg | grep -i clocksource", "restart the node", *COMPARE),
        ),
        Check(
            name="huge-pages", reading="huge pages", judge=rules.unlike_neighbours, steps=("sysctl vm.nr_hugepages",)
        ),
        Check(name="kernel", reading="kernel", judge=rules.unlike_neighbours, steps=("restart the node",)),
        Check(
            name="memory-uncorrectable",
            reading="uncorrectable memory errors",
            judge=rules.above,
            limit=0,
            steps=SERVICE,
        ),
        # Source: mcelog.conf, whose default warns of a DIMM with more than 10 corrected errors in 24 hours.
        Check(
            name="memory-corrected",
            reading="corrected memory errors",
            judge=rules.remark_grew,
            limit=10,
            steps=SERVICE[1:],
        ),
        *(
            Check(
                name=f"{level}-throttling",
                reading=f"{level} throttling because of heat",
                judge=rules.remark_grew,
                limit=0,
                steps=("check fans, filters and the temperature of the room",),
            )
            for level in ("core", "package")
        ),
    ),
    lines=(
        LineCheck(
            name="machine-check",
            pattern=r"mce: \[Hardware Error\]: CPU [0-9]+: Machine Check[^:]*: [0-9]+ Bank ([0-9]+): ([0-9a-fA-F]{16})",
            judge=machine_check,
            steps=SERVICE,
        ),
        LineCheck(
            name="machine-check-events",
            pattern=r"mce: \[Hardware Error\]: Machine check events logged",
            judge=lambda _: Answer("remark", "machine check events logged"),
            steps=SERVICE[1:],
        ),
        # Source: drivers/edac/mce_amd.c of the kernel.
        LineCheck(
            name="hardware-error",
            pattern=r"\[Hardware Error\]: Uncorrected(, software [a-z]+)? error",
            judge=lambda _: Answer("bad", "uncorrected hardware error"),
            steps=SERVICE,
        ),
        # Records of errors before the last start, which some firmware never clears, have no number in braces.
        # Source: drivers/firmware/efi/cper.c and drivers/acpi/apei/ghes.c of the kernel.
        LineCheck(
            name="firmware-error",
            pattern=r"\{[0-9]+\}\[Hardware Error\]: event severity: fatal",
            judge=lambda _: Answer("bad", "fatal hardware error reported by the firmware"),
            steps=SERVICE,
        ),
        # Source: mm/memory-failure.c of the kernel.
        LineCheck(
            name="memory-failure",
            pattern=r"Memory failure: 0x[0-9a-f]+: (Killing|Sending SIGBUS|recovery action)",
            judge=lambda _: Answer("bad", "uncorrected memory error"),
            steps=SERVICE,
        ),
        LineCheck(
            name="lockup",
            pattern=r"BUG: soft lockup - CPU#([0-9]+)|detected hard LOCKUP on cpu ?([0-9]+)",
            judge=lambda match: Answer("bad", f"lockup of core {match[1] or match[2]}"),
            steps=("end the runs on the node", "restart the node"),
        ),
        # A virtual machine also has one when its host held it; source: Documentation/RCU/stallwarn.rst.
        LineCheck(
            name="rcu-stall",
            pattern=r"rcu[a-z_]* (self-)?detected (expedited )?stalls? on CPU",
            judge=lambda _: Answer("remark", "a core did not respond to the kernel (RCU stall)"),
            steps=("restart the node if it happens again",),
        ),
    ),
)
