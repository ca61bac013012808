"""Read hosts, all at the same time, each for as long as it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from labctl.errors import Failures, HostError
from labctl.health import script
from labctl.health.model import Rules, Snapshot, Subject
from labctl.system import hostdump
from labctl.system.parallel import run_with_deadlines
from labctl.system.process import CompletedProcess

SECONDS = 8.0
"""Time limit of a host: the script takes below a second, vendors' tools a few."""

RunOnHosts = Callable[[str, tuple[str, ...], float, Collection[str]], tuple[Mapping[str, CompletedProcess], Failures]]
"""Runs a script with arguments, for some seconds at most, on the hosts of these names, as ``Backend.on_hosts``."""


def look(
    on_hosts: RunOnHosts, hosts: Sequence[str], subjects: Sequence[Subject], rules: Rules, *, full: bool
) -> tuple[dict[str, Snapshot], dict[str, HostError]]:
    """Read hosts; return snapshots by host, and an error for each that does not answer in time."""
    own = sum(check.seconds for check in rules.own)
    seconds = SECONDS + own
    text = script.script(subjects, rules, full=full)

    def read(host: str) -> Snapshot:
        """Read a host. HostError if it cannot be reached, or if its answer is not whole."""
        sent = time.time()
        done, failed = on_hosts(text, (), seconds, (host,))
        received = time.time()
        if host not in done:
            raise failed.get(host, HostError(f"{host} was not read", hint="labctl doctor", node=host))
        dump = hostdump.read(done[host].out, host)
        return script.snapshot(dump, subjects, rules, sent=sent, received=received)

    def attempt(host: str) -> Snapshot | HostError:
        """Return a host's snapshot, or why there is none."""
        try:
            return read(host)
        except HostError as error:
            return error

    answers = run_with_deadlines([(partial(attempt, host), seconds) for host in hosts], width=len(hosts) or 1)
    snapshots = {host: answer for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, Snapshot)}
    errors = {host: answer for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, HostError)}
    for host in hosts:
        if host not in snapshots and host not in errors:
            text = f"{host} did not answer within {seconds:g} s"
            errors[host] = HostError(text, hint=f"labctl doctor --node {host}", node=host)
    return snapshots, errors
