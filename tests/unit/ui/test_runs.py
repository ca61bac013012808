"""The list of runs: its addresses, and the stream of what changes in it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient
from support import records

from labctl.errors import HostError
from labctl.records import note
from labctl.records.active import ActiveRun
from labctl.runs import judge, opening
from labctl.ui import runs
from labctl.ui.runs import Listing
from labctl.ui.site import Site

FIRST, SECOND = "20261125-203615-opt-tiny-9ac11f", "20261125-204001-opt-tiny-bb20e4"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look as often as a page asks."""
    monkeypatch.setattr(runs, "INTERVAL", 0)
    monkeypatch.setattr(runs, "SHORT", 0.01)


Ask = Callable[..., Any]


@pytest.fixture
def ask(client: TestClient) -> Ask:
    """Return a function that asks the list's addresses, and returns the JSON of the answer."""

    def asked(path: str, *query: tuple[str, str]) -> Any:
        """Return what an address answers."""
        return client.get(f"/token{path}", params=query).raise_for_status().json()

    return asked


def unfinished(lab: Path, run_id: str) -> None:
    """Write the record of a run without a result."""
    (records.write(lab, run_id) / "result.json").unlink()


def told(event: str) -> tuple[int, dict[str, Any]]:
    """Return number and data of a server-sent event; assert its form."""
    name, number, data, *rest = event.split("\n")
    assert (name, rest) == ("event: runs", ["", ""])
    return int(number.removeprefix("id: ")), json.loads(data.removeprefix("data: "))


async def first(listing: Listing, since: int, seconds: float = 60) -> tuple[int, dict[str, Any]]:
    """Return the first event after a change."""
    with anyio.fail_after(seconds):
        async with aclosing(runs.changes(listing, since)) as events:  # type: ignore[type-var]
            async for event in events:
                return told(event)
    raise AssertionError("the stream ended")


def test_the_page_of_a_lab_without_runs_says_how_to_begin(client: TestClient, ask: Ask) -> None:
    assert "<code>labctl run opt-tiny</code>" in client.get("/token/").text
    assert ask("/runs.json") == {"change": 1, "total": 0, "runs": [], "removed": []}


def test_rows_come_with_the_number_of_all_runs(site: Site, ask: Ask) -> None:
    records.write(site.directory, FIRST, losses=(8.1, 4.8))
    records.write(site.directory, SECOND, workload="<script>alert(1)</script>")
    answer = ask("/runs.json", ("limit", "1"))
    assert (answer["total"], [row["id"] for row in answer["runs"]]) == (2, [SECOND])
    assert answer["runs"][0]["workload"] == "<script>alert(1)</script>"
    assert [row.get("loss") for row in ask("/runs.json")["runs"]] == [None, 4.8]


def test_runs_are_asked_for_by_terms(site: Site, ask: Ask) -> None:
    records.write(site.directory, FIRST, arguments=("--lr", "0.01"))
    records.write(site.directory, SECOND, arguments=("--lr", "0.1"))
    ask("/runs.json")
    assert ask("/runs.json", ("term", "LAB_NAME=demo"), ("term", "--lr=0.01")) == {"runs": [FIRST], "unknown": {}}
    assert ask("/runs.json", ("term", "lr=0.1"), ("term", "foo=1")) == {"runs": [], "unknown": {"foo": ""}}


def test_further_columns_are_asked_for_by_name(site: Site, ask: Ask) -> None:
    """Ask for names and a column before the rows; then for what came after a change."""
    records.write(site.directory, FIRST, arguments=("--lr", "0.01"), metrics={"busbw": {"value": 7.5}})
    records.write(site.directory, SECOND, arguments=("--lr", "0.1"))
    names = ask("/names.json")
    assert (names["differing"][0], names["metrics"]) == ("--lr", ["busbw"])
    assert "LAB_NAME" in names["same"]
    assert ask("/column.json", ("name", "--lr")) == {FIRST: "0.01", SECOND: "0.1"}
    assert ask("/column.json", ("name", "busbw")) == {FIRST: 7.5}
    change = str(ask("/runs.json")["change"])
    assert ask("/column.json", ("name", "--lr"), ("since", change)) == {}


@pytest.mark.parametrize("limit", ["x", "-1", "1.5", "²", "9" * 5000])
def test_a_limit_that_is_no_number_is_refused(client: TestClient, limit: str) -> None:
    answer = client.get("/token/runs.json", params={"limit": limit})
    assert (answer.status_code, "not a number" in answer.text) == (404, True)


def test_changes_come_once_and_those_since_the_last_event_first(site: Site) -> None:
    """Follow a run's note, then the same again: what has come does not come once more."""
    path = records.write(site.directory, FIRST)
    listing = Listing(site)
    change = listing.index.latest().change

    async def follow() -> None:
        """Follow two changes, in two connections."""
        note.write(path, "lr halved")
        number, rows = await first(listing, change)
        assert [(row["id"], row["note"]) for row in rows["runs"]] == [(FIRST, "lr halved")]
        with pytest.raises(TimeoutError):
            await first(listing, number, seconds=0.2)
        records.write(site.directory, SECOND)
        _, rows = await first(listing, number)
        assert [row["id"] for row in rows["runs"]] == [SECOND]

    anyio.run(follow)


