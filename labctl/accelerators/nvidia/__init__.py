"""NVIDIA GPUs, passed by the engine as CDI devices, by device reservations or by the runtime ``nvidia``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from labctl.accelerators import (
    AcceleratorModule,
    Advice,
    EngineAccess,
    PciVendor,
    Tool,
    Variables,
    Watch,
)
from labctl.accelerators.nvidia.checks import SUBJECT
from labctl.accelerators.nvidia.readings import GPUS
from labctl.model import Device, DeviceMapping, Host
from labctl.system import files, pci
from labctl.system.hostpath import HostPath
from labctl.system.procfs import numa, read

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest driver for each major version of CUDA.

Source: CUDA's release notes, "Minimum Required Driver Version" for minor versions.
"""


def find(root: HostPath) -> tuple[Device, ...]:
    """Return the GPUs with a device file, in PCI order, with the driver's facts; without minors, the files alone.

    An id is the index that nvidia-smi, ``--gpus device=`` and NVIDIA_VISIBLE_DEVICES use: the position in PCI order
    among all GPUs of the driver, which may differ from the minor number. If the driver does not report minors, they
    serve as indices. Source: NVIDIA in nvidia-docker#376 (minor numbers differ from the PCI order of nvidia-smi).
    """
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in (root / "dev").glob("nvidia*"))
    minors = sorted((match[1] for match in names if match), key=int)
    cards = [information(folder) for folder in (root / GPUS).glob("*") if pci.address(folder.name)]
    cards.sort(key=lambda fields: pci.order(fields["address"]))
    if not cards or not all("Device Minor" in fields for fields in cards):
        return tuple(Device(id=minor, path=f"/dev/nvidia{minor}") for minor in minors)
    return tuple(
        device(root, str(index), fields) for index, fields in enumerate(cards) if fields["Device Minor"] in minors
    )


def information(folder: HostPath) -> dict[str, str]:
    """Return the fields that the driver reports of a GPU, and its ``address``."""
    lines = (line.partition(":") for line in read(folder / "information").splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines if value.strip()}
    return {**fields, "address": pci.address(folder.name)}


def device(root: HostPath, index: str, fields: Mapping[str, str]) -> Device:
    """Build a GPU from the driver's fields; uuid and firmware are empty until a program has opened it."""
    folder = root / "sys/bus/pci/devices" / fields["address"]
    uuid, bios = fields.get("GPU UUID", ""), fields.get("Video BIOS", "")
    return Device(
        id=index,
        path=f"/dev/nvidia{fields['Device Minor']}",
        pci=fields["address"],
        numa=numa(folder),
        cpus=pci.cpus(folder, root),
        name=fields.get("Model", ""),
        uuid="" if "?" in uuid else uuid,
        firmware="" if "?" in bios else bios,
    )


def driver(root: HostPath) -> str:
    """Return the version of the kernel driver, such as ``550.54.15``; empty if it is not loaded."""
    version = read(root / "sys/module/nvidia/version").strip()
    line = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", read(root / "proc/driver/nvidia/version"))
    return version or (line[1] if line else "")


def container(host: Host, devices: tuple[Device, ...]) -> DeviceMapping:
    """Return the environment for these GPUs: ids for ``runtime``, ``void`` for CDI and the launcher, else neither.

    Otherwise an image that asks for every GPU would get them if the engine's default runtime is ``nvidia``.
    """
    every = ("NVIDIA_VISIBLE_DEVICES", "void")
    ids = ("NVIDIA_VISIBLE_DEVICES", ",".join(device.id for device in devices))
    return DeviceMapping(
        environment=(
            *{"runtime": (ids,), "cdi": (every,)}.get(host.request, ()),
            ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
            ("NCCL_SOCKET_IFNAME", host.interface),
        ),
        launcher_environment=(every,),
    )


def image_check(version: str, image: str, base: str, variables: Variables) -> Advice | None:
    """Return advice on a driver for an image's CUDA, its summary empty if it will do; None if that CUDA is unknown."""
    cuda = cuda_of(image, base, variables)
    if not cuda:
        return None
    package = f"cuda-drivers-{DRIVERS.get(cuda, '').partition('.')[0]}"
    return Advice(
        "LAB-IMAGE-003",
        why_too_old(version, cuda),
        "the package is in NVIDIA's own archive: add it first (CUDA Installation Guide)",
        f"apt-get install --yes {package} && {{sudo}}reboot",
    )


