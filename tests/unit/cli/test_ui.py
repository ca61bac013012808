"""`labctl ui`: what it prints, and where it ends."""

from __future__ import annotations

import stat
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.commandline import Labctl

from labctl.cli import browser


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the server end at once, as by Ctrl-C, and note the root of each site."""
    roots: list[str] = []

    def serve(site: Any, _: object) -> None:
        roots.append(site.root)
        raise KeyboardInterrupt

    monkeypatch.setattr("labctl.ui.server.serve", serve)
    return roots


def test_the_address_is_the_answer_and_the_tunnel_stands_beside_it(
    labctl: Labctl, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 51000 10.0.0.5 22")
    answer = labctl("ui")
    port = answer.out.partition("127.0.0.1:")[2].partition("/")[0]
    assert answer.out == f"http://127.0.0.1:{port}{served[0]}/\n"
    assert f"-L {port}:127.0.0.1:{port} " in answer.err
    assert "@10.0.0.5\n" in answer.err
    assert answer.err.endswith("stopped\n")
    assert answer.code == 130


def test_each_start_has_a_token_of_its_own(labctl: Labctl, served: list[str]) -> None:
    labctl("ui")
    labctl("ui")
    first, second = served
    assert first != second
    assert min(map(len, served)) > 30


def test_a_directory_without_a_lab_has_no_pages(labctl: Labctl, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = labctl("ui", "-C", str(empty))
    assert answer.code == 2
    assert "is not a lab directory" in answer.err


def test_a_browser_gets_the_address_by_a_file_that_only_its_user_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    address, pages = "http://127.0.0.1:8765/secret/", []

    def open_(url: str) -> bool:
        pages.append(Path(urllib.request.url2pathname(url.removeprefix("file://"))))
        assert address in pages[0].read_text()
        assert stat.S_IMODE(pages[0].parent.stat().st_mode) == 0o700
        return "secret" not in url

    monkeypatch.setattr("webbrowser.open", open_)
    with browser.opened_address(address, {"DISPLAY": ":0"}) as is_open:
        assert is_open
    assert not pages[0].exists()


def test_no_browser_is_tried_without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser was opened"))
    with browser.opened_address("http://127.0.0.1:8765/secret/", {}) as is_open:
        assert not is_open
