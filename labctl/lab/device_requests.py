"""How an engine is asked for the devices of a lab: chosen by what it says, tried where it does not say.

NVIDIA: CDI before all, since what it gives outlives `systemctl daemon-reload`, which takes devices from containers
that got them by a hook; then reservations; then the runtime, which is all that some engines have. Gaudi has only its
runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labctl.accelerators.nvidia import CDI_KIND
from labctl.config.settings import Settings
from labctl.engines import Capabilities
from labctl.errors import HostError, LabError
from labctl.lab import capabilities
from labctl.lab import spec as lab
from labctl.model import Accelerator, Device, Host, Request

ASSUMED: Request = "reservation"
KEY = "request"


Texts = Callable[[str], Mapping[str, str]]
"""What the files of a folder hold, by name."""


def texts_here(folder: str) -> dict[str, str]:
    """The files of a folder of this machine, less those that are no text."""
    found = {}
    for path in sorted(Path(folder).glob("*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found[path.name] = path.read_text(encoding="utf-8")
    return found


def settled(
    found: Settings,
    accelerator: Accelerator,
    host: Host,
    directory: Path,
    image: str,
    engine: Capabilities | None,
    *,
    anew: bool = False,
    texts: Texts = texts_here,
) -> Host:
    """The host with the way that its engine is to be asked for devices. HostError where the engine has none.

    What only a trial can tell is kept per daemon until it is tried ``anew``; without an engine, what was kept counts.
    ``texts`` reads the folders of the engine's host.
    """
    if not engine or not host.devices:
        return remembered(host, directory)
    information = engine.information()
    if accelerator == "habana":
        require_habana(information)
    if accelerator != "nvidia":
        return host
    known = capabilities.kept(directory, host.name, engine).get(KEY)
    devices = wanted(found, host)
    request: Request | None
    if has_cdi(information, devices, texts):
        request = "cdi"
    elif known in {"reservation", "runtime"} and not anew:
        request = known
    else:
        request = tried(engine, information, found.text("LAB_NAME"), image, devices)
    if request != known:
        # What was kept holds no more, even where nothing takes its place.
        capabilities.keep(directory, host.name, engine, **{KEY: request})
    if request is None:
        raise no_way(information, devices)
    return replace(host, request=request)


def remembered(host: Host, directory: Path) -> Host:
    """The host with the way that was found when its engine was last asked."""
    return replace(host, request=capabilities.kept(directory, host.name, None).get(KEY) or ASSUMED)


def tried(
    engine: Capabilities, information: dict[str, Any], lab_name: str, image: str, devices: tuple[Device, ...]
) -> Request | None:
    """Reservations where the engine knows their driver, else the runtime; None where it has neither.

    HostError where the trial fails for another reason, which says nothing of either.
    """
    if engine.reserves(lab_name, image, "nvidia", tuple(device.id for device in devices)):
        return "reservation"
    return "runtime" if "nvidia" in runtimes(information) else None


def no_way(information: dict[str, Any], devices: tuple[Device, ...]) -> HostError:
    """What is said of an engine that has none of the ways."""
    ids = tuple(device.id for device in devices)
    folders = tuple(information.get("CDISpecDirs") or ())
    return HostError(
        f"the engine has no way to give a container NVIDIA GPU {', '.join(ids)}: no CDI device {CDI_KIND}={ids[0]} "
        f"({'in ' + ', '.join(folders) if folders else 'its CDI is off'}), no device driver `nvidia` for reservations, "
        f"no runtime `nvidia` (it has {', '.join(runtimes(information))})",
        hint="install NVIDIA Container Toolkit, then `nvidia-ctk runtime configure --runtime=docker` and restart Docker"
        + (f"; or `nvidia-ctk cdi generate --output={folders[0]}/nvidia.yaml`" if folders else ""),
    )


def described(
    found: Settings, accelerator: Accelerator, host: Host, directory: Path, engine: Capabilities | None
) -> tuple[str, str]:
    """How devices are asked for, and who says so; nothing is tried, and no engine need answer."""
    if accelerator != "nvidia":
        ways = {"habana": "runtime habana", "intel": "device files"}
        return ways.get(accelerator, "none"), f"accelerator {accelerator}"
    return foreseen(found, host, directory, engine)


def foreseen(
    found: Settings, host: Host, directory: Path, engine: Capabilities | None, texts: Texts = texts_here
) -> tuple[Request, str]:
    """How `up` would ask for GPUs as far as can be told without a trial, and who says so; no engine need answer."""
    known = capabilities.kept(directory, host.name, None).get(KEY)
    with contextlib.suppress(LabError):
        if engine and has_cdi(engine.information(), wanted(found, host), texts):
            return "cdi", "engine"
        if engine:
            known = capabilities.kept(directory, host.name, engine).get(KEY)
            # What was true once: it says that it has none now.
            known = None if known == "cdi" else known
    return (known, "engine, when it was tried") if known else (ASSUMED, "assumed until `labctl up` tries it")


def wanted(found: Settings, host: Host) -> tuple[Device, ...]:
    """The GPUs that the settings pick."""
    return lab.chosen_devices("nvidia", host, found.text("LAB_DEVICES"))


def require_runtime(accelerator: Accelerator, host: Host, engine: Capabilities) -> None:
    """HostError where the engine lacks what can be told without an image: before one is built for nothing."""
    if accelerator == "habana" and host.devices:
        require_habana(engine.information())


def require_habana(information: dict[str, Any]) -> None:
    """HostError where the engine does not know Gaudi's runtime."""
    if "habana" not in runtimes(information):
        raise HostError(
            "the engine has no runtime `habana`, which brings Gaudis into containers "
            f"(it has {', '.join(runtimes(information))})",
            hint="install habanalabs-container-runtime, put "
            '"runtimes": {"habana": {"path": "/usr/bin/habana-container-runtime"}} into /etc/docker/daemon.json '
            "and restart Docker",
        )


def runtimes(information: dict[str, Any]) -> tuple[str, ...]:
    """The runtimes that the engine knows by name."""
    return tuple(sorted(information.get("Runtimes") or ()))


def has_cdi(information: dict[str, Any], devices: tuple[Device, ...], texts: Texts = texts_here) -> bool:
    """Whether the engine has every one of these GPUs as a CDI device."""
    names = {f"{CDI_KIND}={device.id}" for device in devices}
    return names <= set(cdi_devices(information, texts))


def cdi_devices(information: dict[str, Any], texts: Texts) -> Iterator[str]:
    """Full names of the CDI devices that the engine says it has, or, where it is too old to say, that its folders hold.

    Source: Docker Engine API 1.50 (DiscoveredDevices); CDI's SPEC.md.
    """
    if discovered := information.get("DiscoveredDevices"):
        yield from (device["ID"] for device in discovered if device.get("Source") == "cdi")
        return
    for folder in information.get("CDISpecDirs") or ():
        for name, text in texts(folder).items():
            spec = read_spec(text) if name.endswith((".json", ".yaml")) else {}
            yield from (f"{spec['kind']}={device.get('name')}" for device in spec.get("devices", ()))


def read_spec(text: str) -> dict[str, Any]:
    """A CDI specification; empty for what is none: the engine leaves it out too."""
    import yaml

    # That of many devices is long, and Python's own loader slow; JSON is YAML.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = yaml.load(text, Loader=loader)  # noqa: S506 - either of them is safe
    except yaml.YAMLError:
        return {}
    is_one = isinstance(found, dict) and "kind" in found and isinstance(found.get("devices"), list)
    return found if is_one and all(isinstance(device, dict) for device in found["devices"]) else {}
