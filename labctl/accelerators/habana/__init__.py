"""Intel Gaudi through Habana's container runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from labctl.accelerators import AcceleratorModule, Advice, EngineAccess, PciVendor, Tool, Watch
from labctl.accelerators.habana.health import SUBJECT
from labctl.errors import HostError
from labctl.model import Device, DeviceMapping, Host, Mount
from labctl.system import files, pci, process
from labctl.system.hostpath import HostPath
from labctl.system.procfs import numa, read

GAUDINET = "/etc/gaudinet.json"
"""Description of the network between Gaudis, on hosts that have it."""
HUGEPAGES = 15_000
"""Huge pages of 2 MiB for eight Gaudis; Intel's own cluster software reserves about 14 500."""
BALANCED = ((5, 9), (5, 16))
"""First and last kernel on which Habana asks to turn NUMA balancing off; hccl_demo's README."""


def find(root: HostPath) -> tuple[Device, ...]:
    """Return the Gaudis: ``/dev/accel/accel<N>`` served by habanalabs, without NPUs, which use the same folder.

    Source: Documentation/ABI/testing/sysfs-driver-habanalabs of the kernel (device_type, fw_os_ver, status);
    ``module_id`` is read from the file that Intel's own Gaudi resource drivers read.
    """
    names = (re.fullmatch(r"accel(\d+)", path.name) for path in (root / "dev/accel").glob("accel*"))
    indices = sorted((match[1] for match in names if match), key=int)
    folders = ((index, root / f"sys/class/accel/accel{index}/device") for index in indices)
    return tuple(device(root, index, folder) for index, folder in folders if pci.driver(folder) == "habanalabs")


def device(root: HostPath, index: str, folder: HostPath) -> Device:
    """Build a Gaudi from its folder in sysfs; unhealthy if the driver reports a status other than ``operational``."""
    status = read(folder / "status").strip()
    return Device(
        id=index,
        path=f"/dev/accel/accel{index}",
        pci=pci.address_of(folder),
        module=read(folder / "module_id").strip(),
        numa=numa(folder),
        cpus=pci.cpus(folder, root),
        name=read(folder / "device_type").strip(),
        firmware=read(folder / "fw_os_ver").strip(),
        health="" if status.lower() in ("", "operational") else f"driver status: {status}",
    )


def driver(root: HostPath) -> str:
    """Return the version of the kernel driver, such as ``1.18.0-ee698fb``; empty if it is not loaded."""
    return read(root / "sys/module/habanalabs/version").strip()


