"""Runs ``docker buildx build``, with a log and short progress, neither of which shows credentials.

Not through python-on-whales, which puts the values of build arguments on the command line, where everyone on the host
could read a proxy's password, and keeps no log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from labctl import shell
from labctl.engines.docker_engine import DockerEngine
from labctl.errors import HostError

Emit = Callable[[str], None]


def run(
    dockerfile: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    what: str,
    emit: Emit,
    engine: DockerEngine,
) -> None:
    """Build from a Dockerfile and its folder. HostError with the log's last lines if a step fails."""
    # The engine's own builder: another could neither see a local base image nor share its cache with the engine.
    argv = [*engine.docker, "buildx", "build", "--builder", engine.context(), "--progress", "plain"]
    argv.append("--provenance=false")
    argv += ["--file", str(dockerfile), *arguments, str(dockerfile.parent)]
    progress = Progress(emit)
    with log.open("w", encoding="utf-8") as file:
        log.chmod(0o600)

        def keep(line: str) -> None:
            safe = hide_credentials(line)
            file.write(safe + "\n")
            progress.read(safe)

        done = shell.stream(argv, keep, env=environment, check=False)
    if done.code != 0:
        last = hide_credentials(done.out)
        raise HostError(
            f"building {what} failed:\n{last}",
            hint=f"less {log}; where packages come from: LAB_APT_MIRROR, LAB_PIP_INDEX_URL, LAB_PIP_FIND_LINKS, "
            "LAB_CA_CERTIFICATES, HTTPS_PROXY",
        )


def hide_credentials(line: str) -> str:
    """A line without the user and password of any URL in it."""
    return re.sub(r"(\w://)[^\s/]*@", r"\1[REDACTED]@", line)


class Progress:
    """Reports BuildKit's plain progress as one line when a step starts and one when it is done."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._names: dict[str, str] = {}
        self._working: set[str] = set()

    def read(self, line: str) -> None:
        match = re.match(r"#(\d+) (.*)", line)
        if match is None:
            return
        number, text = match.groups()
        if named := re.match(r"\[(?!internal|context)([^\]]+)\]|(exporting)", text):
            self._names.setdefault(number, named[1] or named[2])
        elif number in self._names:
            self._report(number, text)

    def _report(self, number: str, text: str) -> None:
        name = self._names[number]
        if ended := re.match(r"DONE (\S+?)s|(CACHED)", text):
            self._emit(f"  {name}: {'cached' if ended[2] else f'{ended[1]} s'}")
        elif number not in self._working:
            self._working.add(number)
            self._emit(f"  {name} ...")
