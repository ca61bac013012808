"""Builds labctl's images from this host's package sources, which are visible during the build only.

The base image is present, pulled, or, for plain Debian, made from this host's own packages.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from labctl import accelerators
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.images import catalog, package_sources
from labctl.backends.docker.images.package_sources import PipSources
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.model import HERE, Pairs
from labctl.system import human, process, procfs
from labctl.system.files import make_private
from labctl.system.setup import apt
from labctl.system.setup.requirements import root_prefix

Emit = Callable[[str], None]

DEBIAN = "bookworm"
"""Release of the plain base image, independent of the host's release."""
PLAIN = f"debian:{DEBIAN}-slim"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
OF_TORCH = frozenset({"torch", "torchaudio", "torchvision"})
"""Packages of an index of torch, each built for a torch of the same build."""
SOURCES = "LAB_PIP_INDEX_URL, LAB_PIP_FIND_LINKS, LAB_TORCH_INDEX, LAB_CA_CERTIFICATES, HTTPS_PROXY"
"""Settings for the sources of Python packages."""
UNREACHED = re.compile("Retrying|connection broken|Could not fetch URL|NewConnectionError")
"""Pattern of pip's messages about an index that does not answer."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class BuildRequest(Struct, frozen=True, kw_only=True):
    """An image to build, its base and its package sources; empty fields use the defaults."""

    image: str
    """Name of labctl's own image, such as ``cpu``."""
    tag: str
    directory: Path
    """The lab directory."""
    base_image: str = ""
    apt_mirror: str = ""
    torch_index: str = ""
    pip: PipSources = field(default_factory=PipSources)
    proxies: Pairs = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    engine: DockerEngine = field(default_factory=DockerEngine)

    def __repr__(self) -> str:
        return f"BuildRequest({self.image!r}, {self.tag!r})"  # URLs may carry credentials


def request(settings: Settings, image: str, tag: str, directory: Path, environ: Mapping[str, str]) -> BuildRequest:
    """Return the request to build labctl's own image under a tag, as the settings say."""
    return BuildRequest(
        image=image,
        tag=tag,
        directory=directory,
        base_image=settings.text("LAB_BASE_IMAGE"),
        apt_mirror=settings.text("LAB_APT_MIRROR"),
        torch_index=settings.text("LAB_TORCH_INDEX"),
        pip=PipSources(
            index=settings.text("LAB_PIP_INDEX_URL"),
            extra_indexes=tuple(settings.text("LAB_PIP_EXTRA_INDEX_URL").split()),
            find_links=tuple(settings.text("LAB_PIP_FIND_LINKS").split()),
            cert=settings.text("LAB_CA_CERTIFICATES"),
        ),
        proxies=tuple((name, settings.text(name)) for name in PROXIES if settings.text(name)),
        environ=environ,
    )


def build(request: BuildRequest, emit: Emit) -> dict[str, Any]:
    """Build labctl's own image, its base first if stale; return tag, id, size, seconds. HostError on failure."""
    began = time.monotonic()
    engine, tag, lock = request.engine, request.tag, _text(request.image, "lock")
    require_own(request)
    inputs = catalog.inputs_hash(request.image)
    projects = package_sources.pins(_text(request.image, "in")) | package_sources.pins(lock)
    with prepared(request, _base(request, emit), projects, package_sources.hashes(lock)) as arguments:
        loaded = ["--load", "--tag", tag, "--label", f"{catalog.INPUTS_LABEL}={inputs}"]
        run(catalog.dockerfile(request.image), [*loaded, *arguments], request, emit)
    built = engine.image(tag) or {}
    seconds = round(time.monotonic() - began, 1)
    emit(f"image {tag}: {human.size(built['Size'])}, {human.duration(seconds)}")
    return {"image": tag, "id": built["Id"], "size": built["Size"], "seconds": seconds}


def require_own(request: BuildRequest) -> None:
    """Raise HostError if the engine has an image of this tag that labctl did not build."""
    tag, engine = request.tag, request.engine
    present = engine.image(tag)
    if present and not catalog.is_labctls(tag, present["Config"].get("Labels") or {}):
        where = "here" if engine.host == HERE else f"on {engine.host}"
        raise HostError(
            f"image {tag} {where} was not built by labctl, so it is not replaced",
            hint=f"`labctl build --from {tag}` makes a node image from it; or unset LAB_IMAGE",
        )


