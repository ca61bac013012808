"""How an engine is asked for the devices of a lab: chosen by what it says, probed where it does not say.

CDI before all, since what it gives outlives `systemctl daemon-reload`, which takes devices from containers that got
them by a hook; then reservations; then the vendor's runtime, which is all that some engines have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl import accelerators
from labctl.accelerators import EngineAccess
from labctl.backends.docker.engine import Capabilities
from labctl.backends.docker.lab import capabilities
from labctl.backends.spec import chosen_devices
from labctl.config.settings import Settings
from labctl.errors import HostError, LabError
from labctl.model import Device, Host, Request
from labctl.system import procfs
from labctl.system.hostpath import HostPath
from labctl.system.procfs import ROOT

ASSUMED: Request = "reservation"
KEY = "request"


def resolve_device_request(
    settings: Settings,
    accelerator: str,
    host: Host,
    directory: Path,
    image: str,
    engine: Capabilities | None,
    *,
    refresh: bool = False,
    root: HostPath = ROOT,
) -> Host:
    """The host with the way that its engine is asked for devices. HostError where it has none, or a probe fails.

    What only a probe can tell is kept per daemon until ``refresh``; without an engine, what was kept counts. ``root``
    is the root directory of the engine's host.
    """
    access = accelerators.get(accelerator).engine
    if not engine or not host.devices:
        return remembered(host, directory)
    require_runtime(accelerator, host, engine)
    if not access.is_open:
        return host
    information = engine.information()
    known = capabilities.kept(directory, host.name, engine).get(KEY)
    devices = chosen_devices(settings, accelerator, host)
    ids = tuple(device.id for device in devices)
    request: Request | None = None
    if has_cdi(information, access.cdi, devices, root):
        request = "cdi"
    elif known in {"reservation", "runtime"} and not refresh:
        request = known
    elif access.driver and engine.reserves(settings.text("LAB_NAME"), image, access.driver, ids):
        request = "reservation"
    elif access.runtime in runtimes(information):
        request = "runtime"
    if request != known:
        # What was kept holds no more, even where nothing takes its place.
        capabilities.keep(directory, host.name, engine, **{KEY: request})
    if request is None:
        raise no_way(access, information, devices)
    return replace(host, request=request)


def remembered(host: Host, directory: Path) -> Host:
    """The host with the way that was found when its engine was last asked."""
    return replace(host, request=capabilities.kept(directory, host.name, None).get(KEY) or ASSUMED)


def no_way(access: EngineAccess, information: dict[str, Any], devices: tuple[Device, ...]) -> HostError:
    """The error of an engine that has none of the ways."""
    ids = tuple(device.id for device in devices)
    folders = tuple(information.get("CDISpecDirs") or ())
    searched = f"in {', '.join(folders)}" if folders else "its CDI is off"
    missing = {
        "cdi": f"no CDI device {access.cdi}={ids[0]} ({searched})",
        "reservation": f"no device driver `{access.driver}` for reservations",
        "runtime": f"no runtime `{access.runtime}` (it has {', '.join(runtimes(information))})",
    }
    generate = f"; or `{access.generate_cdi.format(folder=folders[0])}`" if access.generate_cdi and folders else ""
    no = ", ".join(missing[way] for way in access.ways)
    what = f"the engine has no way to give a container {access.noun} {', '.join(ids)}: {no}"
    return HostError(what, hint=access.hint + generate)


def foreseen(
    settings: Settings,
    accelerator: str,
    host: Host,
    directory: Path,
    engine: Capabilities | None,
    root: HostPath = ROOT,
) -> tuple[Request, str]:
    """How `up` would ask for devices as far as is known without a probe, and who says so; no engine need answer."""
    known = capabilities.kept(directory, host.name, None).get(KEY)
    with contextlib.suppress(LabError):
        kind = accelerators.get(accelerator).engine.cdi
        if engine and has_cdi(engine.information(), kind, chosen_devices(settings, accelerator, host), root):
            return "cdi", "engine"
        if engine:
            known = capabilities.kept(directory, host.name, engine).get(KEY)
            # What was true once: it says that it has none now.
            known = None if known == "cdi" else known
    return (known, "engine, when it was tried") if known else (ASSUMED, "assumed until `labctl up` tries it")


def require_runtime(accelerator: str, host: Host, engine: Capabilities) -> None:
    """HostError if the engine cannot serve the devices, as far as is known before an image is built."""
    access = accelerators.get(accelerator).engine
    if access.ways == ("runtime",) and host.devices:
        information = engine.information()
        if access.runtime not in runtimes(information):
            raise no_way(access, information, host.devices)


def runtimes(information: dict[str, Any]) -> tuple[str, ...]:
    """The runtimes that the engine knows by name."""
    return tuple(sorted(information.get("Runtimes") or ()))


def has_cdi(information: dict[str, Any], kind: str, devices: tuple[Device, ...], root: HostPath = ROOT) -> bool:
    """Whether the engine has every one of these devices as a CDI device of that kind."""
    names = {f"{kind}={device.id}" for device in devices}
    return bool(kind) and names <= set(cdi_devices(information, root))


def cdi_devices(information: dict[str, Any], root: HostPath) -> Iterator[str]:
    """Full names of the CDI devices that the engine says it has, or, where it is too old to say, that its folders hold.

    Source: Docker Engine API 1.50 (DiscoveredDevices); CDI's SPEC.md.
    """
    if discovered := information.get("DiscoveredDevices"):
        yield from (device["ID"] for device in discovered if device.get("Source") == "cdi")
        return
    for folder in information.get("CDISpecDirs") or ():
        for path in sorted((root / folder.lstrip("/")).glob("*")):
            spec = read_spec(procfs.read(path)) if path.name.endswith((".json", ".yaml")) else {}
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
