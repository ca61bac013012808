"""Command health: its table, findings, exit code, JSON, and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.commandline import Labctl

from labctl import flows
from labctl.backends.health import HostHealth
from labctl.cli import health
from labctl.health.model import Condition, Level
from labctl.runs.health import HealthReport

NARROW = Condition(
    check="pcie-width", subject="PCIe", level="bad", item="GPU 2 (0000:3b:00.0)", text="PCIe width 8, 16 on 7 others",
    value="8", source="lspci -vv", steps=("end the run", "sudo nvidia-smi -r -i 2"),
)  # fmt: skip
REMARK = Condition(check="changed", subject="Changes", level="remark", text="driver 580, 570 before")
OK = Condition(check="clock", subject="Clock", level="ok", value="0 s", source="date +%s.%N")


def unknown(check: str, why: str = "only root reads it") -> Condition:
    """Build the answer of a check that could not look."""
    return Condition(check=check, subject="Kernel", level="unknown", text=why, source="dmesg")


def report(level: Level, *hosts: HostHealth) -> HealthReport:
    """Build the answer of `labctl health`."""
    return HealthReport(level=level, hosts=hosts)


BAD = report(
    "bad",
    HostHealth(
        host="gpu-1",
        nodes=("worker-0", "worker-1"),
        level="bad",
        conditions=(REMARK, OK, NARROW, unknown("xid"), unknown("io-errors"), unknown("smart", "no smartctl")),
        last_good=9 * 86_400.0,
    ),
    HostHealth(host="gpu-2", nodes=(), level="unknown", conditions=(), error="gpu-2 did not answer within 60 s"),
)
TEXT = """\
HOST   NODES               VERDICT  CHECKS        LAST GOOD
gpu-1  worker-0, worker-1  bad      6, 3 unknown  9d ago
gpu-2  -                   unknown  0             never before

bad  gpu-1: GPU 2 (0000:3b:00.0): PCIe width 8, 16 on 7 others
  check pcie-width, read from lspci -vv
  1. end the run
  2. sudo nvidia-smi -r -i 2

remark  gpu-1: driver 580, 570 before

gpu-2: gpu-2 did not answer within 60 s

unknown  gpu-1: xid, io-errors: only root reads it
unknown  gpu-1: smart: no smartctl

next: `labctl health gpu-1 --ticket` prints a text for its repair
      once mended: `labctl health gpu-1 --since 1m`, to count nothing from before
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answer `health` with what is kept as ``report``, by default BAD, and `ticket` with a text; keep the arguments."""
    kept: dict[str, Any] = {"report": BAD}

    def examine(_: object, nodes: tuple[str, ...], *, since: float | None, prometheus: Path | None) -> HealthReport:
        """Keep what is asked for; return the report."""
        kept.update(nodes=nodes, since=since, prometheus=prometheus)
        answer: HealthReport = kept["report"]
        return answer

    def ticket(_: object, node: str, *, since: float | None) -> str:
        """Keep what is asked for; return a text."""
        kept.update(node=node, since=since)
        return "gpu-1: bad\n"

    monkeypatch.setattr(flows, "health", examine)
    monkeypatch.setattr(flows, "ticket", ticket)
    return kept


@pytest.mark.usefixtures("asked")
def test_a_bad_host_is_an_error_with_what_to_do(labctl: Labctl) -> None:
    """Examine hosts of which one is bad: table, findings, steps, unknown checks by reason, and exit code 3."""
    done = labctl("health")
    assert (done.code, done.out) == (3, TEXT)


@pytest.mark.parametrize("level", ["ok", "remark", "unknown"])
def test_other_verdicts_are_no_error(labctl: Labctl, asked: dict[str, Any], level: Level) -> None:
    """Examine a host without a bad finding: exit code 0, and a table without more if nothing is to be said."""
    asked["report"] = report(level, HostHealth(host="local", nodes=("worker-0",), level=level, conditions=(OK,)))
    done = labctl("health")
    assert done.code == 0
    assert done.out.splitlines()[1:] == [f"local  worker-0  {level:7}  1       never before"]


@pytest.mark.usefixtures("asked")
def test_every_check_is_shown_on_request(labctl: Labctl) -> None:
    """Examine with -v: a row for each answer, with value and source."""
    rows = labctl("health", "-v").out.partition("HOST   CHECK")[2].splitlines()[1:]
    assert len(rows) == 6
    assert rows[1].split() == ["gpu-1", "clock", "-", "ok", "0", "s", "date", "+%s.%N"]


@pytest.mark.usefixtures("asked")
def test_json_has_all_answers(labctl: Labctl) -> None:
    """Examine with --json: one document, and the exit code of the text."""
    done = labctl("health", "--json")
    assert done.code == 3
    assert done.document["level"] == "bad"
    assert [len(host["conditions"]) for host in done.document["hosts"]] == [6, 0]


def test_nodes_time_and_file_are_passed_on(labctl: Labctl, asked: dict[str, Any]) -> None:
    """Examine two nodes since 2 h with a file of metrics: as asked, the file as seen from where the command is."""
    labctl("health", "worker-0", "gpu-2", "--since", "2h", "--prometheus", "x.prom")
    assert asked["nodes"] == ("worker-0", "gpu-2")
    assert asked["since"] == 7200
    assert asked["prometheus"] == labctl.directory / "x.prom"
    labctl("health")
    assert (asked["nodes"], asked["since"], asked["prometheus"]) == ((), None, None)


@pytest.mark.parametrize("since", ["soon", "0s", "-1"])
def test_a_time_that_is_none_is_an_error(labctl: Labctl, asked: dict[str, Any], since: str) -> None:
    """Examine since another text than a duration: exit code 2, and nothing is examined."""
    done = labctl("health", f"--since={since}")
    assert (done.code, "nodes" in asked) == (2, False)
    assert "is not a duration" in done.err


def test_a_ticket_is_a_text_about_one_node(labctl: Labctl, asked: dict[str, Any]) -> None:
    """Ask for a ticket of a node: its text; of no node, of two, or as JSON: exit code 2 and a hint."""
    done = labctl("health", "worker-0", "--ticket", "--since", "60")
    assert (done.code, done.out.strip(), asked["node"], asked["since"]) == (0, "gpu-1: bad", "worker-0", 60)
    for words in ((), ("worker-0", "worker-1"), ("worker-0", "--json")):
        refused = labctl("health", "--ticket", *words)
        assert refused.code == 2
        assert "labctl health --ticket NODE" in refused.err + refused.out


def test_many_checks_without_access_are_one_line() -> None:
    """Render six unknown checks of one reason: four names and the number of the others."""
    conditions = tuple(unknown(f"check-{number}") for number in range(6))
    host = HostHealth(host="gpu-1", nodes=(), level="unknown", conditions=conditions)
    assert health.unknown_texts((host,)) == [
        "", "unknown  gpu-1: check-0, check-1, check-2, check-3 and 2 more: only root reads it"
    ]  # fmt: skip
