"""The page of a run: what it shows, and what it takes from a browser."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support import records

from labctl.batches import record
from labctl.batches.record import Batch, BatchJob
from labctl.errors import HostError
from labctl.jobs.job import GRACE
from labctl.model import Hang
from labctl.records import note as notes
from labctl.ui.site import Site

RUN = "20260102-030405-opt-tiny-0000aa"
PAGE = f"/token/run/{RUN}"
OWN = {"origin": "http://127.0.0.1", "content-type": "application/json"}
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def lab(site: Site) -> Path:
    """Return the lab's directory."""
    return site.directory


def under_way(lab: Path) -> None:
    """Write the record of a run that has no result."""
    record = records.write(lab, RUN, log="step 1\n")
    (record / "result.json").unlink()


def test_an_ended_run_has_verdict_files_and_log(client: TestClient, lab: Path) -> None:
    """It opens no events, and has nothing to stop."""
    records.write(lab, RUN, losses=(8.0, 4.0), log="one\n")
    page = client.get(PAGE).text
    assert "All criteria met on 2 ranks." in page
    assert f'href="{PAGE}/files/metrics.jsonl"' in page
    assert 'data-running=""' in page
    assert 'id="stop"' not in page
    assert page.count(">output.log</a>") == 2
    log = client.get(f"{PAGE}/log").json()
    assert [line["text"] for line in log["lines"]] == ["one"]


def test_a_run_under_way_has_its_page_without_asking_the_nodes(client: TestClient, lab: Path) -> None:
    under_way(lab)
    page = client.get(PAGE).text
    assert "RUNNING" in page
    assert 'data-running="yes"' in page
    assert 'id="stop"' in page


def test_a_run_whose_result_cannot_be_read_has_ended(client: TestClient, lab: Path) -> None:
    """Its page opens no events: they would end at once, and the page load itself again and again."""
    record = records.write(lab, RUN, log="one\n")
    (record / "result.json").write_text('{"run_id": "')
    page = client.get(PAGE).text
    assert 'data-running=""' in page
    assert "UNREADABLE" in page
    assert "<code>result.json</code> cannot be read." in page
    assert 'id="stop"' not in page


def test_a_record_with_a_file_of_another_kind_has_its_page_and_its_row(client: TestClient, lab: Path) -> None:
    """The page names the file."""
    record = records.write(lab, RUN)
    (record / "job.json").write_text('{"nodes": ["worker-0"], "request": {"options": 5}}')
    assert '<tr><th scope="row">unreadable</th><td>job.json</td></tr>' in client.get(PAGE).text
    assert [run["id"] for run in client.get("/token/runs.json").json()["runs"]] == [RUN]
    assert client.get("/token/names.json").status_code == 200


def test_a_run_under_way_began_when_its_result_will_say(client: TestClient, lab: Path) -> None:
    """Its record is made a moment after the time of its id."""
    under_way(lab)
    began = datetime(2026, 1, 2, 3, 4, 7).astimezone()
    os.utime(lab / "runs" / RUN / "started", (began.timestamp(),) * 2)
    assert f'datetime="{began.isoformat()}"' in client.get(PAGE).text


def test_an_ended_run_is_saved_as_one_file(client: TestClient, lab: Path) -> None:
    """Without links to its record, which other machines do not have; a run under way has none yet."""
    records.write(lab, RUN, losses=(8.0, 4.0))
    assert f'href="{PAGE}/report"' in client.get(PAGE).text
    saved = client.get(f"{PAGE}/report")
    assert saved.headers["content-disposition"] == f'attachment; filename="{RUN}.html"'
    assert "All criteria met on 2 ranks." in saved.text
    assert "<a href=" not in saved.text
    (lab / "runs" / RUN / "result.json").unlink()
    assert f'href="{PAGE}/report"' not in client.get(PAGE).text


def test_a_job_of_a_batch_leads_to_it(client: TestClient, lab: Path) -> None:
    log = "hello/2xN_batch0001.log"
    records.write(lab, RUN, request={"batch": f"b17 {log}"})
    assert "of batch" not in client.get(PAGE).text
    (lab / "output/set_hello").mkdir(parents=True)
    nodes = ("worker-0",)
    job = BatchJob(job="2xN_batch0001", set="hello", hostfile="h", names=nodes, nodes=nodes, log=log, repeat=2)
    batch = Batch(id="b17", workload="hello", lab="demo", timeout=9, began=1000, jobs=(job,))
    record.create(lab / "output/set_hello", batch)
    link = '<a href="/token/cluster/batches/output/set_hello">output/set_hello</a>'
    assert f"<p>Job 2xN_batch0001 (2) of batch {link}</p>" in client.get(PAGE).text


