"""Cost of the server while nobody looks, and its end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.harness import wait_until
from support.pages import Served, serving

from page.conftest import NewLab, Open
from page.records import write_many

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.page, pytest.mark.docker]

QUIET = 4
"""Seconds without any work: every loop of the server has turned meanwhile."""


@pytest.fixture(scope="module")
def served(new_lab: NewLab) -> Iterator[Served]:
    """Serve the pages of a lab with a hundred records."""
    lab = new_lab({})
    write_many(lab.path, 100)
    with serving(lab) as pages:
        yield pages


def becomes_quiet(served: Served, limit: float) -> bool:
    """Tell if the server comes to use no CPU for QUIET seconds, not even a clock tick, within so many."""
    deadline = time.monotonic() + limit
    since, used = time.monotonic(), served.cpu_seconds()
    while time.monotonic() < deadline and time.monotonic() < since + QUIET:
        time.sleep(0.2)
        if served.cpu_seconds() != used:
            since, used = time.monotonic(), served.cpu_seconds()
    return time.monotonic() >= since + QUIET


def test_a_server_at_which_nobody_looks_does_nothing(served: Served) -> None:
    assert becomes_quiet(served, 30)
    assert served.threads() == 1


def test_a_server_does_nothing_once_all_pages_are_closed(served: Served, open_page: Open) -> None:
    """A page's events end with it, and so do the looks at the records."""
    pages = [open_page(served.root + "/").page for _ in range(2)]
    run = open_page(f"{served.root}/run/latest").page
    run.wait_for_timeout(3000)
    for page in (*pages, run):
        page.close()
    assert becomes_quiet(served, 40)


@pytest.mark.parametrize("path", ["/", "/cluster"])
def test_a_page_in_a_tab_behind_opens_its_events_once_it_is_seen(served: Served, open_page: Open, path: str) -> None:
    """A browser opens few connections to a server, and for those of the cluster the server asks the hosts."""
    hidden = "window.isHidden = true; Object.defineProperty(document, 'hidden', {get: () => window.isHidden})"
    page = open_page("about:blank", script=hidden).page
    streams: list[str] = []
    page.on("request", lambda request: streams.append(request.url) if "/events" in request.url else None)
    page.goto(served.root + path)
    page.wait_for_timeout(1000)
    assert streams == []
    page.evaluate("() => { window.isHidden = false; document.dispatchEvent(new Event('visibilitychange')); }")
    wait_until(lambda: page.wait_for_timeout(20) or streams, 60, "its events are asked for")
    page.wait_for_timeout(500)
    assert len(streams) == 1


def test_ctrl_c_ends_it_at_once_while_pages_are_open(served: Served, browser: Browser) -> None:
    """Their events break off; nothing but the word that it has stopped is printed."""
    with contextlib.closing(browser.new_page()) as page, serving(served.lab) as pages:
        page.goto(pages.root + "/")
        page.get_by_role("row").nth(5).wait_for()
        page.wait_for_timeout(500)
        pages.running.process.send_signal(signal.SIGINT)
        answer = pages.running.answer(60)
        assert answer.err.splitlines()[-2:] == ["press Ctrl-C to stop", "stopped"]


def test_a_page_of_the_cluster_goes_on_saying_that_its_server_has_ended(served: Served, browser: Browser) -> None:
    """Half a minute later, too: no host is late then."""
    with contextlib.closing(browser.new_page()) as page:
        page.clock.install()
        with serving(served.lab) as pages:
            page.goto(pages.root + "/cluster")
            page.get_by_text("next update after").wait_for()
        gone = page.get_by_text("Not connected. Is `labctl ui` still running?")
        gone.wait_for()
        page.clock.run_for(30_000)
        assert gone.is_visible()
