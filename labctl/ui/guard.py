"""Access control of the pages: requests need the token, and none may come from another origin."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
"""Accepted Host header, with any port as ssh tunnels have others; another name is DNS rebinding."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self'"
        " data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    # The token is part of each address.
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of each response that does not set them itself."""


class Refusal(Struct, frozen=True):
    """Status and text of a refused request."""

    status: int
    text: str


class Guard:
    """ASGI application that passes requests below ``/TOKEN`` on to another, which it puts there, and refuses others."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        refusal = refused(scope, self._token)
        if refusal:
            await _answer(refusal, send)
            return
        await self._app({**scope, "root_path": f"/{self._token}"}, receive, _with_headers(send))


def refused(scope: Scope, token: str) -> Refusal | None:
    """Return why a request is refused; None if it is not."""
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
        return Refusal(403, "Unknown host. Open the address that `labctl ui` printed.\n")
    first = scope["path"].partition("/")[2].partition("/")[0]
    if not secrets.compare_digest(first.encode(), token.encode()):
        return Refusal(403, "Wrong token. Open the address that `labctl ui` printed.\n")
    if _is_of_other_page(scope, hosts[0]):
        return Refusal(403, "Requests from other sites are refused.\n")
    return None


def _is_of_other_page(scope: Scope, host: str) -> bool:
    """Return True if a page of another origin may have sent a request; following a link from there is allowed."""
    origins = _values(scope, b"origin")
    if origins or scope["method"] not in ("GET", "HEAD"):
        return origins != [f"http://{host}"]
    # Scripts, pictures, frames and the like of another page come without an origin, but browsers name their kind.
    is_within = set(_values(scope, b"sec-fetch-site")) <= {"same-origin", "none"}
    return not is_within and _values(scope, b"sec-fetch-dest") != ["document"]


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return the values of a header, by its name in lower case."""
    return [value.decode("latin-1") for header, value in scope["headers"] if header == name]


async def _answer(refusal: Refusal, send: Send) -> None:
    """Send a refusal as plain text."""
    headers = _raw({**HEADERS, "content-type": "text/plain; charset=utf-8"}.items())
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.text.encode()})


def _with_headers(send: Send) -> Send:
    """Return a ``send`` that adds HEADERS to a response, except those that it sets itself."""

    async def sending(message: Message) -> None:
        """Send a message of a response."""
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            added = _raw((name, value) for name, value in HEADERS.items() if name.encode() not in own)
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


def _raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
