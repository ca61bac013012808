"""The pages of a cluster: what is asked when, and what they answer; their content is data of strangers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from support import builders
from support.harness import wait_until

from labctl import flows
from labctl.backends.docker.lab.labs import labs_of
from labctl.backends.finding import error, ok
from labctl.backends.health import HostHealth
from labctl.backends.status import LabStatus, NodeStatus
from labctl.batches import record, search
from labctl.batches.bisect import BadNode, Diagnosis
from labctl.batches.record import Batch, BatchJob
from labctl.batches.search import BisectReport
from labctl.config.context import Context
from labctl.doctor.report import DoctorReport
from labctl.errors import HostError
from labctl.health.model import Condition
from labctl.model import Event, HostFailure
from labctl.reports.validation import Figure, Validation
from labctl.runs.health import HealthReport
from labctl.runs.labs import LabNow
from labctl.system import filelock
from labctl.ui import app, cluster
from labctl.ui.cluster import Monitor, of_doctor, of_health, refusal
from labctl.ui.page_state import PageState
from labctl.ui.site import Site

EVIL = "<script>alert(1)</script>"
HOST = "127.0.0.1:8765"
LIMIT = 60


def asked(site: Site, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    """Return status, headers and text of an answer to a page of the site."""
    messages: list[Any] = []
    sent = {"host": HOST, "origin": f"http://{HOST}", "accept": "text/html"}
    scope = {
        "type": "http", "method": method, "path": f"{site.root}{path}", "raw_path": b"", "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    async def call() -> None:
        await app.application(site)(scope, receive, send)

    anyio.run(call)
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(message.get("body", b"") for message in messages).decode()


def answer(site: Site, path: str) -> Any:
    """Return a JSON answer."""
    return json.loads(asked(site, path)[2])


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    wait_until(condition, LIMIT, "what the page should have")


def parts(monitor: Monitor) -> dict[str, Any]:
    """Return all parts of the page."""
    decoded: dict[str, Any] = json.loads(msgspec.json.encode(monitor.page.since(0)[0]))
    return decoded


def down(**changes: Any) -> LabNow:
    """Return a lab without nodes."""
    usual: dict[str, Any] = {"lab": "demo", "state": "down", "nodes": (), "unreachable": (), "hint": "labctl up"}
    return LabNow(status=LabStatus(**{**usual, **changes}))


def looking(monkeypatch: pytest.MonkeyPatch, look: Callable[[Context], LabNow]) -> None:
    """Let a function be the look at the lab, whose devices are not known."""

    def devices(_: Context) -> Any:
        raise HostError("gpu-0: no route to host", hint="labctl doctor")

    monkeypatch.setattr(flows, "look", look)
    monkeypatch.setattr(flows, "devices", devices)


def looked(site: Site) -> Monitor:
    """Return a monitor after its first look."""
    monitor = Monitor(site.context)
    monitor.look_if_due()
    until(lambda: "looked" in parts(monitor))
    return monitor


# --- looks ---------------------------------------------------------------------------------------------------


def test_the_page_comes_while_a_host_is_silent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks no host; a look is under way only while a page is open, and all pages share it."""
    silence, looks = threading.Event(), []

    def look(_: Context) -> LabNow:
        looks.append(1)
        silence.wait(LIMIT)
        return down()

    looking(monkeypatch, look)
    for pause in ("PACE", "LONGEST_PAUSE"):
        monkeypatch.setattr(cluster, pause, 3600.0)
    status, _, text = asked(site, "/cluster")
    assert (status, looks) == (200, [])
    assert "Contacting hosts" in text
    monitor = Monitor(site.context)
    for _ in range(3):
        monitor.look_if_due()
    assert parts(monitor) == {}
    silence.set()
    until(lambda: "looked" in parts(monitor))
    monitor.look_if_due()
    assert looks == [1]


