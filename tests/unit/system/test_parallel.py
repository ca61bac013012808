"""Concurrent work on hosts, of which some fail."""

from __future__ import annotations

import threading

import pytest

from labctl.errors import ConfigError
from labctl.system.parallel import map_hosts


def test_what_files_and_settings_cause_is_the_hosts_failure() -> None:
    """Work on three hosts, two fail: results and failures by host, with host, reason and hint."""

    def work(error: Exception | None) -> str:
        """Raise the error, if any; else return "done"."""
        if error:
            raise error
        return "done"

    reasons = {"h1": ConfigError("bad", hint="mend it"), "h2": None, "h3": PermissionError(13, "denied", "/lab")}
    done, failures = map_hosts(work, reasons)
    assert done == {"h2": "done"}
    assert [(name, str(why), why.hint, why.node) for name, why in failures.items()] == [
        ("h1", "h1: bad", "mend it", "h1"),
        ("h3", "h3: [Errno 13] denied: '/lab'", "", "h3"),
    ]


def test_this_machines_failure_names_no_host() -> None:
    """Fail on "local": the message has no host."""

    def work(_: str) -> None:
        """Raise PermissionError."""
        raise PermissionError(13, "denied")

    assert str(map_hosts(work, {"local": ""})[1]["local"]) == "[Errno 13] denied"


def test_a_bug_is_raised_once_the_others_are_done() -> None:
    """Raise ZeroDivisionError on one host: raised after the others are done."""
    raised, done = threading.Event(), list[str]()

    def work(name: str) -> None:
        """Raise ZeroDivisionError for h1; else wait and record the name."""
        if name == "h1":
            raise ZeroDivisionError
        # Time for the bug to come to light first.
        raised.wait(0.3)
        done.append(name)

    with pytest.raises(ZeroDivisionError):
        map_hosts(work, {"h1": "h1", "h2": "h2"})
    assert done == ["h2"]
