"""Image that a lab needs: build, pull or send it wherever it is not found."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from labctl import accelerators
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy.steps import EnsureImage
from labctl.backends.docker.images import catalog, foreign, packages
from labctl.backends.docker.lab import device_requests
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import ObservedState
from labctl.config.context import BY_WORKLOAD, OF_THE_IMAGE, Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, on_host
from labctl.model import HERE, Workload
from labctl.system.parallel import map_hosts

if TYPE_CHECKING:
    from labctl.backends.docker.images.distribute import ImageTargets


Ask = Callable[[str], bool]


def for_workload(context: Context, settings: Settings, workload: Workload) -> Settings:
    """Return settings with a workload's packages and, unless LAB_IMAGE is set, image. ConfigError if unknown.

    Those of another workload are removed. ConfigError for an image that labctl does not have.
    """
    origin = f"{BY_WORKLOAD}{workload.name}"
    if workload.image and workload.image not in catalog.names():
        names = ", ".join(catalog.names())
        raise ConfigError(f"{workload.declared}: unknown image `{workload.image}`", hint=f"labctl has {names}")
    if workload.has_own_image:
        settings = context.declared()
    if workload.image and not settings.text("LAB_IMAGE"):
        settings = settings.with_value("LAB_IMAGE", catalog.tag(workload.image), origin)
    for key, more in (("LAB_PACKAGES", workload.packages), ("LAB_APT", workload.apt)):
        if more:
            settings = settings.with_value(key, " ".join(dict.fromkeys((*settings.text(key).split(), *more))), origin)
    return settings


def plan_images(
    context: Context, cluster: Cluster, observed: ObservedState
) -> tuple[tuple[EnsureImage, ...], dict[str, HostError]]:
    """Return the step that gets hosts the image, () if none is needed, and unfit hosts. HostError if unbuildable."""
    image, how = cluster.image, cluster.settings.text("LAB_IMAGE_FROM")
    has_packages = packages.is_own(image)
    if not cluster.daemons:
        return (), {}
    if not cluster.remote_hosts:
        if observed.image:
            check_image(context, cluster)
            return (), {}
        require_buildable(cluster)
        text = f"build image {image}{base_first(cluster, cluster.daemons[HERE])}"
        return (EnsureImage(image=image, words=text, cause="not found; takes minutes, once"),), {}
    from labctl.backends.docker.images import distribute, local

    targets = image_targets(context, cluster)
    text = distribute.preview(image, how, targets)
    if not text and how == "send" and has_packages and len({part.image for part in observed.parts}) > 1:
        text = "" if local.described(image) else f"build image {image} here and send it to every host"
    if not text:
        # Nothing is pulled: only the hosts' images are compared.
        differing = distribute.pull(image, targets) if how == "pull" else {}
        return (), {**unfit_images(cluster), **differing}
    require_obtainable(cluster, how)
    if text.startswith("build"):
        text += base_first(cluster, DockerEngine() if how == "send" else None)
    return (EnsureImage(image=image, words=text, cause="not found on host"),), {}


def base_first(cluster: Cluster, engine: DockerEngine | None) -> str:
    """Return the plan's text on labctl's base image that is built first; empty if none is.

    With ``engine`` None, the text says that it may be needed.
    """
    base, name = cluster.base_image, catalog.name_of(cluster.base_image)
    if name is None or base == cluster.image:
        return ""
    if engine is None:
        return f", and first {base} where it is not found or out of date"
    inspected = engine.image(base)
    if inspected and not catalog.is_stale(inspected["Config"].get("Labels") or {}, name):
        return ""
    return f", and first {base}, which is {'out of date' if inspected else 'not found'}"


def require_obtainable(cluster: Cluster, how: str) -> None:
    """Raise ConfigError or HostError if hosts cannot get the image by LAB_IMAGE_FROM."""
    from labctl.backends.docker.images import local

    image = cluster.image
    if how == "build" and image == cluster.base_image and not catalog.name_of(image):
        hint = "LAB_IMAGE_FROM=send or LAB_IMAGE_FROM=pull in .env, or unset LAB_IMAGE"
        raise ConfigError(f"LAB_IMAGE_FROM=build builds only labctl's own images, and LAB_IMAGE is {image}", hint=hint)
    if how == "pull" and catalog.is_hashed(image):
        raise ConfigError(f"LAB_IMAGE_FROM=pull: no registry has image {image}", hint="LAB_IMAGE_FROM=send in .env")
    made_here = packages.is_own(image) or catalog.is_hashed(image)
    if how == "send" and made_here and local.described(image) is None:
        require_buildable(cluster)


def require_buildable(cluster: Cluster) -> None:
    """Raise HostError if the image cannot be built: no usable base image, or no engine with the devices' runtime."""
    base = cluster.base_image
    if cluster.settings.text("LAB_IMAGE") and not catalog.name_of(base):
        from labctl.backends.docker.images import local

        if base == cluster.image or local.described(base) is None:
            raise HostError(f"image {base} not found", hint=catalog.how_to_get(base))
        foreign.require_node(DockerEngine(), base, base)
    cluster.map_engines(partial(device_requests.require_runtime, cluster.accelerator))


