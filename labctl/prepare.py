"""What a lab needs on this host before its containers start: image, mounts, keys, secrets."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl import accelerators, device_requests, gaudi_releases, images, inventory, laid, limits, loading, lock, site
from labctl.containers import Observed
from labctl.context import Context
from labctl.engines import Daemon
from labctl.engines.docker_engine import DockerEngine
from labctl.errors import ConfigError, HostError
from labctl.hardware import HERE
from labctl.model import Lab, Workload
from labctl.observe import ROOT
from labctl.plan import BringImage, ComposeUp, Plan, RemoveContainers
from labctl.settings import Settings
from labctl.side_by_side import attempt
from labctl.site import Site

if TYPE_CHECKING:
    # It is only needed where there are hosts.
    from labctl.shipping import Receivers

Ask = Callable[[str], bool]


def for_workload(found: Settings, task: Workload) -> Settings:
    """The settings with the image that a workload needs, unless they name one themselves."""
    if not task.image or found.text("LAB_IMAGE"):
        return found
    return found.with_value("LAB_IMAGE", images.tag(task.image), origin=f"workload {task.name}")


def ensure_image(context: Context, where: Site, here: DockerEngine) -> str:
    """Build the lab's image on this machine when it is not there; say so when it was built from other files than these.

    Returns its id. HostError where it cannot be built here.
    """
    found, image = where.settings, where.image
    accelerator = where.accelerator  # Hosts without the devices are told so before minutes of building.
    own = images.name_of(image)
    if here.image_id(image) is None:
        if found.text("LAB_IMAGE") and not own:
            raise HostError(f"there is no image {image}", hint=f"docker pull {image}, or unset LAB_IMAGE")
        loading.of_engines(where, partial(device_requests.require_runtime, accelerator))
        context.notice(f"image {image} is not there yet: building it (minutes, once)")
        build_image(context, where)
    labels = here.image_labels(image)
    if accelerator == "habana":
        gaudi_releases.require_match(labels.get(images.BASE_LABEL) or image)
    if own and images.is_stale(labels, own):
        asked = found.origin("LAB_IMAGE").partition("workload ")[2]
        command = f"labctl build --workload {asked}" if asked else "labctl build"
        context.warn(f"image {image} was built from other files than labctl's own now; `{command}` makes it anew")
    return here.image_id(image) or ""


def machines(where: Site) -> dict[str, str]:
    """Which machine each host is that the list names; empty for one that does not answer."""
    names = (target.name for target in where.targets)
    return {name: where.engine.on(name).identity() if name in where.engine.hosts else "" for name in names}


def sent(context: Context, where: Site) -> dict[str, tuple[str, ...]]:
    """Where the lab's files lie on the hosts that answer, by their names now and those that they had."""
    former = laid.former(context.directory, machines(where))
    sent_by = {host: (host, *former.get(host, ())) for host in where.sent}
    return {host: tuple(where.sent_to(host, name) for name in names) for host, names in sent_by.items()}


def tell_left_over(context: Context, where: Site) -> None:
    """Hosts that are not listed any more, and this machine where others are listed now, keep what they got."""
    listed = machines(where)
    left = laid.left_over(context.directory, listed)
    names = tuple(dict.fromkeys(one.host for one in left if one.host not in listed))
    if names:
        context.warn(
            f"{', '.join(names)} still {'has' if len(names) == 1 else 'have'} nodes of this lab and "
            f"{'is' if len(names) == 1 else 'are'} not in LAB_HOSTS any more: list them again and `labctl down` first"
        )
    for one in (one for one in left if one.host in listed):
        context.warn(
            f"{one.host} is another machine than the one of this name that still has nodes of this lab: list that one,"
            f" too, by another name, and `labctl down`; or, where it is gone for good, rm '{one.path}'"
        )
    if where.targets:
        with suppress(HostError):
            here = DockerEngine().observe(where.settings.text("LAB_NAME"))
            if any(container.directory == str(context.directory) for container in here.containers):
                context.warn("this machine still has nodes of this lab: `labctl down -s LAB_HOSTS=` removes them")


def tell_failed(context: Context, failed: Mapping[str, HostError]) -> None:
    """What a plan leaves out, and why."""
    for error in failed.values():
        context.warn(error.message)


def tell_accelerator(context: Context, where: Site, lab: Lab) -> None:
    """What `auto` took, and what it could not use."""
    if where.settings.text("LAB_ACCELERATOR") != "auto":
        return
    unserved = () if where.targets else accelerators.unserved(ROOT)
    tell = context.warn if unserved and lab.accelerator == "cpu" else context.notice
    why = "" if where.targets else f" ({inventory.choice(where.settings)[1]})"
    tell(f"accelerator {lab.accelerator}{why}")
    for remark in unserved if lab.accelerator != "cpu" else ():
        context.warn(remark)


