"""The image that a lab needs: found, built, brought to every host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from labctl import accelerators
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.deploy.plan import EnsureImage
from labctl.engines import Daemon
from labctl.engines.docker import DockerEngine
from labctl.errors import ConfigError, HostError
from labctl.images import catalog
from labctl.images import local as local_images
from labctl.lab import device_requests
from labctl.lab.cluster import Cluster
from labctl.model import Workload
from labctl.system.parallel import map_hosts

if TYPE_CHECKING:
    from labctl.images.distribute import ImageTargets


Ask = Callable[[str], bool]


def for_workload(found: Settings, task: Workload) -> Settings:
    """The settings with the image that a workload needs, unless they name one themselves."""
    if not task.image or found.text("LAB_IMAGE"):
        return found
    return found.with_value("LAB_IMAGE", catalog.tag(task.image), origin=f"workload {task.name}")


def ensure_image(context: Context, where: Cluster, here: DockerEngine) -> str:
    """Build the lab's image on this machine when it is not there; say so when it was built from other files than these.

    Returns its id. HostError where it cannot be built here.
    """
    found, image = where.settings, where.image
    accelerator = where.accelerator  # Hosts without the devices are told so before minutes of building.
    own = catalog.name_of(image)
    if here.image_id(image) is None:
        if found.text("LAB_IMAGE") and not own:
            raise HostError(f"there is no image {image}", hint=f"docker pull {image}, or unset LAB_IMAGE")
        where.map_engines(partial(device_requests.require_runtime, accelerator))
        context.notice(f"image {image} is not there yet: building it (minutes, once)")
        build_image(context, where)
    labels = here.image_labels(image)
    accelerators.get(accelerator).require_image(labels.get(catalog.BASE_LABEL) or image)
    if own and catalog.is_stale(labels, own):
        asked = found.origin("LAB_IMAGE").partition("workload ")[2]
        command = f"labctl build --workload {asked}" if asked else "labctl build"
        context.warn(f"image {image} was built from other files than labctl's own now; `{command}` makes it anew")
    return here.image_id(image) or ""


def offer(task: Workload, image: str, engine: Daemon, ask: Ask | None) -> None:
    """Ask whether the lab may be brought up with the image that a workload needs; HostError unless it is agreed."""
    missing = engine.image_id(image) is None
    lacking = f"{task.name} needs image {image}, which {'is not there' if missing else 'the lab does not run'}"
    offered = "build it (minutes, once) and bring the lab up with it?" if missing else "bring the lab up with it?"
    if ask is None or not ask(f"{lacking}; {offered}"):
        command = f"labctl up --workload {task.name}"
        raise HostError(lacking, hint=f"labctl build --workload {task.name} && {command}" if missing else command)


def build_image(context: Context, where: Cluster, *, update_lock: bool = False, on: str = "") -> dict[str, Any]:
    """Build the image of the lab's nodes, from the Dockerfile of its name or else that of the accelerator.

    With this machine's engine, or ``on`` a host with its own.
    """
    from labctl.images import build

    image = catalog.name_of(where.image) or where.accelerator
    request = build.request(where.settings, image, where.image, context.directory, context.environ)
    if on:
        request = replace(request, engine=DockerEngine(where.engine.on(on).connection))
    return build.update_lock(request, context.notice) if update_lock else build.build(request, context.notice)


def image_of_hosts(where: Cluster) -> str:
    """The image that hosts were given; ConfigError on this machine, where it is what a person built."""
    if not where.remote_hosts:
        hint = f"docker image rm {where.image}"
        raise ConfigError("--images removes the image from the hosts of a lab, and LAB_HOSTS lists none", hint=hint)
    return where.image


def foresee_images(context: Context, where: Cluster) -> tuple[EnsureImage, ...]:
    """What `up` would do so that every host has the image, as far as that can be told without doing it."""
    if not where.remote_hosts:
        return ()
    from labctl.images import distribute

    words = distribute.preview(where.image, where.settings.text("LAB_IMAGE_FROM"), image_targets(context, where))
    return (EnsureImage(words=words, cause="what nodes are made of"),) if words else ()


def image_targets(context: Context, where: Cluster) -> ImageTargets:
    """The hosts that answer, as those who get an image."""
    from labctl.images.distribute import ImageTargets

    addresses = {host.name: host.address for host in where.hosts}
    return ImageTargets(hosts=where.remote_hosts, emit=context.emit, addresses=addresses)


def ensure_images(context: Context, where: Cluster) -> tuple[str, dict[str, HostError]]:
    """The lab's image wherever nodes are to run, and what failed on which host; its id on this machine, if it is here.

    Raises HostError where it cannot be had at all.
    """
    here = DockerEngine()
    if not where.remote_hosts:
        return ensure_image(context, where, here), {}
    from labctl.images import distribute

    targets = image_targets(context, where)
    how = where.settings.text("LAB_IMAGE_FROM")
    if how == "pull":
        return "", distribute.pull(where.image, targets)
    if how == "build":
        return "", distribute.build(where.image, targets, lambda name: build_image(context, where, on=name))
    asked = {name: name for name in targets.hosts}
    there, silent = map_hosts(lambda name: where.engine.on(name).image_id(where.image), asked)
    where = where.excluding(silent)
    targets = image_targets(context, where)
    brought = len(set(there.values())) == 1 and None not in there.values()
    if not brought and catalog.name_of(where.image):
        ensure_image(context, where, here)
    if not brought or local_images.described(where.image):
        return "", silent | distribute.send(where.image, targets, context.directory / ".lab")
    return "", silent
