"""Builds the lab's image from this host's package sources, handed in for the build only.

It starts ``docker buildx build`` itself: python-on-whales puts the values of build arguments on the command line, where
everyone on the host could read a proxy's password, and keeps no log.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labctl import base_image, resources, shell, sources
from labctl.errors import HostError
from labctl.files import make_private
from labctl.model import Accelerator, Pairs
from labctl.settings import Settings

Emit = Callable[[str], None]

INPUTS_LABEL = "labctl.inputs"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build, and the package sources that the settings name; an empty one is this host's own."""

    accelerator: Accelerator
    tag: str
    directory: Path
    """The lab's."""
    base_image: str = ""
    base_chosen: bool = False
    apt_mirror: str = field(default="", repr=False)
    torch_index: str = field(default=TORCH_INDEX, repr=False)
    pip_index: str = field(default="", repr=False)
    pip_extra_indexes: tuple[str, ...] = field(default=(), repr=False)
    pip_find_links: tuple[str, ...] = field(default=(), repr=False)
    ca_certificates: str = ""
    proxies: Pairs = field(default=(), repr=False)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)


def request(settings: Settings, accelerator: Accelerator, directory: Path, environ: Mapping[str, str]) -> BuildRequest:
    """What the settings ask for."""
    return BuildRequest(
        accelerator=accelerator,
        environ=environ,
        tag=settings.text("LAB_IMAGE") or f"labctl/{accelerator}",
        directory=directory,
        base_image=settings.text("LAB_BASE_IMAGE"),
        base_chosen=settings.origin("LAB_BASE_IMAGE") != "default",
        apt_mirror=settings.text("LAB_APT_MIRROR"),
        torch_index=settings.text("LAB_TORCH_INDEX") or TORCH_INDEX,
        pip_index=settings.text("LAB_PIP_INDEX_URL"),
        pip_extra_indexes=tuple(settings.text("LAB_PIP_EXTRA_INDEX_URL").split()),
        pip_find_links=tuple(settings.text("LAB_PIP_FIND_LINKS").split()),
        ca_certificates=settings.text("LAB_CA_CERTIFICATES"),
        proxies=tuple((name, settings.text(name)) for name in PROXIES if settings.text(name)),
    )


def build(request: BuildRequest, emit: Emit) -> dict[str, Any]:
    """Build the image; seconds when nothing changed. HostError with the log's last lines when a step fails."""
    began = time.monotonic()
    _require_own(request.tag)
    inputs = image_inputs_hash(request.accelerator)
    wanted = sources.pins(_text(request.accelerator, "lock"))
    with _prepared(request, wanted, emit) as arguments:
        labelled = ["--load", "--tag", request.tag, "--label", f"{INPUTS_LABEL}={inputs}"]
        _buildx(request, [*labelled, *arguments], emit)
    shown = shell.run(["docker", "image", "inspect", "--format", "{{.Id}} {{.Size}}", request.tag]).out.split()
    seconds = round(time.monotonic() - began, 1)
    emit(f"image {request.tag}: {int(shown[1]) / 1e9:.2f} GB, {seconds:g} s")
    return {"image": request.tag, "id": shown[0], "size": int(shown[1]), "seconds": seconds}