def update_lock(request: BuildRequest, emit: Emit) -> dict[str, Any]:
    """Resolve ``<image>.in`` in a build and overwrite the lock file; return what changed. HostError without one."""
    lock = catalog.file(request.image, "lock")
    if not lock.is_file():
        raise HostError(
            f"image {request.image} has no lock", hint=f"its versions are in {catalog.file(request.image, 'in')}"
        )
    pins = package_sources.pins(_text(request.image, "lock"))
    # Pins of the input stay: torch 2.13.0+cpu would match 2.13.0, another build.
    projects = dict.fromkeys(pins) | package_sources.pins(_text(request.image, "in"))
    with (
        prepared(request, _base(request, emit), projects) as arguments,
        tempfile.TemporaryDirectory(dir=state(request)) as folder,
    ):
        # The cache of that stage has the versions of its last build.
        exported = ["--target", "lock", "--no-cache-filter", "resolve", "--output", f'type=local,"dest={folder}"']
        run(catalog.dockerfile(request.image), [*exported, *arguments], request, emit)
        text = (Path(folder) / lock.name).read_text(encoding="utf-8")
    try:
        lock.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HostError(f"cannot write {lock}: {error.strerror}", hint="run it in your own checkout") from error
    after = package_sources.pins(text)
    changed = sorted(name for name in pins.keys() | after.keys() if pins.get(name) != after.get(name))
    emit(f"{lock}: {len(after)} packages, {len(changed)} changed")
    return {"lock": str(lock), "packages": len(after), "changed": changed}


@contextmanager
def prepared(
    request: BuildRequest,
    base: str,
    projects: Mapping[str, str | None],
    hashes: frozenset[str] = frozenset(),
    labels: Pairs = (),
) -> Iterator[list[str]]:
    """Yield the build arguments for base, labels and package sources; their files exist during the block."""
    release = release_of(base, request.engine)
    sources = apt_list(release.get("ID", ""), release.get("VERSION_CODENAME", ""), request.apt_mirror)
    with tempfile.TemporaryDirectory(dir=state(request), prefix="build-") as folder:
        pip = pip_sources(request, package_sources.of_host())
        given = hand_in(request, pip, projects, sources, Path(folder), hashes)
        marks = {catalog.BASE_LABEL: base, catalog.TAG_LABEL: request.tag, **dict(labels)}
        labelled = (word for name, value in marks.items() for word in ("--label", f"{name}={value}"))
        yield ["--build-arg", f"BASE_IMAGE={base}", *labelled, *given]


def _base(request: BuildRequest, emit: Emit) -> str:
    """Return the name of the base image, after it is pulled, or built if it is labctl's own and missing or stale."""
    name = catalog.base_of(request.image)
    if name is None:
        vendor = accelerators.modules().get(request.image)
        if vendor and request.base_image:
            vendor.require_image(request.base_image)
        base = request.base_image or catalog.base(request.image) or (vendor.base_image() if vendor else "")
        return ensure_base(base, request, emit)
    tag = catalog.tag(name)
    present = request.engine.image(tag)
    if present is None or catalog.is_stale(present["Config"].get("Labels") or {}, name):
        emit(f"image {request.tag} is built on {tag}: building that first")
        build(replace(request, image=name, tag=tag), emit)
    return tag


def ensure_base(name: str, request: BuildRequest, emit: Emit) -> str:
    """Return a base image that the engine has: pulled, or the default made of Debian packages. HostError if not.

    HostError if it can be neither pulled nor made. An image that the settings name is never replaced.
    """
    engine = request.engine
    made = f"labctl/base:{DEBIAN}"
    can_make = name == PLAIN and not request.base_image
    for image in (name, made) if can_make else (name,):
        if engine.image_id(image):
            return image
    if catalog.is_hashed(name):
        raise HostError(f"image {name} not found", hint=catalog.how_to_get(name))
    emit(f"pulling {name}")
    try:
        engine.pull(name)
    except HostError as error:
        reason = error.message.strip().splitlines()[-1]
    else:
        return name
    if not can_make:
        hint = "set LAB_BASE_IMAGE to an image of this machine (`docker images` lists them)"
        raise HostError(f"cannot pull {name}: {reason}", hint=hint)
    emit(f"cannot pull {name} ({reason}): making {made} from this host's own Debian packages instead")
    make_base(made, request, emit)
    return made


