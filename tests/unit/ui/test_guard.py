"""The guard of the pages under attack: what reaches the pages, and what does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from labctl.ui.guard import Guard

# As secrets.token_urlsafe makes one.
TOKEN = "q7Hn3vXlT0aYw5-cKd_9RbEzUuPjM2sG"  # noqa: S105
HOST = "127.0.0.1:8765"
OWN = f"http://{HOST}"
Headers = Iterable[tuple[str, str]]


class Pages:
    """ASGI application behind a guard, which answers "pages" to all that reaches it."""

    def __init__(self, headers: Headers = ()) -> None:
        self._headers = [(name.encode(), value.encode()) for name, value in headers]

    async def __call__(self, _: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": b"pages"})


class Answer:
    """Messages of an answer."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(name.decode(), value.decode()) for name, value in self.messages[0]["headers"]]

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


def asked(
    path: str = f"/{TOKEN}/",
    *headers: tuple[str, str],
    method: str = "GET",
    host: str | None = HOST,
    pages: Any = None,
    **scope: Any,
) -> Answer:
    """Ask the guard for a path with these headers, and a Host header unless it is None."""
    messages: list[dict[str, Any]] = []
    sent = [*headers, *([("host", host)] if host is not None else [])]
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent]
    whole = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": raw, **scope}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    async def call() -> None:
        await Guard(pages or Pages(), TOKEN)(whole, receive, send)

    anyio.run(call)
    return Answer(messages)


def refused(answer: Answer, why: str) -> None:
    """Check that an answer is a refusal for this reason, which gives the token to nobody."""
    assert answer.status == 403
    assert answer.text != "pages"
    assert why in answer.text
    assert TOKEN not in answer.text + str(answer.headers)


def test_pages_are_below_the_token() -> None:
    pages: Any = Starlette(routes=[Route("/run/{run}", lambda request: PlainTextResponse(request.path_params["run"]))])
    assert asked(f"/{TOKEN}/run/x", pages=pages).text == "x"
    assert asked("/run/x", pages=pages).status == 403
    assert asked(f"/{TOKEN}/{TOKEN}/run/x", pages=pages).status == 404


def test_an_address_with_a_slash_too_many_leads_to_that_without_and_keeps_the_token() -> None:
    pages: Any = Starlette(routes=[Route("/run/{run}", lambda _: PlainTextResponse()), Route("/", lambda _: None)])
    assert ("location", f"{OWN}/{TOKEN}/run/x") in asked(f"/{TOKEN}/run/x/", pages=pages).headers
    assert ("location", f"{OWN}/{TOKEN}/") in asked(f"/{TOKEN}", pages=pages).headers


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8765", "localhost", "localhost:8765", "localhost:1"])
def test_a_tunnel_may_end_at_any_port(host: str) -> None:
    assert asked(host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.com",
        "evil.com:8765",
        "127.0.0.1.evil.com",
        "127.0.0.1.evil.com:8765",
        "localhost.evil.com",
        "localhost.:8765",
        "127.0.0.1@evil.com",
        "evil.com@127.0.0.1",
        "user:word@127.0.0.1:8765",
        "evil.com#127.0.0.1",
        "evil.com/127.0.0.1",
        "127.0.0.1:8765, evil.com",
        "127.0.0.1:8765 evil.com",
        "127.0.0.1:8765:80",
        "127.0.0.1:",
        "127.0.0.1:port",
        "127.0.0.1:8765\n",
        "127x0x0x1",
        "127.0.0.2",
        "0.0.0.0:8765",
        "2130706433",
        "[::1]:8765",
        "127.0.0.\u0661",
    ],
)
def test_a_name_that_was_bound_to_this_machine_gets_nothing(host: str | None) -> None:
    value = host.encode().decode("latin-1") if host is not None else None
    refused(asked(host=value), "Unknown host.")


def test_two_hosts_are_none() -> None:
    refused(asked(f"/{TOKEN}/", ("host", "evil.com")), "Unknown host.")
    refused(asked(f"/{TOKEN}/", ("host", HOST)), "Unknown host.")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "*",
        "/",
        "//",
        "///",
        f"//{TOKEN}/",
        f"/./{TOKEN}/",
        f"/x/../{TOKEN}/",
        f"/static/../{TOKEN}/",
        "/static/runs.js",
        "/runs.json",
        "/column.json",
        "/names.json",
        f"/?{TOKEN}",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}x/",
        f"/{TOKEN} /",
        f"/{TOKEN}\0/",
        f"/{TOKEN}\\",
        f"/{TOKEN}%2f",
        f"/{TOKEN.upper()}/",
        f"/{TOKEN[::-1]}/",
        f"http://{HOST}/{TOKEN}/",
        "/\u00e9/",
        "/\ufffd/",
        "/" + "a" * 60_000,
    ],
)
def test_nothing_is_served_without_the_token_at_its_place(path: str) -> None:
    refused(asked(path), "Wrong token.")


