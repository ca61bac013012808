"""Accelerators as the kernel and the vendor's driver present them, planted in a machine."""

from __future__ import annotations

from support.machine.machine import Machine

BUS = "/sys/devices/stand-in"
RENDER = 991
"""Id of group render on the stand-in machine; the number differs between distributions."""


def pci(machine: Machine, address: str, vendor: str, device: str, kind: str, *, numa: int = 0) -> str:
    """Plant a PCI device in the machine's sysfs; return its folder."""
    folder = f"{BUS}/{address}"
    facts = {"vendor": vendor, "device": device, "class": kind, "numa_node": numa, "local_cpulist": "0-1"}
    for name, value in facts.items():
        machine.file(f"{folder}/{name}", f"{value}\n")
    machine.link(f"/sys/bus/pci/devices/{address}", f"../../../devices/stand-in/{address}")
    return folder


def driver(machine: Machine, folder: str, name: str) -> None:
    """Bind a planted PCI device to a kernel driver, made if missing."""
    where = f"/sys/bus/pci/drivers/{name}"
    if not machine.at(where).exists():
        machine.file(f"{where}/module/version", "1.0\n")
    machine.link(f"{folder}/driver", f"../../../bus/pci/drivers/{name}")


def nvidia(machine: Machine, index: int) -> None:
    """Plant an NVIDIA GPU: device files, PCI device, and the driver's entry in /proc."""
    address = f"0000:{0x10 + index:02x}:00.0"
    driver(machine, pci(machine, address, "0x10de", "0x2330", "0x030200"), "nvidia")
    for path in ("/dev/nvidiactl", "/dev/nvidia-uvm"):
        if not machine.at(path).exists():
            machine.device(path)
    machine.device(f"/dev/nvidia{index}")
    machine.file(
        f"/proc/driver/nvidia/gpus/{address}/information",
        f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\nGPU UUID: \t GPU-{index:08x}-0000-0000-0000-000000000000\n"
        f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {index}\n",
    )


def gaudi(machine: Machine, index: int, *, module: int) -> None:
    """Plant a Gaudi: device files in /dev/accel, the habanalabs driver, and a module id, which is stable at reboots."""
    address = f"0000:{0x30 + index:02x}:00.0"
    folder = pci(machine, address, "0x1da3", "0x1020", "0x120000")
    driver(machine, folder, "habanalabs")
    accelerator(machine, folder, index)
    machine.device(f"/dev/accel/accel_controlD{index}")
    machine.file(f"{folder}/module_id", f"{module}\n")
    machine.file(f"{folder}/pci_addr", f"{address}\n")


def npu(machine: Machine, index: int) -> None:
    """Plant an Intel NPU, which shares /dev/accel with Gaudis."""
    folder = pci(machine, "0000:00:0b.0", "0x8086", "0x7d1d", "0x120000")
    driver(machine, folder, "intel_vpu")
    accelerator(machine, folder, index)


def accelerator(machine: Machine, folder: str, index: int) -> None:
    """Plant a device file in /dev/accel and its links in sysfs to a PCI device."""
    machine.device(f"/dev/accel/accel{index}")
    machine.link(f"/sys/class/accel/accel{index}", f"../../{folder.removeprefix('/sys/')}/accel/accel{index}")
    machine.link(f"{folder}/accel/accel{index}/device", "../../../" + folder.rpartition("/")[2])


def card(machine: Machine, number: int, *, vendor: str, gid: int = RENDER) -> None:
    """Plant a graphics card in /dev/dri, with its PCI path links; ``number`` 0 is card0 and renderD128."""
    address = f"0000:{3 + number:02x}:00.0"
    folder = pci(machine, address, vendor, "0x0bda" if vendor == "0x8086" else "0x744c", "0x038000")
    driver(machine, folder, "xe" if vendor == "0x8086" else "amdgpu")
    for name, kind in ((f"card{number}", "card"), (f"renderD{128 + number}", "render")):
        machine.device(f"/dev/dri/{name}", mode=0o660, gid=gid)
        machine.link(f"/dev/dri/by-path/pci-{address}-{kind}", f"../{name}")
        machine.link(f"/sys/class/drm/{name}", f"../../{folder.removeprefix('/sys/')}/drm/{name}")
        machine.link(f"{folder}/drm/{name}/device", f"../../../{address}")


def groups(machine: Machine, **numbers: int) -> None:
    """Set the ids of the machine's groups by name."""
    lines = [line for line in machine.at("/etc/group").read_text().splitlines() if line.split(":")[0] not in numbers]
    machine.file("/etc/group", "\n".join([*lines, *(f"{name}:x:{gid}:" for name, gid in numbers.items()), ""]))


def port(machine: Machine, name: str, *, driver: str) -> None:
    """Plant a network port of this kernel driver that is up."""
    folder = f"{BUS}/net/{name}"
    for file, text in {"operstate": "up", "carrier": "1", "speed": "100000"}.items():
        machine.file(f"{folder}/{file}", f"{text}\n")
    machine.link(f"{folder}/device", f"../../devices/{name}")
    machine.link(f"{BUS}/devices/{name}/driver", f"../../../../bus/pci/drivers/{driver}")
    machine.link(f"/sys/class/net/{name}", f"../../{folder.removeprefix('/sys/')}")