def test_the_nodes_are_asked_only_for_runs_without_a_result(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at an ended run: nothing is connected. With one under way its step comes, from its nodes."""
    asked: list[Sequence[str]] = []

    def judge_ended(_: object, unjudged: Sequence[str]) -> dict[str, ActiveRun]:
        """Note which runs the nodes are asked for."""
        asked.append(unjudged)
        return active

    active = {SECOND: ActiveRun(id=SECOND, nodes=("worker-0",), state="running", step="step 3/9")}
    monkeypatch.setattr(opening, "connected", connected)
    monkeypatch.setattr(judge, "judge_ended", judge_ended)
    records.write(site.directory, FIRST)
    listing = Listing(site)
    listing.look()
    assert asked == []
    unfinished(site.directory, SECOND)
    _, rows = anyio.run(first, listing, listing.index.latest().change - 1)
    assert [(row["id"], row["state"], row["step"]) for row in rows["runs"]] == [(SECOND, "running", "step 3/9")]
    assert asked == [[SECOND]]


@contextmanager
def connected(*_: object, **__: object) -> Iterator[None]:
    """Stand in for a connection to a backend."""
    yield


def of_unfinished(site: Site, judged: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> Listing:
    """Return the list of a run without a result, for which ``judged`` stands in for the nodes."""
    unfinished(site.directory, FIRST)
    monkeypatch.setattr(opening, "connected", connected)
    monkeypatch.setattr(judge, "judge_ended", judged)
    return Listing(site)


def test_where_the_nodes_do_not_answer_a_run_is_unknown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the engine of a running run: its state is unknown, and the list still comes."""

    def refuse(*_: object) -> dict[str, ActiveRun]:
        """Stand in for an engine that is gone."""
        raise HostError("no engine")

    active = {FIRST: ActiveRun(id=FIRST, nodes=(), state="running")}
    unfinished(site.directory, FIRST)
    listing = Listing(site)
    monkeypatch.setattr(opening, "connected", connected)
    monkeypatch.setattr(runs, "ASKING", 0)
    for judged, state in ((lambda *_: active, "running"), (refuse, "unknown")):
        monkeypatch.setattr(judge, "judge_ended", judged)
        listing.look()
        assert [row.state for row in listing.index.latest().runs] == [state]


def test_a_host_that_does_not_answer_holds_up_no_row(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note a run while the nodes are asked: the note is there before their answer, which comes with a later look."""
    answers = threading.Event()
    active = {FIRST: ActiveRun(id=FIRST, nodes=(), state="running")}

    def judged(*_: object) -> dict[str, ActiveRun]:
        """Stand in for nodes, one of which is waited for."""
        assert answers.wait(10)
        return active

    listing = of_unfinished(site, judged, monkeypatch)
    monkeypatch.setattr(runs, "ANSWERING", 0.01)
    listing.look()
    note.write(site.directory / "runs" / FIRST, "lr halved")
    listing.look()
    assert [(row.state, row.note) for row in listing.index.since(0).runs] == [("unknown", "lr halved")]
    answers.set()
    monkeypatch.setattr(runs, "ASKING", 0)
    monkeypatch.setattr(runs, "ANSWERING", 10)
    listing.look()
    assert [row.state for row in listing.index.since(0).runs] == ["running"]


def test_nodes_are_asked_about_the_same_runs_now_and_then(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes time of the nodes; a run that is new is asked for at once."""
    asked: list[list[str]] = []

    def judged(_: object, unjudged: list[str]) -> dict[str, ActiveRun]:
        """Note a question."""
        asked.append(unjudged)
        return {}

    listing = of_unfinished(site, judged, monkeypatch)
    monkeypatch.setattr(runs, "INTERVAL", 0)
    listing.look()
    listing.look()
    assert asked == [[FIRST]]
    unfinished(site.directory, SECOND)
    listing.look()
    assert sorted(asked[-1]) == sorted([FIRST, SECOND])


def test_pages_share_a_look(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for several pages within the interval, and while another page looks: the records are read once."""
    looks: list[int] = []
    monkeypatch.setattr(runs, "INTERVAL", 3600)
    listing = Listing(site)
    latest = listing.index.latest

    def looking() -> None:
        """Note a look, in which another page asks for one."""
        looks.append(1)
        listing.look()
        latest()

    monkeypatch.setattr(listing.index, "latest", looking)
    monkeypatch.setattr(time, "monotonic", lambda: 10_000.0)
    listing.look()
    listing.look()
    assert looks == [1]
    assert listing.pause() == 3600


def test_nothing_is_looked_at_once_the_page_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a stream after its first event: no look follows."""
    path = records.write(site.directory, FIRST)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    listing = Listing(site)
    looks: list[int] = []
    monkeypatch.setattr(listing, "_look", lambda: looks.append(len(listing.index.latest().runs)))

    async def closed() -> int:
        """Return the looks that follow a close."""
        await first(listing, 0)
        before = len(looks)
        await anyio.sleep(0.1)
        return len(looks) - before

    assert anyio.run(closed) == 0
    assert looks
