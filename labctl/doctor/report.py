"""The answer of `labctl doctor`."""

from __future__ import annotations

from msgspec import Struct

from labctl.backends.finding import Finding


class AppliedFix(Struct, frozen=True):
    """A command that was run, and its exit code."""

    command: str
    code: int


class DoctorReport(Struct, frozen=True):
    """The findings of all checks, and the fixes that were applied before."""

    findings: tuple[Finding, ...]
    fixed: tuple[AppliedFix, ...] = ()
    lab: str = ""
    """Name of the lab; empty if this machine was examined without one."""
