"""One ``docker buildx build``: its log kept, its progress told, credentials in neither.

It is started here and not through python-on-whales, which puts the values of build arguments on the command line, where
everyone on the host could read a proxy's password, and keeps no log.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.images import base as base_image
from labctl.images import catalog, gaudi, package_sources
from labctl.model import Pairs
from labctl.system import process
from labctl.system.files import make_private

_Emit = Callable[[str], None]


def run(
    dockerfile: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    what: str,
    emit: _Emit,
    docker: Sequence[str],
) -> None:
    """Build from that file and the folder it is in, with the engine that ``docker`` reaches.

    HostError with the log's last lines when a step fails.
    """
    # The engine's own builder: another could neither see a local base image nor share its cache with the engine.
    builder = process.run([*docker, "context", "show"]).out.strip()
    argv = [*docker, "buildx", "build", "--builder", builder, "--progress", "plain", "--provenance=false"]
    argv += ["--file", str(dockerfile), *arguments, str(dockerfile.parent)]
    progress = Progress(emit)
    with log.open("w", encoding="utf-8") as file:
        log.chmod(0o600)

        def keep(line: str) -> None:
            safe = hide_credentials(line)
            file.write(safe + "\n")
            progress.read(safe)

        done = process.stream(argv, keep, env=environment, check=False)
    if done.code != 0:
        last = hide_credentials(done.out)
        raise HostError(
            f"building {what} failed:\n{last}",
            hint=f"less {log}; where packages come from: LAB_APT_MIRROR, LAB_PIP_INDEX_URL, LAB_PIP_FIND_LINKS, "
            "LAB_CA_CERTIFICATES, HTTPS_PROXY",
        )


def hide_credentials(line: str) -> str:
    """A line without the user and password of any URL in it."""
    return re.sub(r"(\w://)[^\s/]*@", r"\1[REDACTED]@", line)


class Progress:
    """BuildKit's plain progress, told as one line when a step begins to work and one when it is done."""

    def __init__(self, emit: _Emit) -> None:
        self._emit = emit
        self._names: dict[str, str] = {}
        self._working: set[str] = set()

    def read(self, line: str) -> None:
        match = re.match(r"#(\d+) (.*)", line)
        if match is None:
            return
        number, text = match.groups()
        if named := re.match(r"\[(?!internal|context)([^\]]+)\]|(exporting)", text):
            self._names.setdefault(number, named[1] or named[2])
        elif number in self._names:
            self._told(number, text)

    def _told(self, number: str, text: str) -> None:
        name = self._names[number]
        if ended := re.match(r"DONE (\S+?)s|(CACHED)", text):
            self._emit(f"  {name}: {'cached' if ended[2] else f'{ended[1]} s'}")
        elif number not in self._working:
            self._working.add(number)
            self._emit(f"  {name} ...")


Emit = Callable[[str], None]

TORCH_INDEXES = {"cpu": "https://download.pytorch.org/whl/cpu", "intel": "https://download.pytorch.org/whl/xpu"}
"""Where an image's torch comes from, if not from the package index itself."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build, and what the settings name of base and package sources; where empty, the image's or host's own."""

    image: str
    """Which of labctl's own."""
    tag: str
    directory: Path
    """The lab's."""
    base_image: str = ""
    apt_mirror: str = field(default="", repr=False)
    torch_index: str = field(default="", repr=False)
    pip_index: str = field(default="", repr=False)
    pip_extra_indexes: tuple[str, ...] = field(default=(), repr=False)
    pip_find_links: tuple[str, ...] = field(default=(), repr=False)
    ca_certificates: str = ""
    proxies: Pairs = field(default=(), repr=False)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    docker: tuple[str, ...] = ("docker",)
    """The command that reaches the engine which builds."""
    host: str = ""
    """Whose engine it is, where it is not this machine's."""


def request(settings: Settings, image: str, tag: str, directory: Path, environ: Mapping[str, str]) -> BuildRequest:
    """What the settings ask for: one of labctl's own images, under that tag."""
    return BuildRequest(
        image=image,
        environ=environ,
        tag=tag,
        directory=directory,
        base_image=settings.text("LAB_BASE_IMAGE"),
        apt_mirror=settings.text("LAB_APT_MIRROR"),
        torch_index=settings.text("LAB_TORCH_INDEX"),
        pip_index=settings.text("LAB_PIP_INDEX_URL"),
        pip_extra_indexes=tuple(settings.text("LAB_PIP_EXTRA_INDEX_URL").split()),
        pip_find_links=tuple(settings.text("LAB_PIP_FIND_LINKS").split()),
        ca_certificates=settings.text("LAB_CA_CERTIFICATES"),
        proxies=tuple((name, settings.text(name)) for name in PROXIES if settings.text(name)),
    )


