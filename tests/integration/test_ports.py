"""Published ports of the launcher, on loopback unless another address is requested."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from support.harness import Lab, free_port

pytestmark = [pytest.mark.docker]

SERVE = "cd /tmp && echo hello > word && (python3 -m http.server 8000 >/dev/null 2>&1 &)"


def fetched(url: str) -> str:
    """Return the text at a URL; retry while the server does not listen; raise after a minute."""
    limit = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > limit:
                raise


def test_a_server_in_the_launcher_answers_on_loopback(fresh_lab: Callable[..., Lab]) -> None:
    """LAB_PORTS publishes the launcher's port on 127.0.0.1 alone."""
    port = free_port()
    lab = fresh_lab(LAB_PORTS=f"{port}:8000")
    lab.call("up").expect(0)
    lab.inside("launcher", "sh", "-c", SERVE)
    assert fetched(f"http://127.0.0.1:{port}/word") == "hello\n"
    published = lab.containers()["launcher"].attrs["HostConfig"]["PortBindings"]
    assert published == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
    lab.call("down").expect(0)
