"""``labctl jupyter``: a notebook server in a node, on a Unix socket that only this person can reach, and a relay to it.

Nothing listens on the lab's network. The token is in no argument and no file of the host: the server has it in its
environment.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path

from labctl import attach, relay, shell
from labctl.context import Context
from labctl.errors import ConfigError, HostError
from labctl.files import make_private
from labctl.lab import KEPT

PORTS = range(8888, 8988)
# The first that the image has, and its page; the last has none, but editors connect to it.
PAGES = {"jupyter-lab": "lab", "jupyter-notebook": "tree", "jupyter-server": ""}
NOTEBOOKS = "runs/notebooks"
# What begins a line of the server's log that a person should see as it comes: an error, or worse.
LOUD = ("[E ", "[C ")
# Of the rest, as many lines are shown when the server fails.
LAST = 20


def serve(context: Context, inside: attach.Inside, node: str, port: int | None, tell: Callable[[str], None]) -> None:
    """Serve notebooks until the person stops it (KeyboardInterrupt) or it is shut down; tells its URL once it answers.

    HostError when the image has no notebook server, no port is free or the server fails; ConfigError when this node
    has one already.
    """
    server = find(inside, node)
    project = context.settings().text("PROJECT_PATH")
    make_private(context.directory / NOTEBOOKS)
    path = free_socket(context.directory, node)
    token = secrets.token_urlsafe(24)
    told: list[str] = []
    last: deque[str] = deque(maxlen=LAST)
    context.notice(
        f"{server} on {node}: notebooks saved in {NOTEBOOKS} stay; "
        f"those beside the mounted folders, in {project} itself, go with the container"
    )
    with relay.relaying(range(port, port + 1) if port else PORTS, path) as chosen:

        def follow(line: str) -> None:
            last.append(line.replace(token, "[REDACTED]"))
            if line.startswith(LOUD):
                context.line(last.pop())
            if not told and relay.answers(path):
                told.append(f"http://{relay.LOOPBACK}:{chosen}/{PAGES[server]}?token={token}")
                context.notice("Ctrl-C ends it; open this:")
                tell(told[0])

        argv = (server, *arguments(path, project, inside.directory))
        try:
            code = attach.follow(inside, argv, follow, hidden={"JUPYTER_TOKEN": token})
        finally:
            path.unlink(missing_ok=True)
    if code:
        words = "".join(f"\n{line}" for line in last)
        raise HostError(f"{server} on {node} ended with code {code}{words}", node=node)


def find(inside: attach.Inside, node: str) -> str:
    """The notebook server that the image has."""
    look = ("sh", "-c", 'for name; do command -v "$name" && exit; done', "sh", *PAGES)
    found = shell.run((*attach.execute_in(inside), *look), check=False).out
    if not found:
        raise HostError(
            f"the image of {node} has no Jupyter",
            hint="`labctl build` makes labctl's image, which has it; one of your own needs jupyterlab and ipykernel",
            node=node,
        )
    return Path(found.strip()).name


def free_socket(directory: Path, node: str) -> Path:
    """Where the server of this node is to listen; what a killed one left there is removed."""
    path = directory / KEPT / f"jupyter-{node}.sock"
    if relay.answers(path):
        raise ConfigError(
            f"{node} has a notebook server already", hint="use its page, or end it where it was started", node=node
        )
    path.unlink(missing_ok=True)
    return path


def arguments(path: Path, project: str, here: str | None) -> tuple[str, ...]:
    """The server shows all that is mounted, and opens where the person stands or where notebooks are kept."""
    return (
        "--no-browser",
        # The lab's user has the uid of the person who called labctl, which may be 0.
        "--allow-root",
        f"--ServerApp.sock=/home/lab/.kept/{path.name}",
        "--ServerApp.sock_mode=0600",
        f"--ServerApp.root_dir={project}",
        f"--FileContentsManager.preferred_dir={here or f'{project}/{NOTEBOOKS}'}",
    )
