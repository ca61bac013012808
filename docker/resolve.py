"""Says what NAME.in comes to today, as a lock: in a build's stage of its own.

    resolve.py NAME.in COMMAND [--beside BASE.in]

COMMAND is what a person types to have it made anew. BASE.in is what the image below was asked for, so that nothing is
chosen that its own packages could not live with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def resolve(asked: Path, base: Path | None) -> list[str]:
    """``project==version`` of all that pip would install."""
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
    return sorted(f"{re.sub(r'[-_.]+', '-', one['name']).lower()}=={one['version']}" for one in packages)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("asked", type=Path)
    parser.add_argument("command")
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    beside = f", beside {options.beside.stem}.lock" if options.beside else ""
    print(f"# What {options.asked.name} comes to{beside}. Update it with: {options.command}")
    print(*resolve(options.asked, options.beside), sep="\n")


if __name__ == "__main__":
    main()
