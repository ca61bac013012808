"""`labctl --version`: the versions of labctl and of the programs that it starts on this machine."""

from __future__ import annotations

from labctl import __version__
from labctl.cli.output import say
from labctl.system.setup.requirements import docker_versions


def print_version() -> None:
    """Print the versions of labctl, Docker Engine, compose and buildx, one a line."""
    say(f"labctl {__version__}")
    for name, version in docker_versions().items():
        say(f"{name} {version}")
