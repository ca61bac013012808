"""The image of the rack's hosts, and a fast way to copy this machine's images to a host."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from docker.models.images import Image
from msgspec.structs import replace

from docker import DockerClient
from labctl.backends.docker.images import build, package_sources
from labctl.config import settings

HERE = Path(__file__).parent
NAME = "stand-in/host"
FILES = ("host.Dockerfile", "install.sh", "boot.sh", "engine.sh", "give.sh")
RELEASES = (build.DEBIAN, "trixie")


def ensure(engine: DockerClient, directory: Path) -> str:
    """Return the tag of the hosts' image; build it unless it exists for the current files. ``directory``: scratch."""
    digest = hashlib.sha256(b"\0".join((HERE / name).read_bytes() for name in FILES)).hexdigest()
    tag = f"{NAME}:{digest[:12]}"
    if not engine.images.list(filters={"reference": tag}):
        _build(tag, directory)
    return tag


def _build(tag: str, directory: Path) -> None:
    """Build the image with this machine's package sources and certificates, as `labctl build` does."""
    loaded = settings.load(directory, os.environ, {})
    request = build.request(loaded, "cpu", tag, directory, os.environ)
    base = build.ensure_base(build.PLAIN, replace(request, base_image=""), lambda _: None)
    packages = "".join(build.apt_list("debian", release, request.apt_mirror) for release in RELEASES)
    handed = build.hand_in(request, build.pip_sources(request, package_sources.of_host()), {}, packages, directory)
    arguments = ["--load", "--tag", tag, "--build-arg", f"BASE_IMAGE={base}", *handed]
    build.run(HERE / FILES[0], arguments, request, lambda _: None)


def given(engine: DockerClient, name: str, present: Iterable[Image] = ()) -> list[str]:
    """Return give.sh's arguments that copy an image to a host; empty unless the engine's storage is overlay2.

    ``present``: images that the host's engine has already. With no arguments, use `load`.
    """
    if engine.info()["Driver"] != "overlay2":
        return []
    image = engine.images.get(name)
    repositories: dict[str, dict[str, str]] = {}
    for tag, identity in [*((tag, held.id) for held in present for tag in held.tags), (_tag(name), image.id)]:
        repositories.setdefault(tag.rpartition(":")[0], {})[tag] = str(identity)
    return [json.dumps({"Repositories": repositories}), _hex(str(image.id)), *_layers(image)]


def load(image: str, address: str) -> None:
    """Copy an image to the engine at that address with `docker save` and `docker load`."""
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
        subprocess.run(["docker", "--host", address, "load", "--quiet"], stdin=saved.stdout, check=True, timeout=600)
    assert saved.returncode == 0, f"docker save {image}: code {saved.returncode}"


def _layers(image: Image) -> list[str]:
    """Return the chain ids of the layers, under which the engine stores them.

    Source: the OCI image specification, "Layer ChainID".
    """
    chain: list[str] = []
    for layer in image.attrs["RootFS"]["Layers"]:
        below = f"sha256:{chain[-1]} {layer}" if chain else ""
        chain.append(hashlib.sha256(below.encode()).hexdigest() if below else _hex(layer))
    return chain


def _tag(image: str) -> str:
    """Return an image's name with its tag, ``latest`` if it has none."""
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
