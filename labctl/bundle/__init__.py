"""A lab as one file for offline use: its images, settings, workloads and, on request, its cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from labctl.bundle import load as loading
from labctl.bundle import load as to_hosts
from labctl.bundle import save as saving
from labctl.bundle.contents import ExcludedFile
from labctl.bundle.format import Bundle, BundleEntry
from labctl.bundle.save import SavedBundle
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.deploy import images as prepare
from labctl.deploy import preflight
from labctl.errors import HostError
from labctl.hosts.ssh import Connection
from labctl.hub.prefetch import make_root
from labctl.images import catalog, distribute, local
from labctl.images.archive import Archive
from labctl.images.distribute import Failures, ImageTargets
from labctl.lab import cluster
from labctl.model import HostFailure
from labctl.runs import request
from labctl.system import filelock
from labctl.system.files import require_room, room_at
from labctl.system.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBundle:
    """A bundle that was unpacked into a directory: the files that were written, and the hosts that failed."""

    lab: str
    images: tuple[str, ...]
    created: str
    labctl: str
    excluded: tuple[ExcludedFile, ...]
    directory: str
    files: tuple[str, ...]
    failed: tuple[HostFailure, ...]


def save_bundle(
    context: Context, file: Path, *, workloads: Iterable[str] = (), cache: bool = False, secrets: bool = False
) -> SavedBundle:
    """Write the lab in the context's directory, with the images of its nodes and of these workloads, into a file."""
    found = context.settings()
    preflight.require_initialised(context)
    asked = [request.choose_workload(context.directory, name, request.RunOptions(), found) for name in workloads]
    wanted = dict.fromkeys(
        image_of(context, one) for one in (found, *(prepare.for_workload(found, task) for task in asked))
    )
    folder = Path(found.text("HOST_CACHE_PATH")) if cache else None
    if folder and not folder.is_dir():
        raise HostError(f"HOST_CACHE_PATH {folder} does not exist", hint="labctl cache WORKLOAD, or omit --with-cache")
    size = 0
    for image in wanted:
        described = local.described(image)
        if described is None:
            raise HostError(f"image {image} not found on this machine", hint="labctl build, or docker pull")
        size += described["Size"]
    name = found.text("LAB_NAME")
    saved = saving.write(
        file, context.directory, name, tuple(wanted), size, context.notice, cache=folder, secrets=secrets
    )
    for entry in saved.excluded:
        context.notice(f"excluded: {entry.path} ({entry.reason})")
    return saved


def load_bundle(context: Context, file: Path, *, force: bool = False) -> LoadedBundle:
    """Unpack a bundle into the context's directory, and load its images into Docker here or on the lab's hosts.

    The whole bundle is verified before anything is changed.
    """
    bundle = loading.checked(file, context.notice)
    found = loading.settings_of(bundle, context.environ, context.flags)
    cache = Path(found.text("HOST_CACHE_PATH"))
    files, cached = loading.of_lab(bundle, context.directory, force=force), loading.of_cache(bundle, cache)
    wanted = {**files, **cached}
    require_room("the bundle", [(room_at(path), member.size) for path, member in wanted.items()])
    if cached:
        make_root(cache)
    with filelock.held(context.directory / filelock.LAB, "labctl bundle load"):
        loading.write(bundle, files, context.directory)
    fill_cache(context, bundle, cached, cache)
    failures = hand_out(context, bundle, found)
    about = bundle.about
    return LoadedBundle(
        lab=about["lab"],
        images=tuple(about["images"]),
        created=about["written"],
        labctl=about["labctl"],
        excluded=tuple(ExcludedFile(entry["what"], entry["why"]) for entry in about["left_out"]),
        directory=str(context.directory),
        files=tuple(str(path.relative_to(context.directory)) for path in files),
        failed=tuple(
            HostFailure(host=host, message=error.message, hint=error.hint) for host, error in failures.items()
        ),
    )


def fill_cache(context: Context, bundle: Bundle, cached: Mapping[Path, BundleEntry], cache: Path) -> None:
    if cached:
        progress = Progress("cache", sum(member.size for member in cached.values()), 0, context.notice)
        loading.write(bundle, cached, cache, progress)
        progress.finish()


def hand_out(context: Context, bundle: Bundle, settings: Settings) -> Failures:
    """Load the images into Docker here, or send them and the cache to the lab's hosts."""
    archive = Archive(bundle.path)
    with cluster.connect(context, settings) as where:
        if not where.remote_hosts:
            for image in bundle.about["images"]:
                local.load(archive, image, context.notice)
            return {}
        failures = dict(where.failed)

        def left() -> dict[str, Connection]:
            return {host: one for host, one in where.remote_hosts.items() if host not in failures}

        for image in bundle.about["images"]:
            failures |= distribute.hand_out(archive, image, ImageTargets(hosts=left(), emit=context.emit, addresses={}))
        return failures | to_hosts.cache(bundle, settings, left(), context.emit)


def image_of(context: Context, settings: Settings) -> str:
    """The image of the lab's nodes; hosts are contacted only if their devices decide."""
    accelerator = settings.text("LAB_ACCELERATOR")
    if settings.text("LAB_IMAGE") or accelerator != "auto":
        return settings.text("LAB_IMAGE") or catalog.tag(accelerator)
    with cluster.connect(context, settings) as where:
        return where.image
