"""The image that another is built from: here already, pulled, or, plain Debian, made from this host's own packages."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from labctl.engines.docker import DockerEngine
from labctl.errors import HostError
from labctl.setup import apt
from labctl.setup.requirements import root_prefix
from labctl.system import process, procfs

Emit = Callable[[str], None]

DEBIAN = "bookworm"
"""The release of the plain base image, whatever release the host runs."""
PLAIN = f"debian:{DEBIAN}-slim"

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def ensure(name: str, *, chosen: bool, mirror: str, directory: Path, emit: Emit, engine: DockerEngine) -> str:
    """The name of an image that the engine has. ``chosen``: by the settings, so no other is made in its place.

    HostError if it can be neither pulled nor made.
    """
    made = f"labctl/base:{DEBIAN}"
    can_make = name == PLAIN and not chosen
    for image in (name, made) if can_make else (name,):
        if engine.image_id(image):
            return image
    emit(f"pulling {name}")
    try:
        engine.pull(name)
    except HostError as error:
        reason = error.message.strip().splitlines()[-1]
    else:
        return name
    if not can_make:
        hint = "LAB_BASE_IMAGE may name an image that is here: docker images"
        raise HostError(f"cannot pull {name}: {reason}", hint=hint)
    emit(f"cannot pull {name} ({reason}): making {made} from this host's own Debian packages instead")
    make(made, mirror, directory, emit, engine)
    return made


def make(tag: str, mirror: str, directory: Path, emit: Emit, engine: DockerEngine) -> None:
    """Make a minimal Debian and import it. HostError if this host cannot, or a step fails.

    Source: mmdebstrap(1).
    """
    if procfs.os_release().get("ID") not in {"debian", "ubuntu"}:
        raise HostError(
            "only a Debian or Ubuntu host can make the base image itself",
            hint="set LAB_BASE_IMAGE to a Debian image that is here, or docker load one",
        )
    archive = apt_list("debian", DEBIAN, mirror)
    if not archive:
        raise HostError(
            f"this host's own package sources have no Debian {DEBIAN} to make the base image from",
            hint="set LAB_APT_MIRROR to a Debian mirror, or LAB_BASE_IMAGE to an image that is here",
        )
    _require_mmdebstrap(emit)
    with tempfile.TemporaryDirectory(dir=directory, prefix="base-") as folder:
        work = Path(folder)
        # Credentials are used from a file here, and stay out of the image.
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
        engine.import_image(work / "base.tar", tag)


def apt_list(distribution: str, codename: str, mirror: str) -> str:
    """``sources.list`` for an image of that release: Debian's from a named mirror, else this host's own; or empty."""
    if mirror and distribution == "debian":
        return apt.for_mirror(mirror, codename)
    release = procfs.os_release()
    if release.get("ID") != distribution:
        return ""
    return apt.for_release(apt.read(), distribution, release.get("VERSION_CODENAME", ""), codename)


def release_of(image: str, engine: DockerEngine) -> Mapping[str, str]:
    """``/etc/os-release`` of an image; empty if it has none."""
    try:
        return procfs.parse_os_release(engine.file_of(image, "/etc/os-release"))
    except HostError:
        return {}


def _require_mmdebstrap(emit: Emit) -> None:
    wanted = ["mmdebstrap"] * (shutil.which("mmdebstrap") is None) + ["debian-archive-keyring"] * (
        not KEYRING.is_file()
    )
    if not wanted:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *wanted]
    prefix = root_prefix()
    if prefix is None:
        raise HostError(f"making the base image needs {' and '.join(wanted)}", hint=f"as root: {shlex.join(install)}")
    emit(f"installing {', '.join(wanted)}")
    if process.run([*prefix, *install], check=False).code != 0:
        process.run([*prefix, "apt-get", "update"])
        process.run([*prefix, *install])
