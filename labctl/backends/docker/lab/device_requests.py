"""The way to request a lab's devices from an engine: as the engine reports it, probed if it does not.

CDI comes first, since its devices survive `systemctl daemon-reload`, which takes devices from containers that got them
by a hook; then reservations; then the vendor's runtime, which is all that some engines have.
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
    """Return the host with its way to request devices, probed or cached. HostError if none works.

    Results of probes are cached per daemon until ``refresh``; without an engine, the cached result is used. ``root`` is
    the root directory of the engine's host.
    """
    access = accelerators.get(accelerator).engine
    if not engine or not host.devices:
        return remembered(host, directory)
    require_runtime(accelerator, host, engine)
    if not access.is_open:
        return host
    information = engine.information()
    cached = capabilities.kept(directory, host.name, engine).get(KEY)
    devices = chosen_devices(settings, accelerator, host)
    ids = tuple(device.id for device in devices)
    request: Request | None = None
    if has_cdi(information, access.cdi, devices, root):
        request = "cdi"
    elif cached in {"reservation", "runtime"} and not refresh:
        request = cached
    elif access.driver and engine.reserves(settings.text("LAB_NAME"), image, access.driver, ids):
        request = "reservation"
    elif access.runtime in runtimes(information):
        request = "runtime"
    if request != cached:
        # The cached result is outdated, even if no other way works.
        capabilities.keep(directory, host.name, engine, **{KEY: request})
    if request is None:
        raise no_way(access, information, devices)
    return replace(host, request=request)


def remembered(host: Host, directory: Path) -> Host:
    """Return the host with the cached way to request devices; ``ASSUMED`` if none is cached."""
    return replace(host, request=capabilities.kept(directory, host.name, None).get(KEY) or ASSUMED)


def no_way(access: EngineAccess, information: dict[str, Any], devices: tuple[Device, ...]) -> HostError:
    """Return the HostError of an engine that supports no way to request devices, with what each lacks."""
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
    message = f"the engine has no way to give a container {access.noun} {', '.join(ids)}: {no}"
    return HostError(message, hint=access.hint + generate)


def foreseen(
    settings: Settings,
    accelerator: str,
    host: Host,
    directory: Path,
    engine: Capabilities | None,
    root: HostPath = ROOT,
) -> tuple[Request, str]:
    """Return the way by which `up` will request devices, without a probe, and the origin of that knowledge."""
    cached = capabilities.kept(directory, host.name, None).get(KEY)
    with contextlib.suppress(LabError):
        kind = accelerators.get(accelerator).engine.cdi
        if engine and has_cdi(engine.information(), kind, chosen_devices(settings, accelerator, host), root):
            return "cdi", "engine"
        if engine:
            cached = capabilities.kept(directory, host.name, engine).get(KEY)
            # Outdated: the engine just reported that it has no CDI devices.
            cached = None if cached == "cdi" else cached
    return (cached, "engine, when it was tried") if cached else (ASSUMED, "assumed until `labctl up` tries it")


def require_runtime(accelerator: str, host: Host, engine: Capabilities) -> None:
    """Raise HostError if a host with devices needs the vendor's runtime as the only way and the engine lacks it."""
    access = accelerators.get(accelerator).engine
    if access.ways == ("runtime",) and host.devices:
        information = engine.information()
        if access.runtime not in runtimes(information):
            raise no_way(access, information, host.devices)


def runtimes(information: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the engine's runtimes."""
    return tuple(sorted(information.get("Runtimes") or ()))


def has_cdi(information: dict[str, Any], kind: str, devices: tuple[Device, ...], root: HostPath = ROOT) -> bool:
    """Tell if the engine has all of these devices as CDI devices of that kind."""
    names = {f"{kind}={device.id}" for device in devices}
    return bool(kind) and names <= set(cdi_devices(information, root))


def cdi_devices(information: dict[str, Any], root: HostPath) -> Iterator[str]:
    """Yield the full names of the CDI devices that the engine reports, or an older engine's folders describe.

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
    """Return a CDI specification, YAML or JSON, as a dictionary; {} if it is invalid."""
    import yaml

    # Specifications of many devices are long, and the Python loader is slow. JSON is valid YAML.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        spec = yaml.load(text, Loader=loader)  # noqa: S506 - both loaders are safe
    except yaml.YAMLError:
        return {}
    is_spec = isinstance(spec, dict) and "kind" in spec and isinstance(spec.get("devices"), list)
    return spec if is_spec and all(isinstance(device, dict) for device in spec["devices"]) else {}
