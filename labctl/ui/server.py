"""Serves a lab's pages on 127.0.0.1 until Ctrl-C."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from typing import TYPE_CHECKING

from labctl.config.context import Context
from labctl.errors import HostError
from labctl.runs.opening import named_settings
from labctl.ui import app
from labctl.ui.site import Site

if TYPE_CHECKING:
    import anyio
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
PORTS = range(8765, 8865)
"""Ports of which the first free one is taken if none is named."""
TOKEN_BYTES = 24
CLOSING = 1
"""Seconds in which requests may end."""


def site_of(context: Context) -> Site:
    """Return the pages of the lab in a directory, with a new token. ConfigError if it is no lab."""
    return Site(context=context, lab=named_settings(context).text("LAB_NAME"), token=secrets.token_urlsafe(TOKEN_BYTES))


def serve(site: Site, listener: socket.socket) -> None:
    """Serve pages on a socket until SIGINT, which raises KeyboardInterrupt, or SIGTERM."""
    import anyio
    import uvicorn

    class Server(uvicorn.Server):
        """A server that does nothing while nobody asks: uvicorn's own wakes up ten times a second."""

        async def main_loop(self) -> None:
            """Wait for a signal to end; hang up on pages then, whose events never end."""
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    closing.set()
                    self.handle_exit(number, None)
                    break
            # Requests that break off now are no errors.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            for connection in list(self.server_state.connections):
                connection.transport.close()

    closing = anyio.Event()
    config = uvicorn.Config(
        until(closing, app.application(site)),
        # Not what else may be installed: one parser of requests, and no WebSockets.
        http="h11",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        # Warnings are of what others send.
        log_level="error",
        access_log=False,
        date_header=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING,
    )
    Server(config).run([listener])


def until(closing: anyio.Event, pages: ASGIApp) -> ASGIApp:
    """Return pages whose answers that last, as streams of events do, end with an event as if the browser had left."""
    import anyio

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and end the answer if that has not been done."""
        is_open = False

        async def leave(waiting: anyio.CancelScope) -> None:
            """Wait no longer for the browser when all end."""
            await closing.wait()
            waiting.cancel()

        async def receive_or_leave() -> Message:
            """Return the browser's next message, or that it has left."""
            message: Message = {"type": "http.disconnect"}
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave, tasks.cancel_scope)
                message = await receive()
                tasks.cancel_scope.cancel()
            return message

        async def noting(message: Message) -> None:
            """Send a part of the answer."""
            nonlocal is_open
            is_open = message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        await pages(scope, receive_or_leave, noting)
        if is_open:
            await send({"type": "http.response.body"})

    return application


def listening(port: int | None) -> socket.socket:
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