def make_base(tag: str, request: BuildRequest, emit: Emit) -> None:
    """Make a Debian image by mmdebstrap from this host's package sources, and import it. HostError if it fails.

    Source: mmdebstrap(1).
    """
    if procfs.os_release().get("ID") not in {"debian", "ubuntu"}:
        raise HostError(
            "only a Debian or Ubuntu host can make the base image itself",
            hint="set LAB_BASE_IMAGE to a Debian image of this machine, or `docker load` one",
        )
    archive = apt_list("debian", DEBIAN, request.apt_mirror)
    if not archive:
        raise HostError(
            f"this host's own package sources have no Debian {DEBIAN} to make the base image from",
            hint="set LAB_APT_MIRROR to a Debian mirror, or LAB_BASE_IMAGE to an image of this machine",
        )
    _require_mmdebstrap(emit)
    with tempfile.TemporaryDirectory(dir=state(request), prefix="base-") as folder:
        work = Path(folder)
        # The build uses URLs with credentials; the image gets them without.
        (work / "mirror.list").write_text(archive, encoding="utf-8")
        (work / "public.list").write_text(re.sub(r"(\w://)[^\s/]*@", r"\1", archive), encoding="utf-8")
        argv = [
            *(root_prefix() or ()),
            "mmdebstrap",
            "--variant=apt",
            "--include=ca-certificates",
            f"--customize-hook=upload {shlex.quote(f'{work}/public.list')} /etc/apt/sources.list",
            '--customize-hook=rm -f "$1"/etc/apt/sources.list.d/* "$1/etc/resolv.conf" "$1/etc/hostname"',
            DEBIAN,
            f"{work}/base.tar",
            f"{work}/mirror.list",
        ]
        process.stream(argv, lambda line: emit(f"  {line[3:]}") if line.startswith("I: ") else None)
        request.engine.import_image(work / "base.tar", tag)


def apt_list(distribution: str, codename: str, mirror: str) -> str:
    """Return the text of a ``sources.list`` for an image, by mirror or this host's sources; empty if none fits."""
    if mirror and distribution == "debian":
        return apt.for_mirror(mirror, codename)
    release = procfs.os_release()
    if release.get("ID") != distribution:
        return ""
    return apt.for_release(apt.read(), distribution, release.get("VERSION_CODENAME", ""), codename)


def release_of(image: str, engine: DockerEngine) -> Mapping[str, str]:
    """Return ``/etc/os-release`` of an image; empty if it has none or the engine fails."""
    try:
        return procfs.parse_os_release(engine.file_of(image, "/etc/os-release"))
    except HostError:
        return {}


def _require_mmdebstrap(emit: Emit) -> None:
    """Install mmdebstrap and Debian's keyring if missing. HostError without root."""
    installed = {"mmdebstrap": shutil.which("mmdebstrap"), "debian-archive-keyring": KEYRING.is_file()}
    missing = [package for package, present in installed.items() if not present]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    prefix = root_prefix()
    if prefix is None:
        raise HostError(f"making the base image needs {' and '.join(missing)}", hint=f"as root: {shlex.join(install)}")
    emit(f"installing {', '.join(missing)}")
    if process.run([*prefix, *install], check=False).code != 0:
        process.run([*prefix, "apt-get", "update"])
        process.run([*prefix, *install])


def pip_sources(request: BuildRequest, host: PipSources) -> PipSources:
    """Return the host's package sources, each replaced by that of the settings if set."""
    named = asdict(request.pip)
    return replace(host, **{name: value for name, value in named.items() if value})


def hand_in(
    request: BuildRequest,
    pip: PipSources,
    projects: Mapping[str, str | None],
    sources: str,
    folder: Path,
    hashes: frozenset[str] = frozenset(),
) -> list[str]:
    """Write pip.conf, apt sources and wheels into a folder; return the build arguments that name these files."""
    module = accelerators.modules().get(request.image)
    index = request.torch_index or (module.torch_index if module else "")
    local = pip
    if package_sources.local_path(index):
        local = replace(pip, find_links=(*pip.find_links, index), extra_indexes=(*pip.extra_indexes, index))
    staged = package_sources.stage_wheels(local, projects, folder / "wheels", hashes)
    certificates = package_sources.ca_bundle((pip.cert,), request.environ)
    apt_conf = ""
    if sources:
        apt_conf += f'Dir::Etc::SourceList "{package_sources.IN_BUILD}/apt.list";\nDir::Etc::SourceParts "-";\n'
    if certificates:
        apt_conf += f'Acquire::https::CAInfo "{package_sources.IN_BUILD}/ca.crt";\n'
    # Only if torch's packages are needed and not staged as wheels: pip would query that index for every package.
    torch_index = index if OF_TORCH & (projects.keys() - staged) else ""
    pip_conf = package_sources.pip_conf(
        pip, torch_index=torch_index, wheels=bool(staged), certificates=bool(certificates)
    )
    secrets = {"ca.crt": certificates} if certificates else {}
    for name, content in (("pip.conf", pip_conf), ("apt.list", sources), ("apt.conf", apt_conf)):
        if content:
            secrets[name] = folder / name
            secrets[name].write_text(content, encoding="utf-8")
    arguments = ["--build-context", f"wheels={folder / 'wheels'}"] if staged else []
    for name, path in secrets.items():
        # Quoted, as buildx parses the value as CSV.
        arguments += ["--secret", f'id={name},"src={path}"']
    for name in _proxy_environment(request):
        arguments += ["--build-arg", name]
    return arguments


