"""Names of readings and checks, over the subjects of a host and those of each accelerator."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import pytest

from labctl import accelerators
from labctl.health import catalogue
from labctl.health.model import Subject

LINES = {
    "buffer-error": "Buffer I/O error on dev sda1, logical block 77, async page read",
    "ethernet-hang": "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 7 timed out",
    "ext4": "EXT4-fs error (device sda1): ext4_lookup:1785: inode #2",
    "gpu-action": "NVRM: Xid (PCI:0000:3b:00): 154, changed from 0x0 (None) to 0x2 (Node Reboot Required)",
    "gpu-xid": "NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable",
    "intel-hardware-lines": "i915 0000:3b:00.0: [drm] *ERROR* [Hardware Error]: FATAL",
    "intel-wedged": "i915 0000:3b:00.0: [drm] *ERROR* Failed to reset chip",
    "io-error": "I/O error, dev nvme0c1n1, sector 1024 op 0x0:(READ) flags 0x80700",
    "pcie-error": "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Inaccessible",
    "pcie-reset": "pcieport 0000:00:1c.2: AER: Root Port link has been reset (-25)",
    "remounted": "EXT4-fs (sda1): Remounting filesystem read-only",
    "xfs": "XFS (sda1): Internal error xfs_trans_cancel at line 1",
}
"""A line of each check whose steps ask for an item."""
ITEMS = {"/dev/sda", "/dev/sda1", "/dev/nvme0n1", "eth0", "0000:3b:00.0", "0000:00:1c.2"}
EXAMINED = tuple(name for name, module in accelerators.modules().items() if module.subject)


def subjects_of(accelerator: str) -> tuple[Subject, ...]:
    """Return the subjects of a host with this accelerator."""
    own = accelerators.get(accelerator).subject
    assert own is not None
    return (*catalogue.HOST, own)


@pytest.mark.parametrize("accelerator", EXAMINED)
def test_no_reading_is_judged_by_two_subjects(accelerator: str) -> None:
    """Judge a reading by its name in one subject alone: a check sees the readings of every subject."""
    judges: defaultdict[str, set[str]] = defaultdict(set)
    for subject in subjects_of(accelerator):
        for check in subject.checks:
            judges[check.reading].add(subject.name)
    assert {reading: names for reading, names in judges.items() if len(names) > 1} == {}


@pytest.mark.parametrize("accelerator", EXAMINED)
def test_each_check_has_a_name_of_its_own(accelerator: str) -> None:
    """Name checks of readings and of kernel lines differently, since health.yml turns them off by name."""
    counted: Counter[str] = Counter()
    for subject in subjects_of(accelerator):
        counted.update(check.name for check in subject.checks)
        counted.update(check.name for check in subject.lines)
    assert [name for name, count in counted.items() if count > 1] == []


@pytest.mark.parametrize("accelerator", EXAMINED)
def test_steps_after_a_kernel_line_ask_for_an_item_only_if_it_names_one(accelerator: str) -> None:
    """Judge a line of each check whose steps have `{item}` or `{id}`: its answer has the item."""
    for check in (check for subject in subjects_of(accelerator) for check in subject.lines):
        if not any("{item}" in step or "{id}" in step for step in check.steps):
            continue
        match = re.search(check.pattern, LINES[check.name])
        assert match
        answer = check.judge(match)
        assert answer
        assert answer.item in ITEMS