def require_room(context: Context, where: Site, lab: Lab) -> None:
    """HostError for a lab that is too large for what its hosts allow; a warning where not all of its nodes can talk."""
    limits.require_files(lab)
    if not where.targets and (lacking := limits.neighbours_lacking(lab, ROOT)):
        table, needed = lacking
        context.warn(
            f"this host remembers {table} neighbours, and {len(lab.nodes)} nodes that all talk to each other take"
            f" {needed}: connections between them will time out; `labctl doctor` says what raises it"
        )


def offer(task: Workload, image: str, engine: Daemon, ask: Ask | None) -> None:
    """Ask whether the lab may be brought up with the image that a workload needs; HostError unless it is agreed."""
    missing = engine.image_id(image) is None
    lacking = f"{task.name} needs image {image}, which {'is not there' if missing else 'the lab does not run'}"
    offered = "build it (minutes, once) and bring the lab up with it?" if missing else "bring the lab up with it?"
    if ask is None or not ask(f"{lacking}; {offered}"):
        command = f"labctl up --workload {task.name}"
        raise HostError(lacking, hint=f"labctl build --workload {task.name} && {command}" if missing else command)


def build_image(context: Context, where: Site, *, update_lock: bool = False, on: str = "") -> dict[str, Any]:
    """Build the image of the lab's nodes, from the Dockerfile of its name or else that of the accelerator.

    With this machine's engine, or ``on`` a host with its own.
    """
    from labctl import build

    image = images.name_of(where.image) or where.accelerator
    request = build.request(where.settings, image, where.image, context.directory, context.environ)
    if on:
        request = replace(request, host=on, docker=where.engine.on(on).docker)
    return build.update_lock(request, context.notice) if update_lock else build.build(request, context.notice)


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


def image_of_hosts(where: Site) -> str:
    """The image that hosts were given; ConfigError on this machine, where it is what a person built."""
    if not where.targets:
        hint = f"docker image rm {where.image}"
        raise ConfigError("--images removes the image from the hosts of a lab, and LAB_HOSTS lists none", hint=hint)
    return where.image


def forget(directory: Path) -> None:
    """Remove keys, secrets and rendered files. HostError for what cannot go."""
    try:
        shutil.rmtree(directory / ".lab")
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}", hint=f"rm -r {directory}/.lab") from error


def require_own(context: Context, name: str, observed: Observed) -> None:
    """HostError when these containers belong to a lab of the same name that another person or directory has."""
    owner = observed.owner_elsewhere(context.directory, site.owner())
    if owner:
        hint = f"set another LAB_NAME in .env, or: {owner.remedy}"
        raise HostError(f"lab `{name}` belongs to {owner.name}", hint=hint)


def not_ours(context: Context, name: str, observed: Observed) -> dict[str, HostError]:
    """The hosts that have another person's lab of this name; on this machine, HostError."""
    found = {}
    for host in observed.hosts:
        try:
            require_own(context, name, observed.on(host))
        except HostError as error:
            if host == HERE:
                raise
            found[host] = HostError(f"{host}: {error.message}", hint=error.hint, node=host)
    return found


def without_others(context: Context, where: Site) -> Site:
    """The site less the hosts that have another person's or directory's lab of this name. HostError as ``not_ours``.

    To be known before all else: such a lab holds the ports, too.
    """
    name = where.settings.text("LAB_NAME")
    return where.without(not_ours(context, name, where.engine.observe(name)))


def foresee_images(context: Context, where: Site) -> tuple[BringImage, ...]:
    """What `up` would do so that every host has the image, as far as that can be told without doing it."""
    if not where.targets:
        return ()
    from labctl import shipping

    words = shipping.foreseen(where.image, where.settings.text("LAB_IMAGE_FROM"), receivers_of(context, where))
    return (BringImage(words=words, cause="what nodes are made of"),) if words else ()


def receivers_of(context: Context, where: Site) -> Receivers:
    """The hosts that answer, as those who get an image."""
    from labctl.shipping import Receivers

    connections = {name: where.connections[name] for name in where.engine.hosts}
    addresses = {host.name: host.address for host in where.hosts}
    return Receivers(hosts=connections, emit=context.emit, addresses=addresses)


def ensure_images(context: Context, where: Site) -> tuple[str, dict[str, HostError]]:
    """The lab's image wherever nodes are to run, and what failed on which host; its id on this machine, if it is here.

    Raises HostError where it cannot be had at all.
    """
    here = DockerEngine()
    if not where.targets:
        return ensure_image(context, where, here), {}
    from labctl import shipping

    receivers = receivers_of(context, where)
    how = where.settings.text("LAB_IMAGE_FROM")
    if how == "pull":
        return "", shipping.pull(where.image, receivers)
    if how == "build":
        return "", shipping.build(where.image, receivers, lambda name: build_image(context, where, on=name))
    asked = {name: name for name in receivers.hosts}
    there, silent = attempt(lambda name: where.engine.on(name).image_id(where.image), asked)
    where = where.without(silent)
    receivers = receivers_of(context, where)
    brought = len(set(there.values())) == 1 and None not in there.values()
    if not brought and images.name_of(where.image):
        ensure_image(context, where, here)
    if not brought or shipping.here.described(where.image):
        return "", silent | shipping.send(where.image, receivers, context.directory / ".lab")
    return "", silent