def test_a_token_elsewhere_in_a_request_counts_for_nothing() -> None:
    headers = [("cookie", TOKEN), ("authorization", f"Bearer {TOKEN}"), ("referer", f"{OWN}/{TOKEN}/")]
    refused(asked("/", *headers, query_string=f"token={TOKEN}".encode()), "Wrong token.")
    refused(asked("/runs.json", *headers, root_path=f"/{TOKEN}"), "Wrong token.")


ORIGINS = [
    "null",
    "",
    "http://evil.com",
    "http://127.0.0.1",
    "http://127.0.0.1:8766",
    "http://localhost:8765",
    "https://127.0.0.1:8765",
    "http://127.0.0.1:8765.evil.com",
    "http://127.0.0.1:8765/",
    "HTTP://127.0.0.1:8765",
    "http://evil.com http://127.0.0.1:8765",
    "chrome-extension://abc",
]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_of_another_origin_gets_nothing_even_with_the_token(origin: str, method: str) -> None:
    refused(asked(f"/{TOKEN}/", ("origin", origin), method=method), "Requests from other sites are refused.")


def test_two_origins_are_none() -> None:
    sent = (("origin", OWN), ("origin", "http://evil.com"))
    refused(asked(f"/{TOKEN}/run/x/stop", *sent, method="POST"), "Requests from other sites")
    refused(asked(f"/{TOKEN}/run/x/stop", *reversed(sent), method="POST"), "Requests from other sites")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "post", "get", ""])
def test_a_write_without_an_origin_is_refused(method: str) -> None:
    path = f"/{TOKEN}/run/x/stop"
    refused(asked(path, method=method), "Requests from other sites are refused.")
    refused(asked(path, ("sec-fetch-site", "same-origin"), method=method), "Requests from other sites are refused.")


def test_the_own_pages_may_read_and_write() -> None:
    path = f"/{TOKEN}/run/x/stop"
    assert asked(path, ("origin", OWN), method="POST").text == "pages"
    assert asked(path, ("origin", "http://localhost:9000"), method="POST", host="localhost:9000").status == 200
    assert asked(path, ("sec-fetch-site", "same-origin"), ("sec-fetch-dest", "empty")).status == 200
    assert asked(path, ("sec-fetch-site", "none"), ("sec-fetch-dest", "document")).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "new", ""])
@pytest.mark.parametrize("kind", ["script", "image", "style", "iframe", "object", "empty", "serviceworker", ""])
def test_scripts_pictures_and_frames_of_other_pages_get_nothing_even_with_the_token(site: str, kind: str) -> None:
    sent = (("sec-fetch-site", site), ("sec-fetch-dest", kind), ("sec-fetch-mode", "navigate"))
    refused(asked(f"/{TOKEN}/static/runs.js", *sent), "Requests from other sites are refused.")


def test_a_link_on_another_page_leads_to_the_pages() -> None:
    """A terminal in the browser makes a link of the printed address."""
    assert asked(f"/{TOKEN}/", ("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "document")).status == 200


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_a_connection_of_another_kind_gets_no_answer(kind: str) -> None:
    assert asked(f"/{TOKEN}/", ("origin", OWN), type=kind).messages == []


PROTECTION = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@pytest.mark.parametrize("path", [f"/{TOKEN}/", "/"])
def test_each_answer_tells_the_browser_to_run_nothing_else_and_to_frame_it_nowhere(path: str) -> None:
    headers = dict(asked(path).headers)
    assert headers.items() >= PROTECTION.items()
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not any(name.startswith("access-control") for name in headers)


def test_a_header_of_the_pages_stands_in_place_of_the_guards() -> None:
    answer = asked(pages=Pages([("Cache-Control", "max-age=3600"), ("Content-Security-Policy", "sandbox")]))
    names = [name.lower() for name, _ in answer.headers]
    assert len(names) == len(set(names))
    assert ("Content-Security-Policy", "sandbox") in answer.headers