def ensure(context: Context, cluster: Cluster, image: str) -> dict[str, HostError]:
    """Build, pull or send the image wherever it is not found; return failing hosts. HostError for this machine."""
    if not cluster.remote_hosts:
        build_image(context, cluster)
        check_image(context, cluster)
        return {}
    from labctl.backends.docker.images import distribute, local

    targets, how = image_targets(context, cluster), cluster.settings.text("LAB_IMAGE_FROM")
    if how == "pull":
        failed = distribute.pull(image, targets)
        return {**unfit_images(cluster), **failed}
    if how == "build":
        return distribute.build(image, targets, lambda name: build_image(context, cluster, on=name))
    if packages.is_own(image) and local.described(image) is None:
        build_image(context, cluster)
    if local.described(image):
        check_image(context, cluster)
    failed = distribute.send(image, targets, context.directory / ".lab")
    return {**unfit_images(cluster), **failed}


def unfit_images(cluster: Cluster) -> dict[str, HostError]:
    """Return a HostError per remote host whose image is not a node's or cannot be inspected."""

    def look(name: str) -> None:
        """Raise HostError if the host's image is not a node's."""
        with on_host(name):
            foreign.require_node(cluster.daemons[name], cluster.image, cluster.base_image)

    return map_hosts(look, {name: name for name in cluster.remote_hosts})[1]


def check_image(context: Context, cluster: Cluster) -> None:
    """Raise HostError if this machine's image does not start as a node or fit the driver; warn if out of date."""
    image, engine = cluster.image, DockerEngine() if cluster.remote_hosts else cluster.daemons[HERE]
    name, below = catalog.name_of(image), cluster.base_image
    labels = foreign.require_node(engine, image, below)
    accelerators.get(cluster.accelerator).require_image(labels.get(catalog.BASE_LABEL) or image)
    if name and catalog.is_stale(labels, name):
        context.warn(f"image {image} is out of date; rebuild it with `{build_command(cluster.settings)}`")
    elif image != below and packages.is_stale(labels, engine.image_id(below)):
        command = build_command(cluster.settings)
        context.warn(f"image {image} was built on an earlier {below}; rebuild it with `{command}`")
    elif foreign.is_stale(image, labels):
        base = labels.get(catalog.BASE_LABEL, "IMAGE")
        context.warn(f"image {image} is out of date; `labctl build --from {base}` makes the one to name in LAB_IMAGE")


def build_command(settings: Settings) -> str:
    """Return the `labctl build` command for the image of these settings, with `--workload` if a workload set them."""
    origins = (settings.origin(key) for key in OF_THE_IMAGE)
    workload = next((origin.removeprefix(BY_WORKLOAD) for origin in origins if origin.startswith(BY_WORKLOAD)), "")
    return f"labctl build --workload {workload}" if workload else "labctl build"


def confirm_image(workload: Workload, image: str, exists: bool, ask: Ask | None, *, dry_run: bool = False) -> None:
    """Ask if the lab may be brought up with a workload's image. HostError if the user declines or cannot be asked.

    A dry run assumes that the user agrees, if ``ask`` is given.
    """
    reason = f"{workload.name} needs image {image}, which {'the lab does not run' if exists else 'is not found'}"
    build = "" if exists else "build it (once, takes a few minutes) and "
    offer = f"{build}bring the lab up with it?"
    if ask is None or not (dry_run or ask(f"{reason}; {offer}")):
        command = f"labctl up --workload {workload.name}"
        raise HostError(reason, hint=command if exists else f"labctl build --workload {workload.name} && {command}")


