"""A headless Chromium, and pages in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from support.harness import Lab
from support.pages import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Open = Callable[..., Watched]
NewLab = Callable[[dict[str, str]], Lab]
NAMES = "MAP *.test 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
"""Names as chromium resolves them: none leads to another machine."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Yield the chromium of PATH."""
    # The driver comes with `make test-page` alone, and other tests collect these files, too.
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "chromium is not on PATH: make test-page"
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=[f"--host-resolver-rules={NAMES}"])
        with contextlib.closing(chromium):
            yield chromium


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Yield a function that opens an address in a new page; at the end, nothing may have gone wrong in any."""
    opened: list[Watched] = []

    def open_(address: str, *, missing: bool = False, script: str = "", **options: object) -> Watched:
        """Open an address, at which there may be no page if ``missing``, in a new window with these options.

        The script runs in each page of it before those of the page.
        """
        made = Watched(browser.new_context(**options).new_page(), missing)
        opened.append(made)
        made.page.add_init_script(script)
        made.page.goto(address)
        return made

    yield open_
    for each in opened:
        each.page.context.close()
    assert [problem for each in opened for problem in each.problems] == []
