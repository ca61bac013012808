"""This host's sources of Python packages, and the part that an image build gets: during the build only.

Sources: pip's configuration (https://pip.pypa.io/en/stable/topics/configuration/), the simple repository API (PEP 503),
file names of wheels (PEP 427) and source archives (PEP 625).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from msgspec import Struct

from labctl.backends.docker.images.archive import Range, sha256
from labctl.system import process

CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")

IN_BUILD = "/run/sources"
"""Folder in which a build step sees its inputs."""


class PipSources(Struct, frozen=True, kw_only=True):
    """Indexes and directories of Python packages. URLs may carry credentials, so they are not in the repr."""

    index: str = ""
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    cert: str = ""

    def __repr__(self) -> str:
        return f"PipSources(trusted_hosts={self.trusted_hosts!r}, no_index={self.no_index!r}, cert={self.cert!r})"


def of_host() -> PipSources:
    """Return the package sources of `pip config list` on this host; the defaults if no pip runs."""
    for pip in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["pip"]):
        done = process.run([*pip, "config", "list"], check=False, timeout=30)
        if done.code == 0:
            return parse_pip(done.out)
    return PipSources()


def parse_pip(text: str) -> PipSources:
    """Return the sources in the output of ``pip config list``: environment before ``install`` before ``global``."""
    values: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for match in re.finditer(rf"^{section}\.([a-z_-]+)=(.*)$", text, re.MULTILINE):
            values[match[1].replace("_", "-")] = str(ast.literal_eval(match[2]))
    return PipSources(
        index=values.get("index-url", ""),
        extra_indexes=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        no_index=values.get("no-index", "").lower() in {"1", "true", "yes", "on"},
        cert=values.get("cert", ""),
    )


def ca_bundle(preferred: Iterable[str], environ: Mapping[str, str]) -> Path | None:
    """Return the first existing file of certificates: ``preferred``, environment's, system's; None without."""
    named = (*preferred, environ.get("SSL_CERT_FILE", ""), environ.get("REQUESTS_CA_BUNDLE", ""), *CA_BUNDLES)
    return next((Path(path) for path in named if path and Path(path).is_file()), None)


def pip_conf(pip: PipSources, *, torch_index: str, wheels: bool, certificates: bool) -> str:
    """Return the text of ``pip.conf`` for a build step: remote sources, staged wheels and certificates."""
    index = pip.index if not local_path(pip.index) else ""
    extra = [url for url in (*pip.extra_indexes, torch_index) if url and not local_path(url)]
    staged = [f"{IN_BUILD}/wheels"] if wheels else []
    links = [url for url in pip.find_links if not local_path(url)] + staged
    settings = {
        "index-url": index,
        "extra-index-url": "\n    ".join(extra),
        "find-links": "\n    ".join(links),
        "trusted-host": "\n    ".join(pip.trusted_hosts),
        "no-index": "true" if pip.no_index else "",
        "cert": f"{IN_BUILD}/ca.crt" if certificates else "",
        "timeout": "60",
        "disable-pip-version-check": "true",
    }
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items() if value)


def stage_wheels(
    pip: PipSources, projects: Mapping[str, str | None], into: Path, digests: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Link or copy the needed files of local directories and indexes into a new folder; return projects found.

    ``projects`` maps project to version, None for any. Other files are skipped: a directory of wheels may hold hundreds
    of gigabytes. With ``digests``, only files with these digests are taken, as pip accepts no others, except of torch.
    """
    from packaging.version import Version

    into.mkdir()
    staged = set()
    for path in (*_in_directories(pip.find_links), *_in_indexes((pip.index, *pip.extra_indexes), projects)):
        project, version = project_of(path.name)
        checked = digests and project != "torch"
        fits = project in projects and (not (pin := projects[project]) or Version(pin) == version)
        if fits and not (checked and sha256(Range(path, 0, path.stat().st_size).chunks()) not in digests):
            target = into / path.name
            target.unlink(missing_ok=True)
            try:
                os.link(path.resolve(), target)
            except OSError:
                # Links fail across file systems, and for another user's file.
                shutil.copyfile(path, target)
            staged.add(project)
    return frozenset(staged)


def pins(lock: str) -> dict[str, str | None]:
    """Return the pinned version, or None, of each project in a lock or requirements file, by normalized name."""
    from packaging.utils import canonicalize_name

    requirements = re.findall(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*(?:==\s*([^\s;#,]+))?", lock, re.MULTILINE)
    return {canonicalize_name(project): version or None for project, version in requirements}


def hashes(lock: str) -> frozenset[str]:
    """Return the SHA-256 of every file that a lock allows."""
    return frozenset(re.findall(r"--hash=sha256:(\w+)", lock))


def project_of(filename: str) -> tuple[str, object]:
    """Return normalized project and version of a wheel or source archive; ``("", None)`` for any other file."""
    from packaging.utils import parse_sdist_filename, parse_wheel_filename

    name = unquote(filename)
    try:
        return parse_wheel_filename(name)[:2] if name.endswith(".whl") else parse_sdist_filename(name)
    except ValueError:
        return "", None


def local_path(link: str) -> Path | None:
    """Return the path on this host that a link names; None for a remote or an empty link."""
    url = urlsplit(link)
    if url.scheme == "file":
        return Path(unquote(url.path))
    return None if url.scheme or not link else Path(link).expanduser()


def _in_directories(links: Iterable[str]) -> Iterator[Path]:
    """Yield the files in the local directories among the links."""
    for link in links:
        folder = local_path(link)
        if folder and folder.is_dir():
            yield from sorted(path for path in folder.iterdir() if path.is_file())


def _in_indexes(indexes: Iterable[str], projects: Iterable[str]) -> Iterator[Path]:
    """Yield the local files that local indexes list for the projects."""
    folders = [folder for index in indexes if (folder := local_path(index))]
    for page in (folder / project / "index.html" for folder in folders for project in projects):
        if page.is_file():
            for link in re.findall(r"""href\s*=\s*["']([^"'#]+)""", page.read_text(encoding="utf-8")):
                path = local_path(urljoin(page.absolute().as_uri(), link))
                if path and path.is_file():
                    yield path
