"""Records that their runs wrote: nothing in one leads out of it, and no text in one becomes a script of the page."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import records
from support.pages import Served, serving

from page.conftest import NewLab, Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.page, pytest.mark.docker]

RUN, OTHER = "20260102-030405-opt-tiny-abcdef", "20260102-040506-opt-tiny-fedcba"
AWAY = "20260102-030405-away-0000aa"
"""Link in place of a record."""
SECRET = "open sesame"  # noqa: S105
MARK = "<img src=x onerror=window.hacked=1>"
EVIL = f"""'"></script></title></textarea><script>window.hacked=1</script>{MARK}"""
NAME = f'"{MARK}'
"""A text that would run a script where it is taken for HTML: in any place, or as the name of a file."""


@pytest.fixture(scope="module")
def served(new_lab: NewLab) -> Iterator[Served]:
    """Serve the pages of a lab with two records full of hostile texts, names and links."""
    lab = new_lab({})
    (lab.path / "secret.txt").write_text(SECRET)
    for run_id in (RUN, OTHER):
        hostile(lab.path, run_id)
    (lab.path / "runs" / AWAY).symlink_to("/etc")
    report = lab.path / "reports/20260102-050607"
    report.mkdir(parents=True)
    with_traps(report)
    with serving(lab) as pages:
        yield pages


def hostile(lab: Path, run_id: str) -> None:
    """Write a record that has hostile texts everywhere."""
    node = {"name": NAME, "slots": 1}
    record = records.write(
        lab,
        run_id,
        losses=(8.0, 7.0, 6.0),
        throughput=80.0,
        arguments=("--model", EVIL),
        settings={"LAB_NAME": EVIL, EVIL: EVIL},
        versions={"image": EVIL, EVIL: EVIL},
        log=f"{EVIL}\nstep 1/3 loss 8.0\n\x1b]0;{EVIL}\x07{EVIL}\n",
        request={"workload": EVIL, "options": {"settings": [EVIL]}},
        workload=EVIL,
        launcher=EVIL,
        verdict="FAIL",
        cause=EVIL,
        message=EVIL,
        notes={EVIL: EVIL},
        checks=[{"criterion": EVIL, "value": 1.0, "passed": False}],
        ranks=[{"rank": 0, "node": NAME}, {"rank": 1, "node": "worker-1"}],
    )
    changed(record / "result.json", metrics={"loss": {"first": 8.0, "last": 6.0}, EVIL: {"value": 3.0, "unit": EVIL}})
    changed(record / "job.json", workload=EVIL, launcher=EVIL, nodes=[node, {"name": "worker-1", "slots": 1}])
    points = [{"metric": EVIL, "step": step, "seconds": float(step), "value": step + 1.0} for step in range(3)]
    with (record / "metrics.jsonl").open("a") as series:
        series.writelines(json.dumps(point) + "\n" for point in points)
    (record / "output.times").write_text("1767323045.1 0\n1767323045.2 1\n1767323045.3 0\n")
    (record / "labctl-note.txt").write_text(EVIL)
    (record / "samples").mkdir()
    (record / f"samples/{NAME}.csv").write_text(f"seconds (s),CPU (cores),{MARK}\n1,0.5,1\n2,0.6,2\n3,0.7,3\n")
    changed(record / "result.json", lab=EVIL)
    with_traps(record)


