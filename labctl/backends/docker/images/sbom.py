"""Software bills of materials: the packages installed in an image."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from labctl.backends.docker.daemon import DockerEngine
from labctl.errors import HostError
from labctl.system import files, process

INSTALLED = Path(__file__).with_name("installed.sh").read_text(encoding="utf-8")
# Timeout in seconds of a container that lists its packages.
LISTING = 120


def write(image: str, path: Path) -> int:
    """Write a CycloneDX bill of a local image to a file; return the number of packages. HostError if it fails."""
    engine = DockerEngine()
    document = bill(image, engine.image_id(image) or image, installed(engine, image))
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise HostError(
            f"cannot write {path}: {error.strerror}", hint=f"ls -ld {path.parent}; df -h {path.parent}"
        ) from error
    return len(document["components"])


def installed(engine: DockerEngine, image: str) -> str:
    """Run a container of the image that lists its packages; return the lines. HostError if it fails."""
    name = f"labctl-sbom-{secrets.token_hex(4)}"
    options = ("--rm", "--name", name, "--network", "none", "--pull", "never", "--entrypoint", "/bin/sh")
    try:
        done = process.run((*engine.docker, "run", *options, image, "-c", INSTALLED), timeout=LISTING, check=False)
    except BaseException:
        # Ending the client does not end the container.
        process.run((*engine.docker, "rm", "--force", name), timeout=LISTING, check=False)
        raise
    if done.code:
        reason = (done.err.strip() or "no answer").splitlines()[-1]
        raise HostError(f"cannot list the packages of image {image}: {reason}", hint=f"docker run --rm -it {image} sh")
    return done.out


def versions(engine: DockerEngine, identity: str, cache: Path) -> dict[str, str]:
    """Return version by package of an image id, from the JSON file in ``cache``, which is written if missing.

    Names are ``torch``, or ``deb/libc6`` for a package of the distribution. HostError as ``installed``.
    """
    path = cache / f"{identity.rpartition(':')[2]}.json"
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    packages = {}
    for line in installed(engine, identity).splitlines():
        if line.count("\t") == 3:
            kind, _, name, version = line.split("\t")
            packages[name if kind == "pypi" else f"{kind}/{name}"] = version
    files.write(path, json.dumps(dict(sorted(packages.items())), indent=2) + "\n")
    return packages


def bill(image: str, identity: str, installed: str) -> dict[str, Any]:
    """Return the CycloneDX document of an image from lines of ``installed.sh``. HostError for a malformed line.

    Source: CycloneDX 1.5, https://cyclonedx.org/docs/1.5/json; package URLs:
    https://github.com/package-url/purl-spec.
    """
    components = []
    for line in sorted(set(installed.splitlines())):
        if line.count("\t") != 3:
            raise HostError(
                f"cannot list the packages of image {image}: malformed line: {line[:100]!a}",
                hint=f"docker run --rm -it {image} sh",
            )
        kind, distribution, name, version = line.split("\t")
        # PyPI ignores case, and treats -, _ and dots in names alike.
        named = name.lower().replace("_", "-") if kind == "pypi" else name
        purl = (
            "/".join(filter(None, (f"pkg:{kind}", distribution, quote(named, safe="")))) + f"@{quote(version, safe='')}"
        )
        components.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    described = {"type": "container", "bom-ref": identity, "name": image, "version": identity}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": described},
        "components": components,
    }