def test_a_lab_that_is_down_says_what_to_type(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looking(monkeypatch, lambda _: down())
    shown = parts(looked(site))
    assert (shown["head"]["state"], shown["head"]["hint"], shown["order"]) == ("down", "labctl up", [])
    assert shown["devices"]["message"] == "cannot list the devices of the hosts: gpu-0: no route to host"


def test_a_silent_host_its_nodes_and_warnings_are_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeStatus(name="worker-0", role="worker", host="gpu-0", state="unreachable", reason="no route")
    failure = HostFailure("gpu-0", "gpu-0: no route", "ssh gpu-0")

    def look(context: Context) -> LabNow:
        context.emit(Event(kind="warning", text="gpu-1 has a lab of this name that is not yours"))
        return down(nodes=(node,), unreachable=(failure,), state="unknown")

    looking(monkeypatch, look)
    shown = parts(looked(site))
    assert shown["head"]["unreachable"] == [{"host": "gpu-0", "message": "gpu-0: no route", "hint": "ssh gpu-0"}]
    assert shown["head"]["warnings"] == ["gpu-1 has a lab of this name that is not yours"]
    assert shown["tile worker-0"]["state"] == {"text": "unreachable", "kind": "not-reached"}


def test_a_look_that_fails_says_why_and_another_follows(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_: Context) -> LabNow:
        raise HostError("Docker Engine does not answer", hint="labctl setup")

    looking(monkeypatch, look)
    monitor = looked(site)
    assert parts(monitor)["error"] == {"message": "Docker Engine does not answer", "hint": "labctl setup"}
    monkeypatch.setattr(monitor, "_due", 0.0)
    looking(monkeypatch, lambda _: down())
    monitor.look_if_due()
    until(lambda: "head" in parts(monitor))
    assert parts(monitor)["error"] is None


def test_a_bug_is_on_the_page_and_its_traceback_where_the_server_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda bug: raised.append(bug.exc_value))
    failure = KeyError("no such key")

    def fail(_: Context) -> Any:
        raise failure

    looking(monkeypatch, fail)
    monkeypatch.setattr(flows, "doctor", fail)
    monitor = looked(site)
    assert parts(monitor)["error"]["message"] == "labctl failed: KeyError('no such key')"
    monitor.examine("doctor")
    until(lambda: len(raised) == 2)
    assert raised == [failure, failure]
    assert parts(monitor)["doctor"]["error"] == "labctl doctor failed"


def test_a_page_gets_what_changed_since_an_event_of_its_own() -> None:
    page = PageState()
    page.put({"a": 1, "b": 1})
    first = page.since(0)[1]
    page.put({"a": 1, "b": 2})
    changed, second = page.since(first)
    assert changed == {"b": msgspec.Raw(b"2")}
    assert page.since(second)[0] == {}
    assert page.version_of(page.identity(first)) == first
    assert page.version_of(PageState().identity(first)) == 0
    assert [page.version_of(wrong) for wrong in ("", "x", "-1", "x-²")] == [0, 0, 0, 0]


def test_a_node_that_is_gone_has_no_tile_for_a_page_that_is_opened_later() -> None:
    page = PageState()
    page.put({"tile a": 1, "tile b": 1, "head": 1})
    page.keep({"tile a"}, "tile ")
    assert list(page.since(0)[0]) == ["tile a", "head"]


# --- doctor and health ---------------------------------------------------------------------------------------


def test_doctor_runs_once_at_a_time_and_its_answer_is_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    findings = (
        error("LAB-SSH-001", "sshd is silent", "no run", "labctl up", node="worker-0"),
        ok("LAB-NET-001", "there"),
    )

    def doctor(_: Context) -> DoctorReport:
        go.wait(LIMIT)
        return DoctorReport(findings, lab="demo")

    monkeypatch.setattr(flows, "doctor", doctor)
    monitor, began = Monitor(site.context), time.time()
    monitor.examine("doctor")
    assert parts(monitor)["doctor"]["busy"]
    with pytest.raises(HostError, match="is already running"):
        monitor.examine("doctor")
    go.set()
    until(lambda: not parts(monitor)["doctor"]["busy"])
    shown = parts(monitor)["doctor"]
    assert shown["text"] == "1 of 2 checks passed"
    assert began <= shown["at"] <= time.time()
    assert [problem["fix"] for problem in shown["problems"]] == ["labctl up"]
    monitor.examine("doctor")
    # It must not go on with the doctor of this machine once the test has ended.
    until(lambda: not parts(monitor)["doctor"]["busy"])


