"""What Gaudi asks of a host: huge pages, no NUMA balancing on some kernels, an IOMMU that passes accesses through."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from labctl.doctor.finding import Examination, Finding, ok, warn

HUGEPAGES = 15_000
"""Pages of 2 MiB for eight Gaudis: what Intel's own cluster software reserves comes to 14 500."""
BALANCED = ((5, 9), (5, 16))
"""First and last kernel whose NUMA balancing Habana asks to be turned off; hccl_demo's README."""


def hugepages(examination: Examination) -> Iterator[Finding]:
    """Huge pages, which Gaudi's communication takes its buffers from."""
    if examination.lab.accelerator != "habana":
        return
    text = examination.read("proc/sys/vm/nr_hugepages")
    wanted = HUGEPAGES * max(1, len(examination.here.devices)) // 8
    if int(text or 0) < wanted:
        yield warn(
            "LAB-GAUDI-001",
            f"{text or 'no'} huge pages for {len(examination.here.devices)} Gaudis",
            why="the driver's buffers come from them; without, large models fail to allocate host memory",
            fix=examination.place.there(f"{examination.place.sudo}sysctl -w vm.nr_hugepages={wanted}"),
        )
    else:
        yield ok("LAB-GAUDI-001", f"{text} huge pages")


def balancing(examination: Examination) -> Iterator[Finding]:
    """NUMA balancing, which moves pages that Gaudi's driver has pinned on some kernels."""
    if examination.lab.accelerator != "habana":
        return
    kernel = kernel_of(examination.read("proc/sys/kernel/osrelease") or os.uname().release)
    on = examination.read("proc/sys/kernel/numa_balancing") not in ("", "0")
    if on and BALANCED[0] <= kernel <= BALANCED[1]:
        yield warn(
            "LAB-GAUDI-002",
            f"NUMA balancing is on under kernel {kernel[0]}.{kernel[1]}",
            why="on kernels 5.9 to 5.16 it slows Gaudi down and may make it fail",
            fix=examination.place.there(f"{examination.place.sudo}sysctl -w kernel.numa_balancing=0"),
        )
    else:
        yield ok("LAB-GAUDI-002", f"NUMA balancing {'on' if on else 'off'}, which this kernel's Gaudi driver stands")


def kernel_of(release: str) -> tuple[int, int]:
    """``5.15.0-86-generic`` -> ``(5, 15)``."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def iommu(examination: Examination) -> Iterator[Finding]:
    """An IOMMU that translates each of Gaudi's accesses to memory, instead of passing them through."""
    if examination.lab.accelerator != "habana":
        return
    words = examination.read("proc/cmdline").split()
    translating = {"intel_iommu=on", "amd_iommu=on"} & set(words)
    if translating and "iommu=pt" not in words:
        sudo = examination.place.sudo
        yield warn(
            "LAB-GAUDI-003",
            f"the kernel was started with {', '.join(sorted(translating))} and without iommu=pt",
            why="each access of a device to memory is translated, which costs bandwidth; some fail",
            fix=examination.place.there(
                f"{sudo}sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && {sudo}update-grub"
                "  # and start this host anew when nobody works on it"
            ),
        )
    else:
        yield ok("LAB-GAUDI-003", "the IOMMU is off or passes accesses through")
