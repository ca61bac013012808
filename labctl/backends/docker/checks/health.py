"""Health of the hosts, as `labctl health` examines it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from labctl.backends import health
from labctl.backends.docker.checks.examination import HEALTH_SECONDS, CheckContext
from labctl.backends.finding import Finding, error, ok, warn
from labctl.config import health_rules
from labctl.errors import Failures
from labctl.system import human
from labctl.system.process import CompletedProcess

CODE = "LAB-HEALTH-001"
JUDGING = 5.0
"""Seconds of the check's time that are left to judge what was read."""


def fit(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error or a warning per finding of `labctl health` on each host, or ok; nothing is kept."""
    contexts = {host.name: host for host in ((ctx,) if ctx.local else ctx.hosts)}

    def on_host(
        script: str, arguments: tuple[str, ...], seconds: float, hosts: Collection[str]
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run the script on the one host that is named. HostError if it does not end in time."""
        (name,) = hosts
        return {name: contexts[name].connection.run(script, *arguments, timeout=seconds, check=False)}, {}

    rules, subjects = health_rules.load(ctx.lab.directory), health.subjects_of(ctx.lab.accelerator)
    # `look` adds the time of own checks: a host that is silent has its finding before the check's own time is over.
    limit = HEALTH_SECONDS - JUDGING - sum(own.seconds for own in rules.own)
    folders = health.folders_of(ctx.lab)
    snapshots, failed = health.look(on_host, tuple(contexts), subjects, rules, full=True, limit=limit, folders=folders)
    for verdict in health.judge(ctx.lab, snapshots, failed, rules):
        yield from _findings(ctx, verdict)


def _findings(ctx: CheckContext, verdict: health.HostHealth) -> Iterator[Finding]:
    """Yield the findings about a host."""
    impact = "runs on it may fail, or be slower than on the others"
    for condition in verdict.wrong:
        (node, *_) = health.nodes_of(ctx.lab, verdict, condition) or (verdict.host,)
        level = error if condition.level == "bad" else warn
        yield level(CODE, condition.sentence(), impact, f"labctl health {node}", node=node)
    if verdict.error:
        yield error(CODE, verdict.error, "its health is unknown", f"labctl health {verdict.host}", node=verdict.host)
    elif not verdict.wrong:
        unknown = sum(condition.level == "unknown" for condition in verdict.conditions)
        checks = human.count(len(verdict.conditions), "check")
        text = f"is fit: {checks}" + (f", {unknown} unknown" if unknown else "")
        yield ok(CODE, text, verdict.host)
