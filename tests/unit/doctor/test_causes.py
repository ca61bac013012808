"""Causes among findings, and the order in which to mend them."""

from __future__ import annotations

from labctl.backends.finding import Finding, error, ok, warn
from labctl.doctor import causes


def found(code: str, node: str = "worker-1", fix: str = "labctl up") -> Finding:
    """Return an error of a node with its fix."""
    return error(code, "wrong", "bad", fix, node=node)


def test_a_fix_of_many_nodes_is_one_problem() -> None:
    """Three missing keys with one fix are one problem; ok findings are none."""
    findings = [ok("LAB-HOST-001", "well"), *(found("LAB-KEY-001", f"worker-{number}") for number in range(3))]
    (problem,) = causes.problems(findings)
    assert [finding.node for finding in problem.findings] == ["worker-0", "worker-1", "worker-2"]
    assert (problem.fix, problem.consequences, problem.last) == ("labctl up", (), False)


def test_what_follows_from_a_cause_has_no_fix_of_its_own() -> None:
    """worker-1 off the network is not reached, and slow: one problem, that of the network; worker-0's is another."""
    rebuilt, restart = "docker rm -f x && labctl up", "docker restart x"
    unreached = [found("LAB-SSH-001", fix=restart), found("LAB-NET-005", fix="labctl down")]
    other = found("LAB-SSH-001", "worker-0", "docker restart y")
    first, second = causes.problems([*unreached, other, found("LAB-NET-001", fix=rebuilt)])
    assert {first.fix, second.fix} == {rebuilt, "docker restart y"}
    network = first if first.fix == rebuilt else second
    assert network.consequences == tuple(unreached)


def test_a_host_key_that_was_edited_is_mended_before_the_login() -> None:
    """LAB-KEY-002 is the cause of LAB-SSH-002 on its node."""
    (problem,) = causes.problems([found("LAB-SSH-002", fix="docker restart x"), found("LAB-KEY-002")])
    assert [finding.code for finding in problem.findings] == ["LAB-KEY-002"]


def test_up_comes_after_what_stops_it() -> None:
    """A port in use stops `up`: its problem comes before the missing launcher's, which is last."""
    taken = found("LAB-PORT-004", "local", "sed -i x .env")
    first, second = causes.problems([found("LAB-NODE-001", "launcher"), taken])
    assert (first.findings, first.last) == ((taken,), False)
    assert (second.fix, second.last) == ("labctl up", True)


def test_an_error_of_health_is_not_hidden_by_a_mount() -> None:
    """A mount that is not writable and a bad device of one host are two problems, each with its fix."""
    findings = [
        warn("LAB-MOUNT-002", "wrong", "bad", "chown x", node="local"),
        found("LAB-HEALTH-001", "local", "ticket"),
    ]
    assert [problem.fix for problem in causes.problems(findings)] == ["ticket", "chown x"]


def test_errors_come_before_warnings() -> None:
    """A warning that was found first is mended after an error."""
    problems = causes.problems([warn("LAB-KEY-003", "wrong", "bad", "chmod"), found("LAB-NODE-001")])
    assert [problem.findings[0].code for problem in problems] == ["LAB-NODE-001", "LAB-KEY-003"]