def test_a_doctor_that_fails_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def doctor(_: Context) -> DoctorReport:
        raise HostError("no host answers", hint="labctl status")

    monkeypatch.setattr(flows, "doctor", doctor)
    monitor = Monitor(site.context)
    monitor.examine("doctor")
    until(lambda: not parts(monitor)["doctor"]["busy"])
    assert (parts(monitor)["doctor"]["error"], parts(monitor)["doctor"]["hint"]) == ("no host answers", "labctl status")


def test_a_lab_in_a_cluster_has_no_health_and_says_what_to_type(site: Site) -> None:
    assert refusal(site.context) == ""
    (site.directory / ".env").write_text("LAB_NAME=demo\nLAB_ENGINE=kubernetes\n")
    assert "kubectl describe node" in refusal(site.context)
    text = asked(site, "/cluster")[2]
    assert "kubectl describe node" in text
    assert "run on the hosts" not in text
    assert 'data-examine="doctor"' in text
    assert 'data-examine="health"' not in text
    assert asked(site, "/cluster/health", "POST")[0] != 202


def test_only_a_button_begins_an_examination(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "doctor", lambda _: pytest.fail("it was begun"))
    assert asked(site, "/cluster/doctor")[0] == 405
    assert asked(site, "/cluster/reboot", "POST")[0] == 404


def test_what_follows_from_a_problem_stands_below_it() -> None:
    cause = error("LAB-KEY-001", "no key", "", "labctl keys rotate", node="worker-0")
    shown = of_doctor(DoctorReport((cause, error("LAB-SSH-001", "refused", "", "labctl up", node="worker-0"))), 1.0)
    (problem,) = shown.problems
    assert problem["findings"][0]["text"] == "LAB-KEY-001 worker-0: no key"
    assert problem["consequences"][0]["text"] == "LAB-SSH-001 worker-0: refused"


def test_health_names_each_fault_with_its_steps_and_hosts_that_are_silent() -> None:
    fault = Condition(check="disk", subject="disk", level="bad", text="disk full", steps=("df -h",))
    bad = HostHealth(host="gpu-0", nodes=(), level="bad", conditions=(fault,))
    silent = HostHealth(host="gpu-1", nodes=(), level="unknown", conditions=(), error="no route")
    shown = of_health(HealthReport(level="bad", hosts=(bad, silent)), 1.0)
    assert shown.text == "gpu-0 bad, gpu-1 unknown"
    found = [finding for problem in shown.problems for finding in problem["findings"]]
    assert [finding["text"] for finding in found] == ["gpu-0: disk full", "gpu-1: no route"]
    assert found[0]["steps"] == ("df -h",)


# --- batches -------------------------------------------------------------------------------------------------


def job(name: str, *nodes: str, **changes: Any) -> BatchJob:
    """Return a job that passed."""
    usual = {"state": "done", "verdict": "PASS", "began": 1000.0, "ended": 1010.0, "run_id": f"run-{name}"}
    usual |= {"job": name, "set": "s", "hostfile": name, "names": nodes, "nodes": nodes, "log": f"{name}.log"}
    return BatchJob(**{**usual, **changes})


def written(site: Site, path: str, *jobs: BatchJob, workload: str = "opt") -> Path:
    """Write a batch's record; return its directory."""
    directory = site.directory / path
    directory.mkdir(parents=True)
    record.create(
        directory, Batch(workload=workload, lab="demo", metric="throughput", timeout=9, began=1000, jobs=jobs)
    )
    return directory