def container(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """Return a container's mapping of Gaudis: environment with ids, SYS_NICE, and the network description if present.

    Source: docs.habana.ai, "Multiple Dockers Each with a Single Workload" (modules) and "Docker Installation".
    """
    modules = tuple(device.module for device in devices)
    network = Mount(source=GAUDINET, target="/etc/habanalabs/gaudinet.json", read_only=True)
    return DeviceMapping(
        environment=(
            ("HABANA_VISIBLE_DEVICES", ",".join(device.id for device in devices)),
            *((("HABANA_VISIBLE_MODULES", ",".join(modules)),) if all(modules) else ()),
            ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
            ("HCCL_SOCKET_IFNAME", host.interface),
        ),
        cap_add=(("SYS_NICE", "Intel's run line asks for it; ranks have no capability"),),
        mounts=(network,) if GAUDINET in host.files else (),
    )


# --- requirements on the host ---------------------------------------------------------------------------


def host_checks(host: Host, read: Callable[[str], str]) -> Iterator[Advice]:
    """Yield advice on a Gaudi host, its impact empty if all is well: huge pages, NUMA balancing, IOMMU passthrough."""
    pages, count = read("proc/sys/vm/nr_hugepages") or "0", len(host.devices)
    required = HUGEPAGES * max(1, count) // 8
    impact = "the driver's buffers come from them: large models fail to allocate host memory"
    summary, fix = f"{pages} huge pages for {count} Gaudis", f"sysctl -w vm.nr_hugepages={required}"
    yield Advice("LAB-GAUDI-001", summary, impact if int(pages) < required else "", fix)

    release = re.match(r"(\d+)\.(\d+)", read("proc/sys/kernel/osrelease") or os.uname().release)
    kernel = (int(release[1]), int(release[2])) if release else (0, 0)
    on = read("proc/sys/kernel/numa_balancing") not in ("", "0")
    impact = "on kernels 5.9 to 5.16 it slows Gaudi down and may make it fail"
    bad = on and BALANCED[0] <= kernel <= BALANCED[1]
    summary = f"NUMA balancing is {'on' if on else 'off'} under kernel {kernel[0]}.{kernel[1]}"
    yield Advice("LAB-GAUDI-002", summary, impact if bad else "", "sysctl -w kernel.numa_balancing=0")

    parameters = set(read("proc/cmdline").split())
    bad = bool(parameters & {"intel_iommu=on", "amd_iommu=on"}) and "iommu=pt" not in parameters
    summary = f"the IOMMU {'translates accesses' if bad else 'is off or passes accesses through'}"
    impact = "each memory access of a device is translated, which costs bandwidth; some fail"
    fix = (
        "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && "
        "{sudo}update-grub  # and reboot this host when it is not in use"
    )
    yield Advice("LAB-GAUDI-003", summary, impact if bad else "", fix)


# --- Habana's images and drivers --------------------------------------------------------
# Versions are of the Gaudi software, which includes driver and image. Sources: docker/habana.releases; that driver and
# image must be of the same release, and the images' names: Support Matrix and installation guide of docs.habana.ai.


def installed_release(root: HostPath = Path("/")) -> str:
    """Return this host's Gaudi driver version, such as ``1.22.0``, from sysfs, else hl-smi; empty without one."""
    query = ["hl-smi", "-Q", "driver_version", "-f", "csv,noheader"]
    return _version(driver(root) or process.run(query, check=False, timeout=10).out)


def base_image() -> str:
    """Return Habana's PyTorch image for this host's driver. HostError without a driver or a known image for it."""
    if release := installed_release():
        return base_for(release)
    raise HostError(
        "the base image for Gaudi depends on the driver, and this host has none",
        hint=f"set LAB_BASE_IMAGE to the image of the nodes' driver, such as {_image(*_torch_of()[-1])}",
    )


def base_for(release: str) -> str:
    """Return Habana's PyTorch image of this release, else the latest of its minor. HostError if none is known."""
    releases = _torch_of()
    same = [row for row in releases if _minor(row[0]) == _minor(release)]
    if not same:
        minors = dict.fromkeys(_minor(software) for software, _ in releases)
        raise HostError(
            f"Habana's image for driver {release} is not known; labctl knows {', '.join(minors)}",
            hint=f"set LAB_BASE_IMAGE to the image of the driver's own release, named like {_image(*releases[-1])}",
        )
    return _image(*next((row for row in same if row[0] == release), same[-1]))


def why_mismatch(release: str, image: str) -> str:
    """Explain that a Gaudi image's minor release is not the driver's; empty if it is, or if the name has none."""
    # As in Docker, a first part with a dot or a colon is a registry, whose address may look like a version.
    first, _, rest = image.partition("/")
    name = rest if rest and ("." in first or ":" in first) else image
    software = _version(name) if "gaudi" in image or "habana" in image else ""
    if not software or _minor(software) == _minor(release):
        return ""
    return (
        f"image {image} has Gaudi software {software}, this host's driver is of {release}: they must be of one release"
    )


def require_image(image: str) -> None:
    """Raise HostError if an image cannot run with this host's driver; without a driver any image passes."""
    release = installed_release()
    if why := release and why_mismatch(release, image):
        raise HostError(why, hint="unset LAB_BASE_IMAGE and LAB_IMAGE, then: labctl build")


def _torch_of() -> list[tuple[str, str]]:
    """Return Gaudi software and torch version of each known image of Habana's, oldest first."""
    rows = files.path("docker", "habana.releases").read_text(encoding="utf-8").splitlines()
    return [(row.split()[0], row.split()[1]) for row in rows if row and not row.startswith("#")]


def _image(software: str, torch: str) -> str:
    return f"vault.habana.ai/gaudi-docker/{software}/ubuntu22.04/habanalabs/pytorch-installer-{torch}:latest"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(text: str) -> str:
    """Return the first version ``x.y.z`` in a text; empty if there is none."""
    match = re.search(r"(?<![\d.])\d+\.\d+\.\d+", text)
    return match[0] if match else ""


_RUNTIME = "/usr/bin/habana-container-runtime"

MODULE = AcceleratorModule(
    sought="/dev/accel/accel<N> served by habanalabs",
    aliases=("gaudi", "hpu"),
    chosen_by=("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
    kernel="habanalabs",
    out_of_memory="PT_DEVMEM.*Allocation failed",
    order=20,
    resources=("habana.ai/gaudi",),
    find=find,
    container=container,
    driver=driver,
    pci=PciVendor("0x1da3", "a Gaudi", ("habanalabs",)),
    # Source: docs.habana.ai, "System Management Interface Tool (hl-smi)".
    tool=Tool(("hl-smi", "-Q", "index,bus_id,name,memory.total,uuid", "-f", "csv,noheader,nounits")),
    engine=EngineAccess(
        runtime="habana",
        noun="Gaudi",
        hint="install habanalabs-container-runtime, put "
        f'"runtimes": {{"habana": {{"path": "{_RUNTIME}"}}}} into /etc/docker/daemon.json and restart Docker',
        program="habana-container-runtime",
        package="habanalabs-container-runtime",
        source="Habana's own archive: add it first (docs.habana.ai, Installation)",
    ),
    watch=Watch(files=("accel/accel[0-9]*",), tool=("hl-smi", "-Q", "index", "-f", "csv,noheader"), line="[0-9]+"),
    attributes=("device_type", "fw_os_ver", "module_id", "status"),
    texts=("sys/module/habanalabs/version",),
    present=(GAUDINET,),
    count=("habana_frameworks.torch.hpu", "HPU"),
    # -d shows only one kind of information at a time.
    health="hl-smi -q",
    subject=SUBJECT,
    reset="sh -c 'modprobe -r habanalabs && modprobe habanalabs'",
    host_checks=host_checks,
    image_check=lambda version, image, base, _: Advice("LAB-IMAGE-003", why_mismatch(version, base or image)),
    require_image=require_image,
    base_image=base_image,
)
