"""Trees like a host's /dev, /sys and /proc, with cards as their drivers present them."""

from __future__ import annotations

from pathlib import Path


def put(path: Path, text: str = "") -> Path:
    """Write a file, making its folders; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def link(path: Path, target: Path) -> None:
    """Make a symbolic link to a target, and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def cores(root: Path, text: str) -> None:
    """Write the files that list the machine's cores, all of them usable."""
    put(root / "proc/self/status", f"Name:\tcat\nCpus_allowed_list:\t{text}\n")
    put(root / "sys/devices/system/cpu/online", f"{text}\n")


def card(
    root: Path,
    address: str,
    vendor: str,
    *,
    kind: str = "0x030200",
    driver: str = "",
    numa: int | None = None,
    cores: str = "",
) -> Path:
    """Write a PCI device below sys, bound to a driver if given; return its folder."""
    folder = root / f"sys/devices/pci0000:00/{address}"
    put(folder / "vendor", f"{vendor}\n")
    put(folder / "class", f"{kind}\n")
    if numa is not None:
        put(folder / "numa_node", f"{numa}\n")
    put(folder / "local_cpulist", f"{cores}\n")
    if driver:
        (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        link(folder / "driver", root / f"sys/bus/pci/drivers/{driver}")
    link(root / f"sys/bus/pci/devices/{address}", folder)
    return folder


def nvidia(root: Path, address: str, minor: int | None, *, file: bool = True, **facts: object) -> Path:
    """Write an NVIDIA GPU, with a device file unless ``file`` is False or ``minor`` None; return its folder."""
    folder = card(root, address, "0x10de", driver="nvidia", **facts)  # type: ignore[arg-type]
    information = (
        ""
        if minor is None
        else (
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-0000-{minor}\n"
            f"Video BIOS: \t 96.00.61.00.01\nBus Type: \t PCIe\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
    )
    put(root / f"proc/driver/nvidia/gpus/{address}/information", information)
    if file and minor is not None:
        put(root / f"dev/nvidia{minor}")
    return folder


def gaudi(root: Path, index: int, address: str, *, driver: str = "habanalabs", vendor: str = "0x1da3",
          told: dict[str, str] | None = None, **facts: object) -> Path:  # fmt: skip
    """Write an accelerator in /dev/accel, a Gaudi by default, with ``told`` as driver files; return its folder."""
    folder = card(root, address, vendor, kind="0x120000", driver=driver, **facts)  # type: ignore[arg-type]
    link(root / f"sys/class/accel/accel{index}/device", folder)
    put(root / f"dev/accel/accel{index}")
    put(root / f"dev/accel/accel_controlD{index}")
    for name, text in (told or {}).items():
        put(folder / name, f"{text}\n")
    return folder


def render_node(root: Path, number: int, address: str, *, vendor: str = "0x8086", driver: str = "xe",
                **facts: object) -> Path:  # fmt: skip
    """Write a GPU with a render node and its by-path link; return its folder."""
    folder = card(root, address, vendor, kind="0x030000", driver=driver, **facts)  # type: ignore[arg-type]
    link(root / f"sys/class/drm/renderD{number}/device", folder)
    put(root / f"dev/dri/renderD{number}")
    link(root / f"dev/dri/by-path/pci-{address}-render", Path(f"../renderD{number}"))
    return folder
