"""Attacks on the pages: by pages of another origin, by another user of the machine, by what runs and records say."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.pages import Served, serving

from page.conftest import NewLab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.page, pytest.mark.docker]


@pytest.fixture(scope="module")
def served(new_lab: NewLab) -> Iterator[Served]:
    """Serve the pages of a lab that is not up."""
    with serving(new_lab({})) as pages:
        yield pages


ANOTHER_ORIGIN = """
async ([page, script, post]) => {
  const outcome = {};
  const tried = async (name, attempt) => {
    const limit = new Promise((resolve) => setTimeout(() => resolve("no answer"), 3000));
    try { outcome[name] = await Promise.race([attempt(), limit]); } catch (error) { outcome[name] = "refused"; }
  };
  const loaded = (element, parent = document.body) => new Promise((resolve) => {
    element.onload = () => resolve("loaded");
    element.onerror = () => resolve("refused");
    parent.append(element);
  });
  const made = (name, values) => Object.assign(document.createElement(name), values);
  await tried("fetch", async () => (await fetch(page)).text());
  await tried("fetch without reading", async () => (await fetch(page, {mode: "no-cors"})).text());
  await tried("post", async () => (await fetch(post, {method: "POST", mode: "no-cors", body: "{}"})).text());
  await tried("script", () => loaded(made("script", {src: script})));
  await tried("picture", () => loaded(made("img", {src: page})));
  await tried("style", () => loaded(made("link", {rel: "stylesheet", href: script}), document.head));
  await tried("events", () => new Promise((resolve) => {
    const events = new EventSource(page);
    events.onopen = () => resolve("open");
    events.onerror = () => resolve("refused");
  }));
  await tried("socket", () => new Promise((resolve) => {
    const socket = new WebSocket(page.replace("http:", "ws:"));
    socket.onopen = () => resolve("open");
    socket.onerror = () => resolve("refused");
  }));
  await tried("frame", async () => {
    const frame = made("iframe", {src: page});
    await loaded(frame);
    return frame.contentDocument ? "read" : "refused";
  });
  const form = made("form", {action: post, method: "POST", enctype: "text/plain", target: "of-form"});
  const of_form = made("iframe", {name: "of-form"});
  await loaded(of_form);
  document.body.append(form);
  await tried("form", () => new Promise((resolve) => {
    of_form.onload = () => resolve(of_form.contentDocument ? "read" : "refused");
    form.submit();
  }));
  return outcome;
}
"""
"""Requests that a page of another origin can try, with the outcome of each attempt."""
ATTEMPTS = 9
"""Attempts that are requests: a socket is none."""


@pytest.fixture
def other_page(tmp_path: Path) -> Iterator[str]:
    """Serve an empty page on another port of this machine; yield its address."""
    (tmp_path / "index.html").write_text("<!doctype html><title>Another page</title>")

    class Quiet(SimpleHTTPRequestHandler):
        """Server of files that prints nothing."""

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
        server.shutdown()


@pytest.mark.parametrize("knows", [False, True], ids=["without the token", "with the token"])
def test_a_page_of_another_origin_gets_nothing(served: Served, browser: Browser, other_page: str, knows: bool) -> None:
    """Whatever it tries, and even with the token, the server answers with refusals alone."""
    root = served.root if knows else f"{served.origin}/{'x' * len(served.token)}"
    asked: list[str] = []
    answers: list[tuple[str, int]] = []
    with contextlib.closing(browser.new_page()) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda response: answers.append((response.url, response.status)))
        page.goto(other_page)
        outcome = page.evaluate(ANOTHER_ORIGIN, [f"{root}/", f"{root}/static/runs.js", f"{root}/run/latest/stop"])
    assert outcome.pop("fetch without reading") in ("", "refused")
    assert outcome.pop("post") in ("", "refused")
    assert set(outcome.values()) == {"refused"}, outcome
    assert len([url for url in asked if url.startswith(served.origin)]) == ATTEMPTS
    # The browser itself hides the others.
    assert {status for url, status in answers if url.startswith(served.origin)} == {403}


@pytest.mark.parametrize("name", ["rebound.test", "127.0.0.1.test", "localhost.test"])
def test_a_name_bound_to_this_machine_gets_nothing(served: Served, browser: Browser, name: str) -> None:
    with contextlib.closing(browser.new_page()) as page:
        answer = page.goto(f"http://{name}:{served.port}/{served.token}/")
        assert answer
        assert (answer.status, answer.text()) == (403, "Unknown host. Open the address that `labctl ui` printed.\n")


def told(served: Served, request: bytes) -> bytes:
    """Send bytes to the server, and return all that it answers."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection, contextlib.suppress(OSError):
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