def _proxy_environment(request: BuildRequest) -> dict[str, str]:
    """Return the proxies by variable name in upper and lower case, as programs differ in which they read."""
    return {spelt: value for name, value in request.proxies for spelt in (name, name.lower())}


def state(request: BuildRequest) -> Path:
    """Return the path of the lab's ``.lab`` folder, which is created if missing."""
    path = request.directory.absolute() / ".lab"
    make_private(path)
    return path


def _text(image: str, kind: str) -> str:
    """Return the text of an image's file of this kind; empty if there is none."""
    path = catalog.file(image, kind)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def run(
    dockerfile: Path, arguments: list[str], request: BuildRequest, emit: Emit, *, asked: Collection[str] = ()
) -> None:
    """Run ``docker buildx build`` on a Dockerfile, with its output in .lab/build.log. HostError if it fails.

    ``asked``: projects of the package index that the user named, whose names may be wrong.

    Not through python-on-whales, which puts the values of build arguments on the command line, where every user of the
    host could read a proxy's password, and keeps no log.
    """
    engine = request.engine
    # The engine's own builder: others neither see local base images nor share a cache with the engine.
    argv = [*engine.docker, "buildx", "build", "--builder", engine.context(), "--progress", "plain"]
    argv += ["--provenance=false", "--file", str(dockerfile), *arguments, str(dockerfile.parent)]
    log = state(request) / ("build.log" if engine.host == HERE else f"build-{engine.host}.log")
    progress = Progress(emit)
    with log.open("w", encoding="utf-8") as file:
        log.chmod(0o600)

        def keep(line: str) -> None:
            """Log a line without credentials and report its step."""
            safe = hide_credentials(line)
            file.write(safe + "\n")
            progress.read(safe)

        done = process.stream(argv, keep, env=_proxy_environment(request), check=False)
    if done.code != 0:
        raise _failure(request.tag, done.out, log, asked)


def _failure(tag: str, output: str, log: Path, asked: Collection[str]) -> HostError:
    """Return the HostError of a failed build: index unreachable, package of ``asked`` not found, or last lines."""
    text = log.read_text(encoding="utf-8")
    unknown = re.search(r"No matching distribution found for (\S+)", text)
    if unknown and UNREACHED.search(text):
        return HostError(
            f"building {tag} failed: the package index is unreachable (looking for {unknown[1]})",
            hint=f"check {SOURCES}; less {log}",
        )
    if unknown and package_sources.pins(unknown[1]).keys() <= set(asked):
        return HostError(
            f"building {tag} failed: the package index has no version that fits {unknown[1]}",
            hint=f"check its name and version in LAB_PACKAGES or `packages`; less {log}",
        )
    return HostError(
        f"building {tag} failed:\n{hide_credentials(output)}",
        hint=f"less {log}; package sources: LAB_APT_MIRROR, {SOURCES}",
    )


def hide_credentials(line: str) -> str:
    """Redact the user and password of any URL in a line."""
    return re.sub(r"(\w://)[^\s/]*@", r"\1[REDACTED]@", line)


class Progress:
    """Reports BuildKit's plain progress: a line when a step starts, and a line when it is done."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._names: dict[str, str] = {}
        self._working: set[str] = set()

    def read(self, line: str) -> None:
        """Parse a line of BuildKit's output; report a step when it starts and when it is done."""
        match = re.match(r"#(\d+) (.*)", line)
        if match is None:
            return
        number, text = match.groups()
        name = self._names.get(number, "")
        if named := re.match(r"\[(?!internal|context)([^\]]+)\]|(exporting)", text):
            self._names.setdefault(number, named[1] or named[2])
        elif not name:
            return
        elif ended := re.match(r"DONE (\S+?)s|(CACHED)", text):
            self._emit(f"  {name}: {'cached' if ended[2] else f'{ended[1]} s'}")
        elif number not in self._working:
            self._working.add(number)
            self._emit(f"  {name} ...")