def test_a_batch_is_listed_and_has_a_page(site: Site) -> None:
    written(site, "output/set_opt", job("a", "worker-0"), job("b", "worker-1", verdict="FAIL", cause="criteria"))
    (row,) = answer(site, "/cluster/batches.json")["batches"]
    assert (row["path"], row["passed"], row["jobs"], row["state"]["text"]) == ("output/set_opt", 1, 2, "1 failed")
    status, _, text = asked(site, "/cluster/batches/output/set_opt")
    assert status == 200
    assert 'href="/token/run/run-a"' in text
    assert "FAIL (criteria)" in text
    assert 'data-live="yes"' not in text


def test_a_batch_under_way_is_live(site: Site) -> None:
    directory = written(site, "output/set_opt", job("a", "worker-0", state="running", verdict="", ended=None))
    assert answer(site, "/cluster/batches.json")["batches"][0]["state"]["text"] == "interrupted"
    with filelock.held(directory / ".lock", "labctl batch opt"):
        assert answer(site, "/cluster/batches.json")["batches"][0]["state"]["text"] == "running"
        assert 'data-live="yes"' in asked(site, "/cluster/batches/output/set_opt")[2]


def test_the_list_reads_a_batch_again_when_it_changed(site: Site) -> None:
    directory = written(site, "output/set_opt", job("a", "worker-0", state="running", verdict="", ended=None))
    assert answer(site, "/cluster/batches.json")["batches"][0]["passed"] == 0
    record.change(directory, job("a", "worker-0"))
    assert answer(site, "/cluster/batches.json")["batches"][0]["passed"] == 1


def test_the_checks_of_a_validation_are_batches_too(site: Site) -> None:
    written(site, "reports/20260102-150405-quick/checks/matmul", job("a", "worker-0"))
    written(site, "reports/20260102-150405-quick/checks/matmul-bisect/round01", job("a", "worker-0"))
    assert sorted((row["path"], row["kind"]) for row in answer(site, "/cluster/batches.json")["batches"]) == [
        ("reports/20260102-150405-quick/checks/matmul", "batch"),
        ("reports/20260102-150405-quick/checks/matmul-bisect", "bisect"),
    ]


def diagnosed(**changes: Any) -> BisectReport:
    """Return the report of a search that found a slow node."""
    bad = BadNode(node="worker-1", kind="slow", figure=0.5, runs=(), p=0.0001)
    usual: dict[str, Any] = {
        "links": (),
        "good": ("worker-0",),
        "unsure": (),
        "unexplained": (),
        "rounds": 2,
        "runs": 3,
    }
    diagnosis = Diagnosis(**{"bad": (bad,), **usual, **changes})
    return BisectReport(directory="", workload="opt", metric="throughput", unit="", diagnosis=diagnosis)


def test_a_search_has_its_rounds_why_they_ran_and_what_came_out(site: Site) -> None:
    directory = site.directory / "output/bisect_opt_1"
    written(site, "output/bisect_opt_1/round01", job("a", "worker-0", value=4.0), job("b", "worker-1", value=2.0))
    written(site, "output/bisect_opt_1/round02", job("c", "worker-1", value=2.0))
    (directory / search.NOTES).write_text(f"round 1: all nodes in pairs\nround 2: worker-1 again {EVIL}\n")
    (directory / search.REPORT).write_bytes(msgspec.json.encode(diagnosed()))
    (row,) = answer(site, "/cluster/batches.json")["batches"]
    assert (row["rounds"], row["jobs"], row["state"]["text"]) == (2, 3, "bad: worker-1")
    text = asked(site, "/cluster/batches/output/bisect_opt_1")[2]
    assert "round 1: all nodes in pairs" in text
    assert "worker-1 is slow" in text
    assert "50 % of the others, p &lt; 0.001" in text
    assert "133 %" in text
    assert EVIL not in text


def test_a_search_of_an_earlier_labctl_says_that_reasons_were_not_recorded(site: Site) -> None:
    written(site, "output/bisect_opt_1/round01", job("a", "worker-0"))
    text = asked(site, "/cluster/batches/output/bisect_opt_1")[2]
    assert "were not recorded" in text
    assert "no result" in text