HOST_LINE = b"Host: 127.0.0.1:%d\r\n"
END = b"Connection: close\r\n\r\n"
HOSTILE = {
    "no host": (b"GET /%s/ HTTP/1.1\r\n" + END, b"400"),
    "no host, as of old": (b"GET /%s/ HTTP/1.0\r\n" + END, b"403"),
    "two hosts": (b"GET /%s/ HTTP/1.1\r\n" + HOST_LINE + b"Host: evil.com\r\n" + END, b"400"),
    "no path": (b"OPTIONS * HTTP/1.1\r\n" + HOST_LINE + END, b"403"),
    "a whole address": (b"GET http://127.0.0.1/%s/ HTTP/1.1\r\n" + HOST_LINE + END, b"403"),
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    "a header without end": (b"GET /%s/ HTTP/1.1\r\n" + HOST_LINE + b"A: " + b"a" * 200_000, b"400 or none"),
    "an address without end": (b"GET /%s/" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST_LINE + END, b"400 or none"),
    "two lengths": (
        b"POST /%s/ HTTP/1.1\r\n" + HOST_LINE + b"Content-Length: 1\r\nContent-Length: 2\r\n" + END,
        b"400",
    ),
    "a socket": (b"GET /%s/ HTTP/1.1\r\n" + HOST_LINE + b"Upgrade: websocket\r\nOrigin: null\r\n" + END, b"403"),
    "a second request": (b"GET /%s/ HTTP/1.1\r\n" + HOST_LINE + b"\r\nGET / HTTP/1.1\r\n" + HOST_LINE + END, b"403"),
}
"""Requests, and the status of the last answer: none if the server hangs up before it has read all."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_that_no_browser_sends_is_refused_in_silence(served: Served, name: str) -> None:
    request, status = HOSTILE[name]
    request = request.replace(b"%s", served.token.encode()).replace(b"%d", str(served.port).encode())
    answers = told(served, request).split(b"HTTP/1.1 ")
    assert (answers[-1][:3] or b"none") in status.split(), answers
    assert "press Ctrl-C to stop" in served.running.err.splitlines()[-1]


# --- another user of this machine ---

SEARCH = r"""
import os, sys
token = sys.stdin.readline().strip().encode()
seen = []
for process in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try:
            with open(f"/proc/{process}/{name}", "rb") as file:
                seen += [f"/proc/{process}/{name}"] if token in file.read() else []
        except OSError:
            pass
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path) and os.stat(path).st_size < 1 << 20:
                    with open(path, "rb") as file:
                        seen += [path] if token in file.read() else []
            except OSError:
                pass
print(*seen, sep="\n")
"""
"""Program that prints processes and files in which the token of its input stands, as far as its user may read them."""
NOBODY = 65534


def seen_by(user: int, token: str, folders: list[str]) -> list[str]:
    """Return the processes and files in which a user of this machine can read a token."""
    search = ["python3", "-I", "-c", SEARCH, *folders]
    found = subprocess.run(
        search, input=f"{token}\n", user=user, group=user, cwd="/", capture_output=True, text=True, check=True
    )
    return found.stdout.split()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for temporary files that every user can enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def opened(served: Served, folder: Path) -> Iterator[Served]:
    """Serve the pages with --open and a browser that stays."""
    browser = folder / "browser"
    browser.write_text("#!/bin/sh\nexec sleep 60\n")
    browser.chmod(0o755)
    environ = {**served.lab.environ, "BROWSER": f"{browser} %s &", "TMPDIR": str(folder)}
    with serving(replace(served.lab, environ=environ), "--open") as pages:
        yield pages


def test_the_token_stands_where_its_user_alone_reads(opened: Served, folder: Path) -> None:
    """Beside what `labctl ui` printed, it stands in a file for the browser, and in no program's arguments."""
    [printed, page] = map(Path, seen_by(os.geteuid(), opened.token, [str(opened.lab.path / "started"), str(folder)]))
    assert printed.parent == opened.lab.path / "started"
    assert page.name == "open.html"
    assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is one whom root becomes")
def test_another_user_of_the_machine_gets_nothing(opened: Served, folder: Path) -> None:
    assert seen_by(NOBODY, opened.token, [str(folder), str(opened.lab.path), "/run"]) == []
    ask = ["curl", "--silent", "--include", "--header", "Origin: " + opened.origin]
    for path in ("", "/", "/runs.json", "/static/runs.js", f"/{'x' * len(opened.token)}/", "/../", "//"):
        got = subprocess.run(
            [*ask, "--path-as-is", opened.origin + path], user=NOBODY, cwd="/", capture_output=True, check=True
        )
        assert b" 403 " in got.stdout.splitlines()[0]
        assert opened.token.encode() not in got.stdout
