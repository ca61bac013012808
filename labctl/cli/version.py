"""`labctl --version`: the versions of labctl and of what it drives on this machine."""

from __future__ import annotations

from labctl import __version__
from labctl.cli.output import say
from labctl.system import process

# One call tells all: the other two would take as long again each.
VERSIONS = "engine={{.ServerVersion}}{{range .ClientInfo.Plugins}} {{.Name}}={{.Version}}{{end}}"
SECONDS = 3
NAMES = {"engine": "Docker Engine", "compose": "Docker Compose", "buildx": "Docker Buildx"}


def print_version() -> None:
    """Print the versions of labctl, Docker Engine, compose and buildx, one a line."""
    say(f"labctl {__version__}")
    found = docker_versions()
    for key, name in NAMES.items():
        say(f"{name} {found[key]}")


def docker_versions() -> dict[str, str]:
    """Return the version of each of NAMES, "not found" or, if it is there but tells none, "no answer"."""
    try:
        # Labs use the default context's daemon. Without a daemon, the code is not 0, and plugins are listed.
        done = process.run(["docker", "--context=default", "info", "--format", VERSIONS], timeout=SECONDS, check=False)
    except process.ProcessTimeout:
        return dict.fromkeys(NAMES, "no answer")
    printed = dict(word.partition("=")[::2] for word in done.out.split())
    missing = dict.fromkeys(NAMES, "not found")
    return missing | {name: version or "no answer" for name, version in printed.items()}
