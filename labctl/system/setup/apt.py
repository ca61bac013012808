"""This host's apt configuration, read as data in either format: the archives that its packages come from.

Sources: sources.list(5) for the one-line and the deb822 format, apt_preferences(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from labctl.system import procfs

SUFFIXES = ("", "-updates", "-security")
"""Suites of a release that an installed system follows."""


class Source(Struct, frozen=True):
    """An archive of apt."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


def read(root: Path = Path("/")) -> tuple[Source, ...]:
    """Return every enabled source of binary packages; an unreadable file counts as empty."""
    folder = root / "etc/apt"
    one_line = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.list"))]
    deb822 = sorted((folder / "sources.list.d").glob("*.sources"))
    listed = chain.from_iterable(parse_list(procfs.read(path)) for path in one_line)
    stanzas = chain.from_iterable(parse_deb822(procfs.read(path)) for path in deb822)
    return (*listed, *stanzas)


def parse_list(text: str) -> Iterator[Source]:
    """Parse ``deb [signed-by=KEY] URI SUITE COMPONENT...`` lines."""
    for line in text.splitlines():
        match = re.fullmatch(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*(.*)", line.partition("#")[0].rstrip())
        if match:
            options = dict(option.split("=", 1) for option in (match[1] or "").split() if "=" in option)
            yield Source((match[2],), (match[3],), tuple(match[4].split()), options.get("signed-by", ""))


def parse_deb822(text: str) -> Iterator[Source]:
    """Parse stanzas of ``Key: value`` with continuation lines; disabled stanzas are skipped."""
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", plain):
        fields = {
            match[1].lower(): " ".join(match[2].split())
            for match in re.finditer(r"^([A-Za-z-]+):(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        }
        enabled = fields.get("enabled", "yes").lower() not in {"no", "false", "0"}
        if enabled and "deb" in fields.get("types", "").split():
            uris, suites, components = (tuple(fields.get(key, "").split()) for key in ("uris", "suites", "components"))
            yield Source(uris, suites, components, fields.get("signed-by", ""))


def archive(sources: tuple[Source, ...], distribution: str, suite: str) -> Source | None:
    """Return the first source that is the distribution's own main archive of a suite, with its http URIs; or None."""
    for source in sources:
        uris = tuple(uri for uri in source.uris if urlsplit(uri).scheme in {"http", "https"})
        if suite in source.suites and "main" in source.components and _is_own(source, uris, distribution):
            return replace(source, uris=uris, suites=(suite,))
    return None


def for_release(sources: tuple[Source, ...], distribution: str, host_codename: str, codename: str) -> str:
    """Return a ``sources.list`` for another release of the distribution, from the same mirrors; empty without mirrors.

    Only the distribution's own archives: third-party sources are left out.
    """
    archives = {suffix: archive(sources, distribution, host_codename + suffix) for suffix in SUFFIXES}
    firsts = {suffix: source.uris[0] for suffix, source in archives.items() if source and source.uris}
    return "".join(_line(uri, codename + suffix, distribution) for suffix, uri in firsts.items())


def for_mirror(mirror: str, codename: str) -> str:
    """Return a ``sources.list`` for a Debian release from a single mirror; security is in ``MIRROR-security``."""
    base = mirror.rstrip("/")
    return "".join(_line(f"{base}-security" if s == "-security" else base, codename + s, "debian") for s in SUFFIXES)


def candidates(policy: str) -> dict[str, str]:
    """Parse ``apt-cache policy`` into the candidate version of each package; packages without one are left out."""
    versions = re.findall(r"^(\S+):\n.*\n  Candidate: (.*)$", policy, re.MULTILINE)
    return {package: version for package, version in versions if version != "(none)"}


def _is_own(source: Source, uris: tuple[str, ...], distribution: str) -> bool:
    """Tell if a source is the distribution's, by its key or else its path: third parties use the same suite names."""
    if source.signed_by:
        return Path(source.signed_by).name.startswith(f"{distribution}-archive-")
    return any(distribution in urlsplit(uri).path for uri in uris)


def _line(uri: str, suite: str, distribution: str) -> str:
    """Return a line of a sources.list, signed by the distribution's keyring; with ``universe`` on Ubuntu."""
    # Ubuntu has Open MPI and pdsh in universe, Debian in main.
    components = "main universe" if distribution == "ubuntu" else "main"
    return f"deb [signed-by=/usr/share/keyrings/{distribution}-archive-keyring.gpg] {uri} {suite} {components}\n"
