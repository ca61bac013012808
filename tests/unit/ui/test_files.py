"""Files of a record in the browser: only its own, and nothing in them runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support import records

from labctl.ui import files
from labctl.ui.watcher import Watchers

RUN = "20260102-030405-opt-tiny-0000aa"
FILES = f"/token/run/{RUN}/files"
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Write a run's record, and a secret beside it; return its folder."""
    (tmp_path / "secret").write_text("hidden words")
    return records.write(tmp_path, RUN, log="one\ntwo\n")


def test_a_text_is_read_in_the_browser_whatever_it_is_called(client: TestClient, record: Path) -> None:
    (record / "page.html").write_text(SCRIPT)
    for name, text in (("output.log", "one\ntwo\n"), ("work/train.py", "print()"), ("page.html", SCRIPT)):
        answer = client.get(f"{FILES}/{name}")
        assert (answer.text, answer.headers["content-type"]) == (text, "text/plain; charset=utf-8")
        assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_is_no_text_is_saved(client: TestClient, record: Path) -> None:
    """By the name that it has; a picture is shown only if it is one."""
    (record / 'a"b;c.bin').write_bytes(b"\0\1")
    (record / "false.png").write_bytes(b"GIF89a\xff\0")
    (record / "picture.png").write_bytes(files.PNG + b"\0")
    saved = client.get(f"{FILES}/a%22b%3Bc.bin")
    assert saved.headers["content-disposition"] == "attachment; filename*=UTF-8''a%22b%3Bc.bin"
    assert saved.headers["content-type"] == "application/octet-stream"
    assert client.get(f"{FILES}/false.png").headers["content-type"] == "application/octet-stream"
    assert client.get(f"{FILES}/picture.png").headers["content-type"] == "image/png"


def test_a_text_that_is_cut_within_a_character_is_a_text() -> None:
    for length in (files.SNIFFED - 1, files.SNIFFED, files.SNIFFED + 1):
        start = ("ä" * files.SNIFFED).encode()[:length][: files.SNIFFED]
        assert files.media_type("x", b"x" + start[: files.SNIFFED - 1]).startswith("text/plain")
    assert files.media_type("x", b"\xe4" * 100) == "application/octet-stream"


@pytest.mark.parametrize(
    "path",
    [
        "%2e%2e/%2e%2e/secret",
        "..%2f..%2fsecret",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "link",
        "folder-link/secret",
        "pipe",
        "none",
        "output.log/x",
        "output.log/",
        "work//train.py",
        "a%00b",
    ],
)
def test_nothing_else_is_served(client: TestClient, record: Path, path: str) -> None:
    """Neither what is elsewhere, nor behind a link, nor what is no file."""
    (record / "link").symlink_to("../../secret")
    (record / "folder-link").symlink_to("../..")
    os.mkfifo(record / "pipe")
    answer = client.get(f"{FILES}/{path}")
    assert answer.status_code == 404
    assert "hidden" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "parts", [("..", "secret"), ("work", "..", "..", "secret"), (".", "x"), ("a\0b",), ("link", "secret")]
)
def test_no_part_of_a_path_leads_out(record: Path, parts: tuple[str, ...]) -> None:
    (record / "link").symlink_to("..")
    (record / "x").write_text("")
    with pytest.raises(OSError, match=r"not below|Not a directory|symbolic"):
        files.open_file(record, parts)


def test_a_folder_is_listed_with_names_of_any_kind(client: TestClient, record: Path) -> None:
    """Folders first; links are named and lead nowhere."""
    (record / SCRIPT.replace("/", "")).write_text("")
    (record / "link").symlink_to("/etc/passwd")
    os.mkfifo(record / "pipe")
    Path(os.fsdecode(os.fsencode(record) + b"/\xff")).write_text("")
    page = client.get(f"{FILES}/").text
    assert "&lt;script&gt;" in page
    assert SCRIPT.replace("/", "") not in page
    assert 'href="/token/run/' + RUN + '/files/work/"' in page
    assert "link, not followed" in page
    assert "/files/link" not in page
    assert "/files/pipe" not in page
    assert page.index("work/") < page.index("job.json")
    inner = client.get(f"{FILES}/work/").text
    assert f'href="{FILES}/work/train.py"' in inner
    assert f'href="{FILES}/"' in inner


def test_a_folder_with_very_many_files_is_listed_in_part(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 2)
    entries, others = files.list_folder(record, ())
    assert ([entry.name for entry in entries], others) == (["work", "job.json"], len(list(record.iterdir())) - 2)


def test_the_log_of_a_run_that_a_page_follows_is_listed_and_read_where_it_grows(
    client: TestClient, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other files, and those of the same name below it, are those of the record."""
    (record / "output.log").write_text("")
    (record / "work/output.log").write_text("own")
    (tmp_path / "grows").mkdir()
    for name, text in (("output.log", "x" * 5000), ("0.csv", "samples"), ("job.json", "other")):
        (tmp_path / "grows" / name).write_text(text)
    monkeypatch.setattr(Watchers, "folder", lambda *_: tmp_path / "grows")
    listed = f'{FILES}/output.log">output.log</a></td><td class="number">4.883 KiB</td>'
    assert listed in client.get(f"{FILES}/").text
    assert listed in client.get(f"/token/run/{RUN}").text
    assert "0.csv" not in client.get(f"{FILES}/").text
    read = [client.get(f"{FILES}/{name}").text for name in ("output.log", "work/output.log", "job.json")]
    assert read == ["x" * 5000, "own", (record / "job.json").read_text()]


def test_a_run_whose_other_pages_have_just_closed_has_its_page(
    client: TestClient, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in which the run was followed is gone by then."""
    monkeypatch.setattr(Watchers, "folder", lambda *_: tmp_path / "gone")
    for path in (f"{FILES}/", f"/token/run/{RUN}"):
        assert f'{FILES}/output.log">output.log</a>' in client.get(path).text


def test_a_file_that_grows_is_sent_as_it_was(record: Path) -> None:
    (record / "growing").write_bytes(b"x" * 10)
    with (record / "growing").open("rb") as stream:
        assert b"".join(files._pieces(stream, 4)) == b"xxxx"