def test_what_an_ended_run_waited_for_is_shown(client: TestClient, lab: Path) -> None:
    hang = {"kind": "hang", "sentence": "rank 1 never came", "lines": ["rank 0 waits"]}
    records.write(lab, RUN, verdict="ERROR", cause="stalled", message="stalled", hang=hang)
    page = client.get(PAGE).text
    assert "rank 1 never came" in page
    assert "rank 0 waits" in page


def test_a_run_is_found_by_what_names_it(client: TestClient, lab: Path) -> None:
    records.write(lab, RUN)
    for name in ("latest", "0000aa"):
        answer = client.get(f"/token/run/{name}", follow_redirects=False)
        assert answer.headers["location"] == PAGE


@pytest.mark.parametrize("name", ["nothing", "%2e%2e", "a%00b", SCRIPT.replace("/", "%2f"), "*", "x" * 3000])
def test_another_name_gives_an_error(client: TestClient, lab: Path, name: str) -> None:
    records.write(lab, RUN)
    for rest in ("", "/log", "/files/", "/events"):
        answer = client.get(f"/token/run/{name}{rest}", headers={"accept": "text/html"})
        assert answer.status_code == 404
        assert SCRIPT not in answer.text


def test_texts_of_a_run_are_no_part_of_its_page(client: TestClient, lab: Path) -> None:
    path = records.write(lab, RUN, workload=SCRIPT, message=SCRIPT, log=f"{SCRIPT}\n", arguments=(SCRIPT,))
    notes.write(path, f'"{SCRIPT}')
    page = client.get(PAGE).text
    assert SCRIPT not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ("before=2", ["line 8", "line 9"]),
        ("end=14&before=1", ["line 1"]),
        ("begin=7&after=1", ["line 1"]),
        ("search=LINE+5", ["line 5"]),
        ("rank=1&before=2", ["line 7", "line 9"]),
        ("search=line&rank=1&before=1", ["line 1", "line 3", "line 5", "line 7", "line 9"]),
        ("before=999999999&begin=", [f"line {number}" for number in range(10)]),
    ],
)
def test_windows_of_the_log(client: TestClient, lab: Path, query: str, texts: list[str]) -> None:
    path = records.write(lab, RUN, log="".join(f"line {number}\n" for number in range(10)))
    (path / "output.times").write_text("".join(f"{number}.0 {number % 2}\n" for number in range(10)))
    assert [line["text"] for line in client.get(f"{PAGE}/log?{query}").json()["lines"]] == texts


@pytest.mark.parametrize("query", ["end=x", "begin=-1", "rank=1.5", "before=%C2%B2", "end=" + "9" * 40])
def test_a_number_that_is_none_is_refused(client: TestClient, lab: Path, query: str) -> None:
    records.write(lab, RUN, log="line\n")
    answer = client.get(f"{PAGE}/log?{query}")
    assert answer.status_code == 404
    assert "not a number" in answer.json()["error"]["message"]


def test_a_note_is_kept(client: TestClient, lab: Path) -> None:
    """From this page only; what is none is refused."""
    path = records.write(lab, RUN)
    assert client.post(f"{PAGE}/note", json={"text": "mine"}).status_code == 403
    assert client.post(f"{PAGE}/note", json={"text": "mine"}, headers=OWN).json()["note"] == "mine"
    assert notes.read(path) == "mine"
    assert "mine" in client.get(PAGE).text
    for body in (b"", b"{}", b'{"text": 1}', b"[" * 5000):
        assert client.post(f"{PAGE}/note", content=body, headers=OWN).status_code == 404
    assert notes.read(path) == "mine"


def test_stop_and_stacks_are_the_commands_own_flows(
    client: TestClient, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called once each, for this run; their errors reach the page."""
    under_way(lab)
    asked: list[tuple[Any, ...]] = []

    def stacks(*given: Any) -> Hang:
        """Keep what is asked, and answer."""
        asked.append(given[1:])
        return Hang(kind="", sentence="why")

    def stop(*given: Any) -> None:
        """Keep what is asked, and fail."""
        asked.append(given[1:])
        raise HostError("it has ended", hint="labctl show")

    monkeypatch.setattr("labctl.flows.stacks", stacks)
    monkeypatch.setattr("labctl.flows.stop", stop)
    assert client.post(f"{PAGE}/stacks", headers=OWN).json()["sentence"] == "why"
    answer = client.post(f"{PAGE}/stop", headers=OWN)
    assert answer.json() == {"error": {"message": "it has ended", "hint": "labctl show"}}
    assert asked == [(RUN,), (RUN, GRACE)]
    assert client.get(f"{PAGE}/stop").status_code == client.get(f"{PAGE}/stacks").status_code == 405
    assert client.post(f"{PAGE}/stop").status_code == 403