def test_names_in_a_batch_are_text(site: Site) -> None:
    hostile = job(EVIL, EVIL, verdict="ERROR", cause=EVIL, message=EVIL, run_id='"><img src=x>/../x')
    written(site, f"output/{EVIL[:7]}x", hostile, workload=EVIL)
    text = asked(site, f"/cluster/batches/output/{EVIL[:7]}x")[2]
    assert "<script>alert" not in text
    assert "<img" not in text
    assert 'href="/token/run/%22%3E%3Cimg%20src%3Dx%3E/../x"' in text


@pytest.mark.parametrize(
    "path", ["output/../output/set_opt", "../outside", "output/linked", "output", "/etc", "output/none"]
)
def test_only_batches_that_the_list_finds_have_a_page(site: Site, path: str) -> None:
    written(site, "output/set_opt", job("a", "worker-0"))
    (site.directory / "output/linked").symlink_to(site.directory / "output/set_opt")
    assert asked(site, f"/cluster/batches/{path}")[0] == 404


def test_a_broken_record_leaves_the_others(site: Site) -> None:
    written(site, "output/set_opt", job("a", "worker-0"))
    broken = written(site, "output/broken", job("a", "worker-0"))
    (broken / record.RECORD).write_text("{")
    assert [row["path"] for row in answer(site, "/cluster/batches.json")["batches"]] == ["output/set_opt"]
    assert asked(site, "/cluster/batches/output/broken")[0] == 404


# --- validations ---------------------------------------------------------------------------------------------


def validated(site: Site, name: str, figures: Iterable[Figure] = (), **changes: Any) -> Path:
    """Write the report of a validation; return its directory."""
    directory = site.directory / "reports" / name
    directory.mkdir(parents=True)
    usual: dict[str, Any] = {"lab": "demo", "profile": "quick", "started": "2026-01-02T15:04:05+00:00", "seconds": 60}
    usual |= {"verdict": "FAIL", "message": "worker-1 is slow", "figures": tuple(figures)}
    (directory / "report.json").write_bytes(msgspec.json.encode(Validation(**{**usual, **changes})))
    (directory / "report.html").write_text(f"<h1>FAIL</h1>{EVIL}")
    return directory


def figure(what: str, value: float, limit: str, *, passed: bool | None, unit: str = "GB/s") -> Figure:
    """Return a figure of a node."""
    return Figure(step="all_reduce", what=what, node="worker-1", value=value, unit=unit, limit=limit, passed=passed)


def test_the_last_validation_has_its_worst_figures(site: Site) -> None:
    """Missed ones come first, then those nearest to their threshold, one of each metric."""
    figures = (
        figure("bandwidth", 130, ">= 100 GB/s", passed=True),
        figure("bandwidth", 120, ">= 100 GB/s", passed=True),
        figure("latency", 24, "<= 25 µs", passed=True, unit="µs"),
        figure("disk", 1, ">= 2 GB/s", passed=False),
    )
    validated(site, "20260102-150405-quick", verdict="PASS")
    validated(site, "20260103-150405-quick", figures)
    (site.directory / "reports/other").mkdir()
    first, second = answer(site, "/cluster/validations.json")["validations"]
    assert (first["name"], first["verdict"]["text"]) == ("20260103-150405-quick", "FAIL")
    assert [(each["what"], each["value"], each["status"]) for each in first["figures"]] == [
        ("disk (all_reduce)", "1 GB/s", "missed"),
        ("latency (all_reduce)", "24 µs", "passed"),
        ("bandwidth (all_reduce)", "120 GB/s", "passed"),
    ]
    assert (second["verdict"]["kind"], second["figures"]) == ("pass", [])


def test_a_report_is_served_and_runs_nothing(site: Site) -> None:
    validated(site, "20260102-150405-quick")
    status, headers, text = asked(site, "/cluster/reports/20260102-150405-quick/report.html")
    assert (status, text) == (200, f"<h1>FAIL</h1>{EVIL}")
    assert headers["content-type"].startswith("text/html")
    assert headers["content-security-policy"].startswith("sandbox; default-src 'none';")
    assert "allow-scripts" not in headers["content-security-policy"]
    status, _, text = asked(site, "/cluster/reports/20260102-150405-quick/")
    assert (status, 'href="./report.html"' in text) == (200, True)