def changed(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def with_traps(record: Path) -> None:
    """Add files with names, contents and kinds that a server may fall for."""
    (record / NAME).write_text(EVIL)
    (record / "page.html").write_text(f"<!doctype html>{EVIL}<script src='script.js'></script>")
    (record / "script.js").write_text("window.hacked = 1")
    (record / "picture.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked=1'/>")
    (record / "link").symlink_to("../../secret.txt")
    (record / "passwd").symlink_to("/etc/passwd")
    (record / "etc").symlink_to("/etc")
    (record / "runs").symlink_to("..")
    os.mkfifo(record / "pipe")


OUTSIDE = [
    "../../secret.txt",
    "..%2f..%2fsecret.txt",
    "%2e%2e/%2e%2e/secret.txt",
    "%2e%2e%2f%2e%2e%2fsecret.txt",
    "%252e%252e%252f%252e%252e%252fsecret.txt",
    "work/../../../secret.txt",
    "..\\..\\secret.txt",
    "..%5c..%5csecret.txt",
    "%c0%ae%c0%ae/%c0%ae%c0%ae/secret.txt",
    "..;/..;/secret.txt",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "file:///etc/passwd",
    "link",
    "link%00.json",
    "passwd",
    "etc/passwd",
    "etc/",
    "runs/",
    f"runs/{OTHER}/result.json",
    "%00",
    "result.json%00",
    "result.json/..",
    "pipe",
    "a" * 5000,
    "/".join("a" * 3000),
]
RUNS = [
    "..",
    "%2e%2e",
    "..%2f..",
    ".",
    "%2fetc",
    "/etc",
    "..%2fsecret.txt",
    "%00",
    AWAY,
    "*",
    "a" * 5000,
]


def test_no_path_leads_out_of_a_record(served: Served) -> None:
    assert not_refused(served, [f"run/{RUN}/files/{path}" for path in OUTSIDE]) == {}


def test_no_path_leads_out_of_the_reports(served: Served) -> None:
    folder = "cluster/reports/20260102-050607"
    assert not_refused(served, [f"{folder}/{path}" for path in OUTSIDE]) == {}
    assert not_refused(served, [f"cluster/reports/{path}" for path in (*OUTSIDE, "../.env", "..%2f.env")]) == {}
    assert not_refused(served, [f"cluster/batches/{path}" for path in OUTSIDE]) == {}


def test_what_is_no_run_of_this_lab_has_no_pages(served: Served) -> None:
    pages = ("", "/log", "/files/", "/files/secret.txt", "/files/passwd", "/events")
    assert not_refused(served, [f"run/{run}{page}" for run in RUNS for page in pages]) == {}


def test_scripts_and_styles_are_those_of_labctl(served: Served) -> None:
    names = ["..%2fui.css", "../ui.css", "..%2f..%2fguard.py", "%2fetc%2fpasswd", "", "%00", ".", "a" * 5000]
    assert not_refused(served, [f"static/{name}" for name in names]) == {}


def not_refused(served: Served, paths: list[str]) -> dict[str, tuple[int, bytes]]:
    """Return the answers that are no error, or give a file away, by path; fail if the server reports anything."""
    answers = {path: served.ask(path) for path in paths}
    assert served.running.err.splitlines()[-1].endswith("press Ctrl-C to stop"), served.running.err
    return {
        path[:80]: (status, body[:300])
        for path, (status, body) in answers.items()
        if not 400 <= status < 500 or SECRET.encode() in body or b"root:" in body
    }


SETTLED = 500
"""Milliseconds after which a page has fetched what it shows."""
PAGES = [
    "/",
    f"/run/{RUN}",
    f"/run/{RUN}/files/",
    f"/run/{RUN}/files/samples/",
    f"/run/{RUN}/files/page.html",
    f"/run/{RUN}/files/picture.svg",
    f"/run/{RUN}/files/%22%3Cimg%20src%3Dx%20onerror%3Dwindow.hacked%3D1%3E",
    f"/compare?run={RUN}&run={OTHER}",
    "/cluster",
    f"/run/{MARK}",
    f"/compare?run={MARK}&run={RUN}",
    f"/?text={MARK}&workload={MARK}",
    f"/#{MARK}",
]
SHOWING = PAGES[:8]
"""Pages on which such a text can be read."""


@pytest.mark.parametrize("path", PAGES, ids=range(len(PAGES)))
def test_no_text_of_a_record_becomes_part_of_a_page(served: Served, open_page: Open, path: str) -> None:
    """Neither does a script run, nor does the browser have one to block, nor is there an element of such a text."""
    page = open_page(served.root + path, missing=MARK in path).page
    page.wait_for_timeout(SETTLED)
    assert page.evaluate("window.hacked") is None
    assert path not in SHOWING or "window.hacked=1" in page.inner_text("body")
    assert page.locator("img[src=x], [onerror], [onload]").count() == 0


@pytest.mark.parametrize("name", ["page.html", "picture.svg"])
def test_a_report_runs_no_script(served: Served, browser: Browser, name: str) -> None:
    """It is shown as a page, which anyone may have written: the browser blocks what it asks for."""
    with contextlib.closing(browser.new_page()) as page:
        answer = page.goto(f"{served.root}/cluster/reports/20260102-050607/{name}")
        assert answer
        assert answer.status == 200
        assert "sandbox" in answer.headers["content-security-policy"]
        page.wait_for_timeout(SETTLED)
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("window.origin") == "null"
