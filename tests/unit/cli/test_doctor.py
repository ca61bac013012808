"""Output of `labctl doctor`."""

from __future__ import annotations

import io
import sys

import pytest

from labctl.backends.finding import Finding, error, ok, warn
from labctl.cli import host
from labctl.cli.host import advice, findings_table, live_rows, shown
from labctl.cli.output import Output
from labctl.doctor.report import DoctorReport

WELL = ok("LAB-HOST-001", "2 cores")
OPEN = warn("LAB-KEY-003", "others may read a key", "they may log in", "chmod 600 key", auto_fixable=True)


def missing(node: str) -> Finding:
    """Return the error of a node that is missing."""
    return error("LAB-NODE-001", "is missing", "a run needs every node", "labctl up", node=node)


def report(*findings: Finding, lab: str = "demo") -> DoctorReport:
    return DoctorReport(findings, lab=lab)


def test_only_what_is_not_ok_is_shown_unless_asked_for_all() -> None:
    """A table has the findings that are not ok, with -v all; without any there is no table."""
    assert shown((WELL, OPEN), verbose=False) == (OPEN,)
    assert shown((WELL, OPEN), verbose=True) == (WELL, OPEN)
    assert "others may read a key" in findings_table((OPEN,))
    assert findings_table(()) == ""


def test_a_lab_without_problems_is_said_to_be_well_in_one_line() -> None:
    assert advice(report(WELL, WELL)) == "no problems found: 2 checks passed"


def test_a_fix_of_several_nodes_is_printed_once_with_their_names() -> None:
    """Two missing nodes: one impact with both, one fix, and the count of all checks."""
    assert advice(report(WELL, missing("worker-0"), missing("worker-1"))).splitlines() == [
        "",
        "LAB-NODE-001 worker-0, worker-1: a run needs every node",
        "  fix: labctl up",
        "",
        "1 check passed, 2 errors",
    ]


def test_the_cause_is_first_and_what_follows_from_it_is_named_without_a_fix() -> None:
    """A node off the network that is not reached: `first:` with the fix of the network, and no restart."""
    network = error("LAB-NET-001", "is off", "no node reaches it", "labctl down && labctl up", node="worker-1")
    unreached = error("LAB-SSH-001", "not reached", "no ranks", "docker restart x", node="worker-1")
    text = advice(report(unreached, network))
    assert "  first: labctl down && labctl up\n  also fixes: LAB-SSH-001 worker-1\n" in text
    assert "docker restart" not in text


def test_up_is_named_after_what_stops_it() -> None:
    """A port in use, and a missing launcher: `fix:` of the port, and then `labctl up`."""
    taken = error("LAB-PORT-004", "in use", "not published", "sed -i x .env")
    lines = advice(report(missing("launcher"), taken)).splitlines()
    assert lines.index("  fix: sed -i x .env") < lines.index("  then: labctl up")


def test_fix_is_hinted_at_where_it_would_run_something() -> None:
    assert "labctl doctor --fix" in advice(report(OPEN))
    assert "--fix" not in advice(report(missing("worker-0")))


@pytest.mark.parametrize(
    ("finding", "begin"),
    [(WELL, "this machine is ready for a lab; "), (missing("local"), "this machine is not ready for a lab; ")],
)
def test_outside_a_lab_the_machine_is_judged_and_init_is_next(finding: Finding, begin: str) -> None:
    """The last lines say if the machine is ready, and `labctl init`."""
    first, hint = advice(report(finding, lab="")).splitlines()[-2:]
    assert first.startswith(begin)
    assert hint == "hint: labctl init mylab"


def test_on_a_terminal_findings_appear_as_checks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign comes before the first check has ended, and then a line per finding that is not ok."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    receive = live_rows(Output(), verbose=False)
    assert err.getvalue() == "checking ...\n"
    receive([WELL])
    assert out.getvalue() == ""
    receive([OPEN])
    assert out.getvalue() == "warn   LAB-KEY-003     local     others may read a key\n"


def test_impacts_are_broken_at_the_width_of_the_terminal_and_fixes_are_not() -> None:
    """Advise in 40 columns: the impact goes on below the code, the fix stays a line to copy."""
    fix = "docker run --rm --volume /srv:/srv busybox chmod 600 key"
    finding = warn("LAB-KEY-003", "open", "others may log in to every node", fix)
    assert advice(report(finding), 40).splitlines()[1:4] == [
        "LAB-KEY-003 local: others may log in to",
        "       every node",
        f"  fix: {fix}",
    ]


def test_rows_are_broken_at_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print a finding in 40 columns: its summary goes on below its code."""
    monkeypatch.setattr(host, "width_of", lambda _: 40)
    live_rows(Output(), verbose=False)([warn("LAB-KEY-003", "others may read a key", "", "")])
    assert capsys.readouterr().out == "warn   LAB-KEY-003     local     others\n       may read a key\n"
