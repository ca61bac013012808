"""Resolve NAME.in to a lock file with hashes, in a separate build stage.

    resolve.py NAME.in COMMAND [--beside BASE.in]

COMMAND is the command that updates the lock. BASE.in has the requirements of the base image, so that all versions are
compatible with its packages.

A version has the hashes of all its files for Linux that the index lists: the lock is valid for every Python version,
architecture and index. torch has no hashes, as its wheels differ by index.
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


def resolve(requirements: Path, base: Path | None) -> dict[str, str]:
    """Return project -> version that a dry run of pip would install, sorted; exit if torch is there without base."""
    if base:
        options = ["--no-build-isolation", "--requirement", str(base)]
    elif importlib.util.find_spec("torch"):
        sys.exit("this base brings packages of its own, which no lock describes: use a plain Debian or Ubuntu")
    else:
        options = ["--ignore-installed"]
    with tempfile.NamedTemporaryFile() as report:
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", report.name]
        subprocess.run([*pip, *options, "--requirement", str(requirements)], check=True, stdout=sys.stderr)
        packages = [package["metadata"] for package in json.load(report)["install"]]
    versions = {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in packages}
    return {project: versions[project] for project in sorted(versions)}


def hashes(project: str, version: str) -> list[str]:
    """Return the sorted SHA-256 of a version's files for Linux from pip's indexes; exit if they list none."""
    session: Any = importlib.import_module("pip._vendor.requests").Session()

    # The index and certificates that the build was given, as pip is configured.
    settings = configparser.ConfigParser(interpolation=None)
    settings.read("/etc/pip.conf")
    pip_settings = dict(settings.items("global")) if settings.has_section("global") else {}
    digests = set()
    indexes = [pip_settings.get("index-url", "https://pypi.org/simple")]
    indexes += pip_settings.get("extra-index-url", "").split()
    for index in indexes:
        page = session.get(f"{index.rstrip('/')}/{project}/", verify=pip_settings.get("cert", True), timeout=60)
        links = re.findall(r"""href=["'][^"'#]*/([^"'/#]+)#sha256=(\w+)""", page.text)
        digests |= {digest for name, digest in links if is_file_of(unquote(name), version)}
    return sorted(digests) or sys.exit(f"{project} {version}: the package index lists no hashes")


def is_file_of(name: str, version: str) -> bool:
    """Return True if a file is the version's source archive or a wheel of it for Linux or any platform."""
    from pip._vendor.packaging import utils
    from pip._vendor.packaging.version import Version

    try:
        if name.endswith(".whl"):
            _, wheel_version, _, tags = utils.parse_wheel_filename(name)
            return wheel_version == Version(version) and any(LINUX.fullmatch(tag.platform) for tag in tags)
        return bool(utils.parse_sdist_filename(name)[1] == Version(version))
    except ValueError:
        return False


def locked(project: str, version: str) -> str:
    """Return the lock's line `PROJECT==VERSION --hash=...`; torch has no hashes."""
    digests = () if project == "torch" else hashes(project, version)
    return " ".join((f"{project}=={version}", *(f"--hash=sha256:{digest}" for digest in digests)))


def main() -> None:
    """Resolve the requirements of the command line and print the lock: a comment, then a line per package."""
    parser = argparse.ArgumentParser()
    parser.add_argument("requirements", type=Path)
    parser.add_argument("command")
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    beside = f", beside {options.beside.stem}.lock" if options.beside else ""
    versions = resolve(options.requirements, options.beside)
    with ThreadPoolExecutor(8) as pool:
        lines = list(pool.map(locked, versions, versions.values()))
    print(f"# What {options.requirements.name} comes to{beside}. Update it with: {options.command}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
