"""Resolves NAME.in into a lock with hashes, in a build's stage of its own.

    resolve.py NAME.in COMMAND [--beside BASE.in]

COMMAND is what a person types to update the lock. BASE.in is what the image below was asked for, so that nothing is
chosen that its packages cannot work with.

A version's hashes are those of all its files for Linux that the index lists: the lock holds for every Python and
processor, and wherever a file comes from. torch has none, as its wheel differs by source.
"""

from __future__ import annotations

import argparse
import configparser
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

LINUX = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)")


def resolve(asked: Path, base: Path | None) -> dict[str, str]:
    """Project -> version of all that pip would install."""
    if base:
        options = ["--no-build-isolation", "--requirement", str(base)]
    elif importlib.util.find_spec("torch"):
        sys.exit("this base brings packages of its own, which no lock describes: use a plain Debian or Ubuntu")
    else:
        options = ["--ignore-installed"]
    with tempfile.NamedTemporaryFile() as report:
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", report.name]
        subprocess.run([*pip, *options, "--requirement", str(asked)], check=True, stdout=sys.stderr)
        packages = [package["metadata"] for package in json.load(report)["install"]]
    found = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in packages}
    return {project: found[project] for project in sorted(found)}


def hashes(project: str, version: str) -> list[str]:
    """SHA-256 of the version's files for Linux; exits where the index lists none."""
    session: Any = importlib.import_module("pip._vendor.requests").Session()

    # What the build was handed; its own certificates are where pip looks for them.
    settings = configparser.ConfigParser(interpolation=None)
    settings.read("/etc/pip.conf")
    given = dict(settings.items("global")) if settings.has_section("global") else {}
    found = set()
    for index in (given.get("index-url", "https://pypi.org/simple"), *given.get("extra-index-url", "").split()):
        page = session.get(f"{index.rstrip('/')}/{project}/", verify=given.get("cert", True), timeout=60)
        links = re.findall(r"""href=["'][^"'#]*/([^"'/#]+)#sha256=(\w+)""", page.text)
        found |= {digest for name, digest in links if is_file_of(unquote(name), version)}
    return sorted(found) or sys.exit(f"{project} {version}: the package index lists no hashes")


def is_file_of(name: str, version: str) -> bool:
    """Whether a file is a version's source archive, or its wheel for Linux."""
    from pip._vendor.packaging import utils
    from pip._vendor.packaging.version import Version

    try:
        if name.endswith(".whl"):
            _, found, _, tags = utils.parse_wheel_filename(name)
            return found == Version(version) and any(LINUX.fullmatch(tag.platform) for tag in tags)
        return bool(utils.parse_sdist_filename(name)[1] == Version(version))
    except ValueError:
        return False


def locked(project: str, version: str) -> str:
    """A line of the lock."""
    digests = () if project == "torch" else hashes(project, version)
    return " ".join((f"{project}=={version}", *(f"--hash=sha256:{digest}" for digest in digests)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("asked", type=Path)
    parser.add_argument("command")
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    beside = f", beside {options.beside.stem}.lock" if options.beside else ""
    versions = resolve(options.asked, options.beside)
    with ThreadPoolExecutor(8) as pool:
        lines = list(pool.map(locked, versions, versions.values()))
    print(f"# What {options.asked.name} comes to{beside}. Update it with: {options.command}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