def test_a_link_among_reports_is_named_and_leads_nowhere(site: Site) -> None:
    directory = validated(site, "20260102-150405-quick")
    (site.directory / "reports/linked").symlink_to(directory)
    text = asked(site, "/cluster/reports/")[2]
    assert "link, not followed" in text
    assert 'href="./linked' not in text


@pytest.mark.parametrize(
    "path",
    ["../.env", "x/../../.env", "linked", "linked/report.html", "20260102-150405-quick/secret", "a\0b", "", "none"],
)
def test_no_file_outside_reports_is_served(site: Site, path: str) -> None:
    directory = validated(site, "20260102-150405-quick")
    (site.directory / "reports/linked").symlink_to(directory)
    (directory / "secret").symlink_to(site.directory / ".env")
    status, _, text = asked(site, f"/cluster/reports/{path}")
    assert status == 404 or path == ""
    assert "LAB_NAME" not in text


def test_a_link_of_a_report_leads_to_the_files_of_a_run(site: Site) -> None:
    status, headers, _ = asked(site, "/cluster/runs/20260102-150405-opt-3fa2c1/output.log")
    assert (status, headers["location"]) == (307, "/token/run/20260102-150405-opt-3fa2c1/files/output.log")
    assert asked(site, "/cluster/runs//evil.com/x")[1]["location"].startswith("/token/run/")


def test_a_baseline_is_told_and_a_broken_one_too(site: Site) -> None:
    assert answer(site, "/cluster/validations.json")["baseline"] is None
    recorded = {"lab": "demo", "profile": "full", "recorded": "2026-01-02T15:04:05", "checks": {}, "hosts": {}}
    (site.directory / "baseline.json").write_text(json.dumps({**recorded, "figures": []}))
    assert answer(site, "/cluster/validations.json")["baseline"]["profile"] == "full"
    (site.directory / "baseline.json").write_text("{")
    assert "labctl baseline" in answer(site, "/cluster/validations.json")["baseline"]["hint"]


# --- labs of the user ----------------------------------------------------------------------------------------


def test_labs_are_the_callers_alone(tmp_path: Path) -> None:
    mine = {"directory": str(tmp_path), "owner": "ann@desk"}
    gone = {"directory": str(tmp_path / "gone"), "owner": "ann@desk", "state": "exited"}
    by_lab = {
        "b": [builders.container("worker-0", **mine), builders.container("launcher", role="launcher", **mine)],
        "a": [builders.container("worker-0", **gone)],
        "c": [builders.container("worker-0", directory=str(tmp_path), owner="bob@desk")],
        "d": [builders.container("worker-0", **{**mine, "owner": ""})],
    }
    assert [(lab.name, lab.state, lab.nodes, lab.is_there) for lab in labs_of(by_lab, "ann@desk")] == [
        ("a", "stopped", ("worker-0",), False),
        ("b", "up", ("launcher", "worker-0"), True),
    ]


def test_labs_have_the_command_that_opens_their_pages(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a b; rm"
    folder.mkdir()
    of = [builders.container("worker-0", directory=str(folder), owner="ann@desk")]
    monkeypatch.setattr(flows, "own_labs", lambda: tuple(labs_of({"b": of}, "ann@desk")))
    (row,) = answer(site, "/cluster/labs.json")["labs"]
    assert row["command"] == f"labctl -C '{folder}' ui"
    assert row["here"] is False


def test_without_docker_labs_are_not_available(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise HostError("Docker Engine does not answer: No such file or directory")

    monkeypatch.setattr(flows, "own_labs", none)
    assert answer(site, "/cluster/labs.json") == {
        "labs": [],
        "why": "Cannot list labs: Docker Engine does not answer: No such file or directory",
    }