def cuda_of(image: str, base: str, variables: Variables) -> int:
    """Return the major version of CUDA in an image of labctl's; 0 for any other image, or if it is unknown.

    The lock file has it for an image based on a distribution, CUDA_VERSION for an image based on NVIDIA's.
    """
    if image.removesuffix(":latest") not in ("labctl/nvidia", "labctl/nvidia-horovod"):
        return 0
    if not re.search(r"(^|/)(debian|ubuntu|labctl/base|labctl/nvidia)(:|@|$)", base):
        version = variables().get("CUDA_VERSION", "").partition(".")[0]
        return int(version) if version.isdecimal() else 0
    text = read(files.path("docker", "nvidia.lock"))
    # The lock may also have the newer runtime of the compiler's release, besides the version that torch was built for.
    return min(map(int, re.findall(r"^nvidia-cuda-runtime\S*==(\d+)", text, re.MULTILINE)), default=0)


def why_too_old(version: str, cuda: int) -> str:
    """Explain why a driver does not support a CUDA version; empty if it does, or if that CUDA is unknown."""
    from packaging.version import Version

    oldest = DRIVERS.get(cuda, "")
    if not oldest or Version(version) >= Version(oldest):
        return ""
    return f"driver {version} is too old for the image's CUDA {cuda}, which needs {oldest} or newer"


_CONFIGURE = "nvidia-ctk runtime configure --runtime=docker"

MODULE = AcceleratorModule(
    sought="/dev/nvidia<N>",
    aliases=("cuda", "gpu"),
    chosen_by=("CUDA_VISIBLE_DEVICES",),
    missed="not compiled with CUDA|_cuda_setDevice|Found no NVIDIA driver",
    kernel="NVRM|nvidia",
    out_of_memory="(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(?:STATUS_)?ALLOC_FAILED|cudaErrorMemoryAllocation",
    # Source: the CUDA Runtime's error strings; NVIDIA's Xid catalog.
    faulted="uncorrectable (?:ECC|NVLink) error|cudaErrorECCUncorrectable|GPU is lost|fallen off the bus|NVRM: Xid",
    order=10,
    resources=("nvidia.com/gpu",),
    find=find,
    container=container,
    driver=driver,
    pci=PciVendor("0x10de", "an NVIDIA card", ("nvidia",), first_file="sudo nvidia-modprobe -c0 -u"),
    tool=Tool(  # Source: nvidia-smi --help-query-gpu.
        (
            "nvidia-smi",
            "--query-gpu=index,pci.bus_id,name,memory.total,uuid,ecc.errors.uncorrected.volatile.total",
            "--format=csv,noheader,nounits",
        ),
        ("index", "pci", "name", "memory", "uuid", "errors"),
    ),
    engine=EngineAccess(
        cdi="nvidia.com/gpu",
        driver="nvidia",
        runtime="nvidia",
        noun="NVIDIA GPU",
        hint=f"install NVIDIA Container Toolkit, then `{_CONFIGURE}` and restart Docker",
        program="nvidia-ctk",
        package="nvidia-container-toolkit",
        source="NVIDIA's own archive: add it first (Container Toolkit, Installing)",
        configure=_CONFIGURE,
        generate_cdi="nvidia-ctk cdi generate --output={folder}/nvidia.yaml",
        enable_cdi=f"{_CONFIGURE} --cdi.enabled",
    ),
    watch=Watch(files=("nvidia[0-9]*", "nvidiactl", "nvidia-uvm"), tool=("nvidia-smi", "-L"), line="GPU [0-9]+:"),
    texts=("proc/driver/nvidia/version", f"{GPUS}/*/information", "sys/module/nvidia/version"),
    count=("torch.cuda", "GPU"),
    health="nvidia-smi -q -d CLOCK,ECC,PERFORMANCE",
    subject=SUBJECT,
    reset="nvidia-smi --gpu-reset --id={device}",
    image_check=image_check,
    images=(("horovod", "nvidia-horovod"),),
)