def build_image(
    context: Context, cluster: Cluster, *, update_lock: bool = False, on: str = "", refresh: bool = False
) -> dict[str, Any]:
    """Build the lab's image, or with ``update_lock`` its lock; return a report. HostError if it is not labctl's.

    The Dockerfile is that of the image's name, else of the accelerator. With this machine's engine, or ``on`` a host
    with its own. ``refresh`` also builds labctl's own image below the packages if it is up to date, as settings of its
    base and package sources may have changed: it takes seconds if not.
    """
    from labctl.backends.docker.images import build

    base, additions = cluster.base_image, packages.of(cluster.settings)
    name = catalog.name_of(base)
    if catalog.is_hashed(base) and not additions and not update_lock:
        raise HostError(f"LAB_IMAGE is {base}, which `labctl build` does not make", hint=catalog.how_to_get(base))
    request = build.request(cluster.settings, name or cluster.accelerator, base, context.directory, context.environ)
    if on:
        request = replace(request, engine=cluster.daemons[on])
    if update_lock:
        return build.update_lock(request, context.notice)
    if not additions:
        return build.build(request, context.notice)
    if not name:
        build.ensure_base(base, replace(request, base_image=base), context.notice)
        foreign.require_node(request.engine, base, base)
    elif refresh or catalog.is_stale(request.engine.image_labels(base), name):
        build.build(request, context.notice)
    return packages.make(replace(request, tag=cluster.image), base, additions, context.notice)


def build_from(context: Context, cluster: Cluster, base: str) -> dict[str, Any]:
    """Build a node image on any base with this machine's engine; return a report. HostError if the base is a node."""
    from labctl.backends.docker.images import build

    request = build.request(cluster.settings, cluster.accelerator, base, context.directory, context.environ)
    return foreign.make(request, base, context.notice)


def require_directory(file: Path | None) -> None:
    """Raise ConfigError if the directory of a file to write does not exist."""
    if file and not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such directory", hint=f"mkdir -p {shlex.quote(str(file.parent))}")


def with_sbom(built: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Write the bill of materials of a built image to a file and add it to the report; without a file do nothing."""
    if not file:
        return built
    from labctl.backends.docker.images import sbom

    return {**built, "sbom": str(file), "packages": sbom.write(built["image"], file)}


def remark(settings: Settings, workload: Workload) -> str:
    """Return a warning if LAB_IMAGE overrides the image that a workload asks for; else an empty text."""
    chosen, asked = settings.text("LAB_IMAGE"), catalog.tag(workload.image)
    if not workload.image or chosen in ("", asked):
        return ""
    return f"LAB_IMAGE is {chosen}, and {workload.name} asks for {asked}; LAB_IMAGE is used"


def unfit_for(settings: Settings, accelerator: str) -> str:
    """Return a warning if LAB_IMAGE is labctl's for another accelerator than that of the nodes; else an empty text."""
    chosen = settings.text("LAB_IMAGE")
    made_for = accelerators.of_image(catalog.name_of(chosen) or "")
    if accelerator == accelerators.CPU or made_for in ("", accelerator):
        return ""
    return (
        f"LAB_IMAGE is {chosen}, and the nodes have {accelerator} devices, which programs in it do not find:"
        " unset LAB_IMAGE, or set LAB_ACCELERATOR=cpu"
    )


def image_of_hosts(cluster: Cluster) -> str:
    """Return the image that `down --images` removes from hosts. ConfigError if the lab has no remote hosts."""
    if not cluster.remote_hosts:
        hint = f"docker image rm {cluster.image}"
        raise ConfigError("--images removes the image from the hosts of a lab, and LAB_HOSTS lists none", hint=hint)
    return cluster.image


def image_targets(context: Context, cluster: Cluster) -> ImageTargets:
    """Return the remote hosts that answer, with their addresses, as targets of an image."""
    from labctl.backends.docker.images.distribute import ImageTargets

    addresses = {host.name: host.address for host in cluster.hosts}
    return ImageTargets(hosts=cluster.remote_hosts, notice=context.notice, addresses=addresses)