def build(request: BuildRequest, emit: Emit) -> dict[str, Any]:
    """Build the image; seconds when nothing changed. HostError with the log's last lines when a step fails."""
    began = time.monotonic()
    _require_own(request)
    inputs = catalog.inputs_hash(request.image)
    wanted = package_sources.pins(_text(request.image, "in")) | package_sources.pins(_text(request.image, "lock"))
    with _prepared(request, wanted, emit) as arguments:
        labelled = ["--load", "--tag", request.tag, "--label", f"{catalog.INPUTS_LABEL}={inputs}"]
        _buildx(request, [*labelled, *arguments], emit)
    shown = process.run([*request.docker, "image", "inspect", "--format", "{{.Id}} {{.Size}}", request.tag]).out.split()
    seconds = round(time.monotonic() - began, 1)
    emit(f"image {request.tag}: {int(shown[1]) / 1e9:.2f} GB, {seconds:g} s")
    return {"image": request.tag, "id": shown[0], "size": int(shown[1]), "seconds": seconds}


def update_lock(request: BuildRequest, emit: Emit) -> dict[str, Any]:
    """Resolve ``<image>.in`` anew and write the lock file beside it. HostError as ``build``."""
    lock = catalog.file(request.image, "lock")
    if not lock.is_file():
        raise HostError(
            f"image {request.image} has no lock", hint=f"its versions are in {catalog.file(request.image, 'in')}"
        )
    before = package_sources.pins(_text(request.image, "lock"))
    # Any version but of what is asked for in one: torch 2.13.0+cpu would pass for 2.13.0, which is with CUDA.
    wanted = dict.fromkeys(before) | package_sources.pins(_text(request.image, "in"))
    with (
        _prepared(request, wanted, emit) as arguments,
        tempfile.TemporaryDirectory(dir=_state(request)) as folder,
    ):
        # Without the cache for that stage: what was resolved last month would come back.
        exported = ["--target", "lock", "--no-cache-filter", "resolve", "--output", f'type=local,"dest={folder}"']
        _buildx(request, [*exported, *arguments], emit)
        text = (Path(folder) / lock.name).read_text(encoding="utf-8")
    try:
        lock.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HostError(f"cannot write {lock}: {error.strerror}", hint="run it in a checkout that is yours") from error
    after = package_sources.pins(text)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    emit(f"{lock}: {len(after)} packages, {len(changed)} changed")
    return {"lock": str(lock), "packages": len(after), "changed": changed}


# --- what the build is handed --------------------------------------------------------------------------------


@contextmanager
def _prepared(request: BuildRequest, wanted: Mapping[str, str | None], emit: Emit) -> Iterator[list[str]]:
    """The arguments that hand in base image and package sources, valid while their files are there."""
    base = _base(request, emit)
    release = base_image.release_of(base, request.docker)
    apt_list = base_image.apt_list(release.get("ID", ""), release.get("VERSION_CODENAME", ""), request.apt_mirror)
    with tempfile.TemporaryDirectory(dir=_state(request), prefix="build-") as folder:
        handed = hand_in(request, pip_sources(request, package_sources.of_host()), wanted, apt_list, Path(folder))
        yield ["--build-arg", f"BASE_IMAGE={base}", "--label", f"{catalog.BASE_LABEL}={base}", *handed]


def _base(request: BuildRequest, emit: Emit) -> str:
    """The image to build on, here by now: labctl's own, built where it is missing or old, or the settings'."""
    name = catalog.base_of(request.image)
    if name is None:
        if request.image == "habana" and request.base_image:
            gaudi.require_match(request.base_image)
        return base_image.ensure(
            request.base_image or catalog.base(request.image) or _gaudi_base(),
            chosen=bool(request.base_image),
            mirror=request.apt_mirror,
            directory=_state(request),
            emit=emit,
            docker=request.docker,
        )
    tag = catalog.tag(name)
    if catalog.is_stale(_labels(tag, request.docker) or {}, name):
        emit(f"image {request.tag} is built on {tag}: building that first")
        build(replace(request, image=name, tag=tag), emit)
    return tag


