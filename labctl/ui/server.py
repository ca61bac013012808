"""Serves a lab's pages on 127.0.0.1 until Ctrl-C."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Callable, Iterable

from labctl.config.context import Context
from labctl.errors import HostError
from labctl.runs.opening import named_settings
from labctl.ui import app
from labctl.ui.site import Site

LOOPBACK = "127.0.0.1"
PORTS = range(8765, 8865)
"""Ports of which the first free one is taken if none is named."""
CLOSING = 1
"""Seconds in which pages that are open may end their requests."""


def serve(context: Context, port: int | None, show: Callable[[str], None]) -> None:
    """Serve the pages until Ctrl-C, which raises KeyboardInterrupt; ``show`` gets their address.

    HostError if no port is free; ConfigError if the directory is no lab.
    """
    import anyio
    import uvicorn

    class Server(uvicorn.Server):
        """A server that does nothing while nobody asks: uvicorn's own wakes up ten times a second."""

        async def main_loop(self) -> None:
            """Wait for a signal to end."""
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    self.handle_exit(number, None)
                    return

    lab = named_settings(context).text("LAB_NAME")
    site = Site(context=context, lab=lab, token=secrets.token_urlsafe(24))
    listener = listening((port,) if port else PORTS)
    config = uvicorn.Config(
        app.application(site),
        lifespan="off",
        log_config=None,
        access_log=False,
        date_header=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING,
    )
    with listener:
        show(f"http://{LOOPBACK}:{listener.getsockname()[1]}{site.root}/")
        Server(config).run([listener])


def listening(ports: Iterable[int]) -> socket.socket:
    """Return a socket that listens on the first free port of 127.0.0.1. HostError if none is free."""
    refused = ""
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError as error:
            listener.close()
            refused = refused or f"port {port} of {LOOPBACK}: {error.strerror}"
        else:
            return listener
    raise HostError(f"cannot listen on {refused}", hint="labctl ui --port PORT")
