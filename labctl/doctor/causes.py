"""Causes among doctor's findings: those that follow from others, and those that one fix mends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from labctl.backends.finding import Finding

UP = "labctl up"
_UNREACHED = ("LAB-SSH-001", "LAB-SSH-002", "LAB-NET-005", "LAB-NET-007", "LAB-NODE-006")
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "LAB-NET-001": (*_UNREACHED, "LAB-NODE-003", "LAB-NET-004"),
    "LAB-KEY-001": ("LAB-SSH-001", "LAB-SSH-002", "LAB-KEY-002"),
    "LAB-KEY-002": ("LAB-SSH-001", "LAB-SSH-002"),
    "LAB-NODE-001": _UNREACHED,
    "LAB-NODE-002": _UNREACHED,
    "LAB-NODE-004": _UNREACHED,
    "LAB-SSH-001": ("LAB-NET-005", "LAB-NET-007"),
}
"""Codes that a code is the cause of, on the same node: its fix mends them, too, and theirs may not."""
BLOCKING = (
    *("LAB-DEVICE-002", "LAB-DEVICE-005", "LAB-DISK-004", "LAB-ENGINE-001", "LAB-ENGINE-002", "LAB-ENGINE-004"),
    *("LAB-FILES-002", "LAB-HOST-008", "LAB-IMAGE-001", "LAB-IMAGE-005", "LAB-LIMIT-002", "LAB-MOUNT-001"),
    *("LAB-NAME-001", "LAB-NAME-002", "LAB-NET-003", "LAB-PORT-002", "LAB-PORT-003", "LAB-PORT-004"),
    *("LAB-RUNTIME-001", "LAB-SHM-001"),
)
"""Codes of errors with which `labctl up` creates no nodes: they are mended before."""


class Problem(Struct, frozen=True):
    """Findings that one fix mends, and those that follow from them."""

    fix: str
    findings: tuple[Finding, ...]
    consequences: tuple[Finding, ...] = ()
    last: bool = False
    """True if another problem must be mended before, as `labctl up` would fail."""


def problems(findings: Iterable[Finding]) -> tuple[Problem, ...]:
    """Return what is not ok, grouped by fix, in the order in which to mend it: causes and errors first."""
    wrong = sorted((finding for finding in findings if finding.level != "ok"), key=lambda each: each.level != "error")
    blocked = any(finding.level == "error" and finding.code in BLOCKING for finding in wrong)
    causes = [finding for finding in wrong if not any(_causes(other, finding) for other in wrong)]
    by_fix: dict[str, list[Finding]] = {}
    for cause in causes:
        by_fix.setdefault(cause.fix, []).append(cause)
    grouped = [
        Problem(fix, tuple(of_fix), _consequences(of_fix, wrong), last=blocked and fix == UP)
        for fix, of_fix in by_fix.items()
    ]
    return tuple(sorted(grouped, key=lambda problem: problem.last))


def _consequences(causes: list[Finding], wrong: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings that follow from one of the causes, directly or by another finding."""
    following: list[Finding] = []
    pending = [*causes]
    while pending:
        cause = pending.pop()
        new = [other for other in wrong if _causes(cause, other) and other not in following]
        following += new
        pending += new
    return tuple(following)


def _causes(cause: Finding, other: Finding) -> bool:
    """Return True if a finding is the cause of another."""
    return cause.node == other.node and other.code in FOLLOWS.get(cause.code, ())
