"""What a lab needs on this host before its containers start: image, mounts, keys, secrets."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from labctl import device_requests, gaudi_releases, images, keys, lab, limits, lock, render
from labctl.containers import Observed
from labctl.context import Context
from labctl.engines.docker_engine import DockerEngine
from labctl.errors import ConfigError, HostError
from labctl.files import make_private, write_all
from labctl.lab import own_mounts
from labctl.model import File, Lab, Workload
from labctl.observe import observe
from labctl.plan import ComposeUp, Plan, RemoveContainers
from labctl.settings import Settings

Ask = Callable[[str], bool]


def load_lab(context: Context, found: Settings, engine: DockerEngine | None = None, *, anew: bool = False) -> Lab:
    """The lab that the settings describe, on this host as it is; an engine that is given is asked what it can do.

    What an earlier trial said of devices is tried ``anew`` for doctor.
    """
    accelerator, here = observe(found.text("LAB_ACCELERATOR"))
    image = image_name(found)
    here = device_requests.settled(found, accelerator, here, context.directory, image, engine, anew=anew)
    granted = limits.granted(found, context.directory, image, engine, context.warn)
    return lab.build(found, context.directory, accelerator, (here,), granted)


def foresee_lab(context: Context, found: Settings, engine: DockerEngine) -> Lab:
    """The lab as `up` would make it, as far as can be told without a trial; no engine need answer."""
    accelerator, here = observe(found.text("LAB_ACCELERATOR"))
    if accelerator == "nvidia":
        here = replace(here, request=device_requests.foreseen(found, here, context.directory, engine)[0])
    granted = limits.granted(found, context.directory, image_name(found), None, context.warn)
    return lab.build(found, context.directory, accelerator, (here,), granted)


def image_name(found: Settings) -> str:
    """The image of the lab's nodes: the one asked for, or labctl's own for the accelerator."""
    return found.text("LAB_IMAGE") or images.tag(accelerator(found))


def accelerator(found: Settings) -> str:
    """The accelerator of the lab's nodes, by name; only where the setting is auto, this host's devices tell it."""
    wanted = found.text("LAB_ACCELERATOR")
    return observe(wanted)[0] if wanted == "auto" else wanted


def for_workload(found: Settings, task: Workload) -> Settings:
    """The settings with the image that a workload needs, unless they name one themselves."""
    if not task.image or found.text("LAB_IMAGE"):
        return found
    return found.with_value("LAB_IMAGE", images.tag(task.image), origin=f"workload {task.name}")


def ensure_image(context: Context, found: Settings, engine: DockerEngine) -> None:
    """Build the lab's image when it is not there; say so when it was built from other files than these."""
    observe(found.text("LAB_ACCELERATOR"))  # A host without the devices is told so before minutes of building.
    image = image_name(found)
    own = images.name_of(image)
    if engine.image_id(image) is None:
        if found.text("LAB_IMAGE") and not own:
            raise HostError(f"there is no image {image}", hint=f"docker pull {image}, or unset LAB_IMAGE")
        device_requests.require_runtime(found, engine)
        context.notice(f"image {image} is not there yet: building it (minutes, once)")
        build_image(context, found)
    labels = engine.image_labels(image)
    if accelerator(found) == "habana":
        gaudi_releases.require_match(labels.get(images.BASE_LABEL) or image)
    if own and images.is_stale(labels, own):
        asked = found.origin("LAB_IMAGE").partition("workload ")[2]
        command = f"labctl build --workload {asked}" if asked else "labctl build"
        context.warn(f"image {image} was built from other files than labctl's own now; `{command}` makes it anew")


def offer(task: Workload, image: str, engine: DockerEngine, ask: Ask | None) -> None:
    """Ask whether the lab may be brought up with the image that a workload needs; HostError unless it is agreed."""
    missing = engine.image_id(image) is None
    lacking = f"{task.name} needs image {image}, which {'is not there' if missing else 'the lab does not run'}"
    offered = "build it (minutes, once) and bring the lab up with it?" if missing else "bring the lab up with it?"
    if ask is None or not ask(f"{lacking}; {offered}"):
        command = f"labctl up --workload {task.name}"
        raise HostError(lacking, hint=f"labctl build --workload {task.name} && {command}" if missing else command)


def build_image(context: Context, found: Settings, *, update_lock: bool = False) -> dict[str, Any]:
    """Build the image of the lab's nodes, from the Dockerfile of its name or else that of the accelerator."""
    from labctl import build

    tag = image_name(found)
    image = images.name_of(tag) or accelerator(found)
    request = build.request(found, image, tag, context.directory, context.environ)
    return build.update_lock(request, context.notice) if update_lock else build.build(request, context.notice)