def update_lock(request: BuildRequest, emit: Emit) -> dict[str, Any]:
    """Resolve ``<accelerator>.in`` anew and write the lock file beside it. HostError as ``build``."""
    lock = resources.path("docker", f"{request.accelerator}.lock")
    before = sources.pins(_text(request.accelerator, "lock"))
    any_version = dict.fromkeys((*before, *sources.pins(_text(request.accelerator, "in"))))
    with (
        _prepared(request, any_version, emit) as arguments,
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
    after = sources.pins(text)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    emit(f"{lock}: {len(after)} packages, {len(changed)} changed")
    return {"lock": str(lock), "packages": len(after), "changed": changed}


def image_inputs_hash(accelerator: str) -> str:
    """A hash over the files that the image is built from, so that a stale image can be told from a fresh one."""
    digest = hashlib.sha256()
    for name in (f"{accelerator}.Dockerfile", f"{accelerator}.lock", "labnode.py", "sshd_config"):
        path = resources.path("docker", name)
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    return digest.hexdigest()


def is_stale(labels: Mapping[str, str], accelerator: str) -> bool:
    """Whether an image with these labels was built from other files than there are now."""
    return labels.get(INPUTS_LABEL) != image_inputs_hash(accelerator)


# --- what the build is handed --------------------------------------------------------------------------------


@contextmanager
def _prepared(request: BuildRequest, wanted: Mapping[str, str | None], emit: Emit) -> Iterator[list[str]]:
    """The arguments that hand in base image and package sources, valid while their files are there."""
    base = request.base_image
    if request.accelerator == "cpu":
        base = base_image.ensure(
            base or f"debian:{base_image.DEBIAN}-slim",
            chosen=request.base_chosen,
            mirror=request.apt_mirror,
            directory=_state(request),
            emit=emit,
        )
    release = base_image.release_of(base) if base else {}
    apt_list = base_image.apt_list(release.get("ID", ""), release.get("VERSION_CODENAME", ""), request.apt_mirror)
    with tempfile.TemporaryDirectory(dir=_state(request), prefix="build-") as folder:
        handed = hand_in(request, pip_sources(request, sources.of_host()), wanted, apt_list, Path(folder))
        yield [*(("--build-arg", f"BASE_IMAGE={base}") if base else ()), *handed]


def pip_sources(request: BuildRequest, host: sources.PipSources) -> sources.PipSources:
    """The settings' package sources, this host's own where they name none."""
    return replace(
        host,
        index=request.pip_index or host.index,
        extra_indexes=request.pip_extra_indexes or host.extra_indexes,
        find_links=request.pip_find_links or host.find_links,
        cert=request.ca_certificates or host.cert,
    )


def hand_in(
    request: BuildRequest, pip: sources.PipSources, wanted: Mapping[str, str | None], apt_list: str, folder: Path
) -> list[str]:
    """Write what the build may read into a private folder; returns the arguments, which name files, never values."""
    staged = sources.stage_wheels(_with_local_torch(pip, request.torch_index), wanted, folder / "wheels")
    certificates = sources.ca_bundle((pip.cert,), request.environ)
    # Only where no wheel is here: pip would ask it for every package, and it may be out of reach.
    torch_index = "" if "torch" in staged else request.torch_index
    secrets = {
        "pip.conf": sources.pip_conf(
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


def _require_own(tag: str) -> None:
    """HostError when the name is that of an image which labctl did not build: it is somebody's own."""
    found = shell.run(["docker", "image", "inspect", "--format", "{{json .Config.Labels}}", tag], check=False)
    if found.code == 0 and INPUTS_LABEL not in found.out:
        raise HostError(f"image {tag} is here and is not labctl's; it is not replaced", hint="unset LAB_IMAGE")


def _secret(name: str, path: Path) -> list[str]:
    # Quoted, as the value is read as a line of CSV.
    return ["--secret", f'id={name},"src={path}"']


def _with_local_torch(pip: sources.PipSources, torch_index: str) -> sources.PipSources:
    """With the torch index among the local directories and indexes, if it is one."""
    if sources.local_path(torch_index) is None:
        return pip
    return replace(pip, find_links=(*pip.find_links, torch_index), extra_indexes=(*pip.extra_indexes, torch_index))


def _apt_conf(*, has_list: bool, certificates: bool) -> str:
    lines = []
    if has_list:
        lines = [f'Dir::Etc::SourceList "{sources.IN_BUILD}/apt.list";', 'Dir::Etc::SourceParts "-";']
    if certificates:
        lines.append(f'Acquire::https::CAInfo "{sources.IN_BUILD}/ca.crt";')
    return "".join(f"{line}\n" for line in lines)


def _proxy_environment(request: BuildRequest) -> dict[str, str]:
    """Proxies in both cases, since programs differ in which they read."""
    return {spelt: value for name, value in request.proxies for spelt in (name, name.lower())}


def _state(request: BuildRequest) -> Path:
    state = request.directory.absolute() / ".lab"
    make_private(state)
    return state


def _text(accelerator: str, kind: str) -> str:
    path = resources.path("docker", f"{accelerator}.{kind}")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# --- the build -----------------------------------------------------------------------------------------------


def _buildx(request: BuildRequest, arguments: list[str], emit: Emit) -> None:
    dockerfile = resources.path("docker", f"{request.accelerator}.Dockerfile")
    if not dockerfile.is_file():
        raise HostError(f"there is no {dockerfile}", hint="set LAB_IMAGE to an image that has what the lab needs")
    # The engine's own builder: another could neither see a local base image nor share its cache with the engine.
    builder = shell.run(["docker", "context", "show"]).out.strip()
    argv = ["docker", "buildx", "build", "--builder", builder, "--progress", "plain", "--provenance=false"]
    argv += ["--file", str(dockerfile), *arguments, str(dockerfile.parent)]
    log = _state(request) / "build.log"
    progress = Progress(emit)
    with log.open("w", encoding="utf-8") as file:
        log.chmod(0o600)

        def keep(line: str) -> None:
            safe = hide_credentials(line)
            file.write(safe + "\n")
            progress.read(safe)

        done = shell.stream(argv, keep, env=_proxy_environment(request), check=False)
    if done.code != 0:
        last = hide_credentials(done.out)
        raise HostError(
            f"building {request.tag} failed:\n{last}",
            hint=f"less {log}; where packages come from: LAB_APT_MIRROR, LAB_PIP_INDEX_URL, LAB_PIP_FIND_LINKS, "
            "LAB_CA_CERTIFICATES, HTTPS_PROXY",
        )


def hide_credentials(line: str) -> str:
    """A line without the user and password of any URL in it."""
    return re.sub(r"(\w://)[^\s/]*@", r"\1[REDACTED]@", line)


class Progress:
    """BuildKit's plain progress, told as one line when a step begins to work and one when it is done."""

    def __init__(self, emit: Emit) -> None:
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
