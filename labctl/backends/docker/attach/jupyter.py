"""Serve notebooks from a node: a loopback port of this machine is relayed to a Unix socket, so websockets pass, too."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from labctl.backends.docker.attach import session
from labctl.backends.spec import KEPT
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.naming import NOTEBOOKS
from labctl.system.files import make_private

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16


class Relay(socketserver.ThreadingTCPServer):
    """Server that listens at once, and relays connections to a Unix socket while it serves."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, target: Path) -> None:
        self.target = target
        super().__init__((LOOPBACK, port), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        """Relay a connection in both directions until both ends are closed."""
        with contextlib.suppress(OSError), connected(self.server.target) as inner:
            back = threading.Thread(target=pump, args=(inner, self.request), daemon=True)
            back.start()
            pump(self.request, inner)
            back.join()


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy bytes until the source ends its output, then end the sink's input."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Yield a connection to a Unix socket whose path may be long. OSError if it or its directory is a link.

    Containers write there, and a link could lead to the engine's own socket.
    """
    with contextlib.ExitStack() as opened:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, folder)
        entry = os.open(path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
        opened.callback(os.close, entry)
        made = opened.enter_context(socket.socket(socket.AF_UNIX))
        # The descriptor of a link is no socket, so it is refused.
        made.connect(f"/proc/self/fd/{entry}")
        yield made


def answers(path: Path) -> bool:
    """Return True if a program listens on a Unix socket, False on any OSError."""
    try:
        with connected(path):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def relaying(ports: range, target: Path) -> Iterator[int]:
    """Relay the first free port to a Unix socket during the block; provide the port. HostError if none is free."""
    for port in ports:
        try:
            relay = Relay(port, target)
            break
        except OSError as error:
            refused = error.strerror
    else:
        tried = f"port {ports[0]}" if len(ports) == 1 else f"any port from {ports[0]} to {ports[-1]}"
        raise HostError(f"cannot listen on {tried} of {LOOPBACK}: {refused}", hint="labctl jupyter --port PORT")
    with relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        try:
            yield relay.server_address[1]
        finally:
            relay.shutdown()


PORTS = range(8888, 8988)
# Servers with their pages; the first in the image is used. The last has no page, but editors connect to it.
PAGES = {"jupyter-lab": "lab", "jupyter-notebook": "tree", "jupyter-server": ""}
# Beginnings of lines of the server's log that are shown at once: errors and critical ones.
LOUD = ("[E ", "[C ")
# Number of other lines that are shown when the server fails.
LAST = 20


def serve(
    context: Context, inside: session.ExecTarget, node: str, port: int | None, tell: Callable[[str], None]
) -> None:
    """Run a notebook server in a node to its end; ``tell`` gets its URL. HostError on failure, ConfigError if up.

    HostError if the image has no notebook server, no port is free or the server fails; ConfigError if this node has one
    already.
    """
    server = find(inside, node)
    project = context.settings().text("PROJECT_PATH")
    make_private(context.directory / NOTEBOOKS)
    path = free_socket(context.directory, node)
    token = secrets.token_urlsafe(24)
    urls: list[str] = []
    last: deque[str] = deque(maxlen=LAST)
    context.notice(
        f"{server} on {node}: files in {NOTEBOOKS} and other mounted folders are kept; "
        f"files directly in {project} are lost with the container"
    )
    with relaying(range(port, port + 1) if port else PORTS, path) as chosen:

        def follow(line: str) -> None:
            """Keep a server's line for an error message, show it if LOUD; show the URL once it answers."""
            last.append(line.replace(token, "[REDACTED]"))
            if line.startswith(LOUD):
                context.line(last.pop())
            if not urls and answers(path):
                urls.append(f"http://{LOOPBACK}:{chosen}/{PAGES[server]}?token={token}")
                context.notice("open this URL; Ctrl-C stops the server:")
                tell(urls[0])

        argv = (server, *arguments(path, project, inside.directory))
        try:
            code = session.run(inside, argv, on_line=follow, secret_env={"JUPYTER_TOKEN": token})
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    if code:
        log = "".join(f"\n{line}" for line in last)
        raise HostError(f"{server} on {node} exited with code {code}{log}", node=node)


def find(inside: session.ExecTarget, node: str) -> str:
    """Return the name of the first notebook server of PAGES in a node's image. HostError if there is none."""
    look = ("sh", "-c", 'for name; do command -v "$name" && exit; done', "sh", *PAGES)
    output = inside.engine.exec(inside.container, look, user=inside.user).out
    if not output:
        raise HostError(
            f"the image of {node} has no Jupyter",
            hint="`labctl build` makes labctl's image, which has it; one of your own needs jupyterlab and ipykernel",
            node=node,
        )
    return Path(output.strip()).name


def free_socket(directory: Path, node: str) -> Path:
    """Return the path of a node's notebook socket; remove a dead one. ConfigError if a server listens there."""
    path = directory / KEPT / f"jupyter-{node}.sock"
    if answers(path):
        raise ConfigError(
            f"{node} has a notebook server already",
            hint="open its URL, or stop it where it was started",
            node=node,
        )
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(f"cannot remove {path}: {error.strerror}", hint=f"ls -ld {path}", node=node) from error
    return path


def arguments(path: Path, project: str, here: str | None) -> tuple[str, ...]:
    """Return the notebook server's options: its socket, its root, the project, and the directory opened first."""
    return (
        "--no-browser",
        # The lab's user has the uid of labctl's caller, which may be 0.
        "--allow-root",
        f"--ServerApp.sock=/home/lab/.kept/{path.name}",
        "--ServerApp.sock_mode=0600",
        f"--ServerApp.root_dir={project}",
        f"--FileContentsManager.preferred_dir={here or f'{project}/{NOTEBOOKS}'}",
    )


def run(context: Context, settings: Settings, node: str, port: int | None, emit_url: Callable[[str], None]) -> None:
    """Serve notebooks from a node on this machine until interrupted. ConfigError if LAB_HOSTS is set."""
    from labctl.backends.docker.attach import target

    if settings.text("LAB_HOSTS"):
        hint = f"labctl exec -n {node} -- jupyter lab, and `ssh -L` to its port"
        raise ConfigError("labctl jupyter serves from nodes on this machine, and LAB_HOSTS lists others", hint=hint)
    with target.entered(context, settings.text("LAB_NAME"), node) as inside:
        serve(context, inside, node, port, emit_url)
