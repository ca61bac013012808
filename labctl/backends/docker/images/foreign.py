"""Images of `labctl build --from`: another image plus what a node needs, tagged by a hash of both."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.images import build, catalog
from labctl.backends.docker.images.build import BuildRequest, Emit
from labctl.errors import HostError
from labctl.system import files

DOCKERFILE = "Dockerfile.from"
PROGRAM = "/opt/lab/labnode.py"


def is_node(described: dict[str, Any]) -> bool:
    """Return True if an image's entrypoint is labctl's, so that its containers are nodes."""
    return PROGRAM in (described["Config"].get("Entrypoint") or ())


def require_node(engine: DockerEngine, image: str, base: str) -> dict[str, str]:
    """Return an image's labels, {} if missing. HostError if it is no node, or a Dockerfile set ENTRYPOINT or USER.

    ``base`` is the image that the user's Dockerfile was built on, or the image itself without a Dockerfile.
    """
    described = engine.image(image)
    if not described:
        return {}
    config = described["Config"]
    changed = ["ENTRYPOINT"] * (not is_node(described)) + ["USER"] * (config.get("User") not in (None, "", "root", "0"))
    if changed and image != base:
        hint = f"remove its {' and '.join(changed)}"
        raise HostError(f"LAB_DOCKERFILE: image {image} does not start as a node", hint=hint)
    if not is_node(described):
        raise HostError(
            f"image {image} is not a node: it has no ssh, or not labctl's entrypoint",
            hint=f"labctl build --from {base}",
        )
    return dict(config.get("Labels") or {})


def make(request: BuildRequest, base: str, emit: Emit) -> dict[str, Any]:
    """Build a node image on any base, pulled if missing; return a report. HostError if that is a node already."""
    began = time.monotonic()
    engine = request.engine
    build.ensure_base(base, replace(request, base_image=base), emit)
    base_image = engine.image(base) or {}
    if is_node(base_image):
        raise HostError(f"image {base} is a node already", hint=f"LAB_IMAGE={base} in .env, then `labctl up`")
    request = replace(request, tag=tag(base_image["Id"]), base_image=base)
    build.require_own(request)
    with build.prepared(request, base, {}) as arguments:
        loaded = ["--load", "--tag", request.tag, "--label", f"{catalog.INPUTS_LABEL}={_added()}", *arguments]
        emit(f"image {request.tag}: {base} with what a node needs")
        build.run(files.path("docker", DOCKERFILE), loaded, request, emit)
    built = engine.image(request.tag) or {}
    return {
        "image": request.tag,
        "id": built["Id"],
        "size": built["Size"],
        "added": built["Size"] - base_image["Size"],
        "seconds": round(time.monotonic() - began, 1),
        "next": f"LAB_IMAGE={request.tag} in .env, then `labctl up`",
    }


def tag(base: str) -> str:
    """Return the tag of the node image made from the base with this id: a hash of the id and of the added files."""
    return f"{catalog.FROM}{hashlib.sha256((base + _added()).encode()).hexdigest()[:12]}"


def is_stale(image: str, labels: Mapping[str, str]) -> bool:
    """Return True if an image of `labctl build --from` was made with other files than labctl's current ones."""
    return image.startswith(catalog.FROM) and labels.get(catalog.INPUTS_LABEL) != _added()


def _added() -> str:
    """Return a hash of the Dockerfile and files that make a node image of a base."""
    digest = hashlib.sha256()
    for path in catalog.sources(files.path("docker", DOCKERFILE)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
