"""Health of the hosts, as `labctl health` examines it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from labctl.backends import health
from labctl.backends.docker.checks.examination import HEALTH_SECONDS, CheckContext
from labctl.backends.finding import Finding, error, ok
from labctl.config import health_rules
from labctl.errors import ConfigError, Failures
from labctl.system import human
from labctl.system.process import CompletedProcess

CODE = "LAB-HEALTH-001"
JUDGING = 5.0
"""Seconds of the check's time that are left to judge what was read."""


def fit(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error per bad finding of `labctl health` on each host, or ok; nothing is kept."""
    contexts = {host.name: host for host in ((ctx,) if ctx.local else ctx.hosts)}

    def on_host(
        script: str, arguments: tuple[str, ...], seconds: float, hosts: Collection[str]
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run the script on the one host that is named. HostError if it does not end in time."""
        (name,) = hosts
        return {name: contexts[name].connection.run(script, *arguments, timeout=seconds, check=False)}, {}

    try:
        rules = health_rules.load(ctx.lab.directory)
    except ConfigError as failure:
        yield error(CODE, failure.message, "no host is examined", failure.hint or f"edit {health_rules.NAME}")
        return
    subjects = health.subjects_of(ctx.lab.accelerator)
    # `look` adds the time of own checks: a host that is silent has its finding before the check's own time is over.
    limit = HEALTH_SECONDS - JUDGING - max((own.seconds for own in rules.own_on), default=0.0)
    folders = health.folders_of(ctx.lab)
    snapshots, failed = health.look(on_host, tuple(contexts), subjects, rules, full=True, limit=limit, folders=folders)
    for verdict in health.judge(ctx.lab, snapshots, failed, rules):
        yield from _findings(ctx, verdict)


def _findings(ctx: CheckContext, verdict: health.HostHealth) -> Iterator[Finding]:
    """Yield an error for each bad condition that concerns a node, or for a host that is not read; else ok."""
    if verdict.error:
        yield error(CODE, verdict.error, "its health is unknown", f"labctl health {verdict.host}", node=verdict.host)
        return
    bad = [condition for condition in verdict.wrong if condition.level == "bad"]
    impact, is_fit = "runs on it may fail, or be slower than on the others", True
    for condition in bad:
        nodes = health.nodes_of(ctx.lab, verdict, condition)
        if nodes:
            node = verdict.host if nodes == verdict.nodes else nodes[0]
            yield error(CODE, condition.sentence(), impact, f"labctl health {node}", node=node)
            is_fit = False
    if is_fit:
        remarks = len(verdict.wrong) - len(bad)
        unknown = sum(condition.level == "unknown" for condition in verdict.conditions)
        parts = [human.count(len(verdict.conditions), "check"), f"{unknown} unknown", human.count(remarks, "remark")]
        shown = ", ".join(part for part in parts if not part.startswith("0 "))
        yield ok(CODE, f"host is fit: {shown} (labctl health)", verdict.host)
