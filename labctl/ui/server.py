"""Serves a lab's pages on 127.0.0.1 until Ctrl-C."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from labctl.config.context import Context
from labctl.errors import HostError
from labctl.runs.opening import named_settings
from labctl.ui import app
from labctl.ui.site import Site

if TYPE_CHECKING:
    from uvicorn import Config, Server

LOOPBACK = "127.0.0.1"
PORTS = range(8765, 8865)
"""Ports of which the first free one is taken if none is named."""
TOKEN_BYTES = 24
OPTIONS: Mapping[str, Any] = {
    # Not what else may be installed: one parser of requests, and no WebSockets.
    "http": "h11",
    "ws": "none",
    "lifespan": "off",
    "proxy_headers": False,
    "log_config": None,
    # Warnings are of what others send.
    "log_level": "error",
    "access_log": False,
    "date_header": False,
    "server_header": False,
    # Seconds in which requests may end.
    "timeout_graceful_shutdown": 1,
}
"""Options of uvicorn."""


def new_site(context: Context) -> Site:
    """Return the pages of the lab in a directory, with a new token. ConfigError if it is no lab."""
    return Site(context=context, lab=named_settings(context).text("LAB_NAME"), token=secrets.token_urlsafe(TOKEN_BYTES))


def serve(site: Site, listener: socket.socket) -> None:
    """Serve pages on a socket until Ctrl-C, SIGTERM or the end of the terminal, and raise KeyboardInterrupt."""
    import uvicorn

    _server(uvicorn.Config(app.application(site), **OPTIONS)).run([listener])


def _server(config: Config) -> Server:
    """Return a server that does nothing while nobody asks: uvicorn's own wakes up ten times a second."""
    import uvicorn

    class IdleServer(uvicorn.Server):
        """A server whose main loop waits for a signal."""

        async def main_loop(self) -> None:
            """Wait for a signal to end; hang up on pages then, whose events never end."""
            await _ending_signal()
            # By any other the process would end at once, and leave its files in /tmp.
            self.handle_exit(signal.SIGINT, None)
            # Requests that break off now are no errors.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            for connection in list(self.server_state.connections):
                connection.transport.close()

    return IdleServer(config)


async def _ending_signal() -> None:
    """Wait for Ctrl-C, SIGTERM, or the end of the terminal unless that is ignored, as by nohup."""
    import anyio

    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    with anyio.open_signal_receiver(*ends) as signals:
        async for _ in signals:
            return


def listen(port: int | None) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1, by default the first free one. HostError if none is."""
    refused = ""
    for each in (port,) if port else PORTS:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, each))
            listener.listen()
        except OSError as error:
            listener.close()
            refused = refused or f"port {each} of {LOOPBACK}: {error.strerror}"
        else:
            return listener
    raise HostError(f"cannot listen on {refused}", hint="labctl ui --port PORT")