def _gaudi_base() -> str:
    driver = gaudi.driver()
    if not driver:
        raise HostError(
            "which of Habana's images to build on depends on the driver, and this host has none",
            hint=f"set LAB_BASE_IMAGE to the image of the nodes' driver, such as {gaudi.newest()}",
        )
    return gaudi.base_for(driver)


def pip_sources(request: BuildRequest, host: package_sources.PipSources) -> package_sources.PipSources:
    """The settings' package sources, this host's own where they name none."""
    return replace(
        host,
        index=request.pip_index or host.index,
        extra_indexes=request.pip_extra_indexes or host.extra_indexes,
        find_links=request.pip_find_links or host.find_links,
        cert=request.ca_certificates or host.cert,
    )


def hand_in(
    request: BuildRequest,
    pip: package_sources.PipSources,
    wanted: Mapping[str, str | None],
    apt_list: str,
    folder: Path,
) -> list[str]:
    """Write what the build may read into a private folder; returns the arguments, which name files, never values."""
    index = request.torch_index or TORCH_INDEXES.get(request.image, "")
    staged = package_sources.stage_wheels(_with_local_torch(pip, index), wanted, folder / "wheels")
    certificates = package_sources.ca_bundle((pip.cert,), request.environ)
    # Only where torch is wanted and no wheel is here: pip would ask it for every package, and it may be out of reach.
    torch_index = index if "torch" in wanted.keys() - staged else ""
    secrets = {
        "pip.conf": package_sources.pip_conf(
            pip, torch_index=torch_index, wheels=bool(staged), certificates=bool(certificates)
        ),
        "apt.list": apt_list,
        "apt.conf": _apt_conf(has_list=bool(apt_list), certificates=bool(certificates)),
    }
    arguments = ["--build-context", f"wheels={folder / 'wheels'}"] if staged else []
    if certificates:
        arguments += _secret("ca.crt", certificates)
    for name, content in secrets.items():
        if content:
            (folder / name).write_text(content, encoding="utf-8")
            arguments += _secret(name, folder / name)
    for name in _proxy_environment(request):
        arguments += ["--build-arg", name]
    return arguments


def _require_own(request: BuildRequest) -> None:
    """HostError when the name is that of an image which labctl did not build: it is somebody's own."""
    labels = _labels(request.tag, request.docker)
    if labels is not None and catalog.INPUTS_LABEL not in labels:
        there = f"on {request.host}" if request.host else "here"
        raise HostError(
            f"image {request.tag} is {there} and is not labctl's; it is not replaced", hint="unset LAB_IMAGE"
        )


def _labels(tag: str, docker: tuple[str, ...]) -> dict[str, str] | None:
    """An image's labels; None where the engine lacks it."""
    found = process.run([*docker, "image", "inspect", "--format", "{{json .Config.Labels}}", tag], check=False)
    return (json.loads(found.out) or {}) if found.code == 0 else None


def _secret(name: str, path: Path) -> list[str]:
    # Quoted, as the value is read as a line of CSV.
    return ["--secret", f'id={name},"src={path}"']


def _with_local_torch(pip: package_sources.PipSources, torch_index: str) -> package_sources.PipSources:
    """With the torch index among the local directories and indexes, if it is one."""
    if package_sources.local_path(torch_index) is None:
        return pip
    return replace(pip, find_links=(*pip.find_links, torch_index), extra_indexes=(*pip.extra_indexes, torch_index))


def _apt_conf(*, has_list: bool, certificates: bool) -> str:
    lines = []
    if has_list:
        lines = [f'Dir::Etc::SourceList "{package_sources.IN_BUILD}/apt.list";', 'Dir::Etc::SourceParts "-";']
    if certificates:
        lines.append(f'Acquire::https::CAInfo "{package_sources.IN_BUILD}/ca.crt";')
    return "".join(f"{line}\n" for line in lines)


def _proxy_environment(request: BuildRequest) -> dict[str, str]:
    """Proxies in both cases, since programs differ in which they read."""
    return {spelt: value for name, value in request.proxies for spelt in (name, name.lower())}


def _state(request: BuildRequest) -> Path:
    state = request.directory.absolute() / ".lab"
    make_private(state)
    return state


def _buildx(request: BuildRequest, arguments: list[str], emit: Emit) -> None:
    log = _state(request) / (f"build-{request.host}.log" if request.host else "build.log")
    environment = _proxy_environment(request)
    run(catalog.dockerfile(request.image), arguments, environment, log, request.tag, emit, request.docker)


def _text(image: str, kind: str) -> str:
    path = catalog.file(image, kind)
    return path.read_text(encoding="utf-8") if path.is_file() else ""