def without_devices(found: Settings) -> Settings:
    """The settings as a CPU lab would have them, to look at a host that lacks the devices which they ask for."""
    asked = (("LAB_IMAGE", image_name(found)), ("LAB_ACCELERATOR", "cpu"), ("LAB_DEVICES", ""))
    for key, value in asked:
        found = found.with_value(key, value, origin="a host without devices")
    return found


def can_probe(found: Settings, engine: DockerEngine) -> bool:
    """Whether there is an engine and an image to try limits with."""
    try:
        return engine.image_id(image_name(found)) is not None
    except HostError:
        return False


def require_initialised(context: Context) -> None:
    """ConfigError in a directory that is no lab's: `up` there would make folders that nobody asked for."""
    if not (context.directory / ".env").exists():
        raise ConfigError(f"{context.directory} has no .env", hint=f"labctl init {shlex.quote(str(context.directory))}")


def require_named(context: Context, found: Settings) -> None:
    """ConfigError where nothing says which lab is meant: the default name would be somebody else's."""
    if found.origin("LAB_NAME") == "default" and not (context.directory / ".env").exists():
        hint = "cd into the lab's directory, or name it: -C DIRECTORY"
        raise ConfigError(f"{context.directory} has no .env, so it is no lab's directory", hint=hint)


def require_no_run(context: Context, steps: Plan) -> None:
    """HostError when a plan would take containers from under a run."""
    changing = any(isinstance(step, ComposeUp | RemoveContainers) for step in steps.steps)
    if changing and lock.is_held(context.directory / lock.RUN):
        holder = lock.holder(context.directory / lock.RUN)
        raise HostError(f"{holder} is active, and this would change its nodes", hint="wait for it, or stop it first")


def forget(directory: Path) -> None:
    """Remove keys, secrets and rendered files. HostError for what cannot go."""
    try:
        shutil.rmtree(directory / ".lab")
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {directory}/.lab") from error


def require_own(context: Context, name: str, observed: Observed) -> None:
    """HostError when these containers belong to a lab of the same name in another directory that is still there."""
    owner = observed.owner_elsewhere(context.directory)
    if owner:
        hint = f"set another LAB_NAME in .env, or: labctl down -C {shlex.quote(str(owner))}"
        raise HostError(f"lab `{name}` belongs to {owner}", hint=hint)


def prepare(lab: Lab, image_id: str | None) -> None:
    """Mounts, keys, secrets and caches, which no plan shows; what removed nodes had is removed with them."""
    for source in own_mounts(lab):
        make_private(Path(source))
    keys.ensure(lab)
    write_secrets(lab)
    prepare_caches(lab, image_id)
    drop_links(lab)
    kept = {node.name for node in lab.nodes}
    for folder in (render.node_directory(""), render.cache_directory("")):
        for path in (lab.directory / folder).iterdir():
            if path.name not in kept:
                shutil.rmtree(path)


def prepare_caches(lab: Lab, image_id: str | None) -> None:
    """Each node's own cache of compiled operators, emptied where another image filled it: they fit only their torch."""
    for node in lab.nodes:
        path = lab.directory / render.cache_directory(node.name)
        marker = path / "image"
        if path.is_dir() and (not marker.is_file() or marker.read_text(encoding="utf-8") != image_id):
            shutil.rmtree(path)
        make_private(path)
        marker.write_text(image_id or "", encoding="utf-8")


def drop_links(lab: Lab) -> None:
    """Remove the names of devices that a node had before."""
    for node in lab.nodes:
        kept = {name for name, _ in node.devices.links}
        for path in (lab.directory / render.node_directory(node.name) / "by-path").glob("*"):
            if path.name not in kept:
                path.unlink()


def write_secrets(lab: Lab) -> tuple[str, ...]:
    """Each node's secrets as 0600 files that compose mounts under /run/secrets; those no longer set are removed."""
    written: list[str] = []
    for node in lab.nodes:
        folder = f"{render.node_directory(node.name)}/secrets"
        secrets = [File(path=f"{folder}/{name}", content=value.reveal()) for name, value in lab.secrets]
        for path in set((lab.directory / folder).glob("*")) - {lab.directory / secret.path for secret in secrets}:
            path.unlink()
        written += write_all(lab.directory, secrets)
    return tuple(written)
