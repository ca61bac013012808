"""Outcomes of the steps of a validation, in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from labctl.batches.alone import Trial
from labctl.batches.evidence import Verdict
from labctl.batches.together import GroupTrial
from labctl.reports.validation import Figure
from labctl.system import human

NOT_JUDGED = "not judged: nothing to compare with"


class Outcome(NamedTuple):
    """Result of a validation step: status, message, advice, and id of its run."""

    status: Literal["passed", "failed", "unsure", "skipped"]
    message: str = ""
    advice: str = ""
    run_id: str = ""


WORST: tuple[tuple[Verdict, Literal["failed", "unsure"]], ...] = (("bad", "failed"), ("unsure", "unsure"))


def of_groups(trial: GroupTrial) -> Outcome:
    """Return a check's outcome: failed with the first bad groups, else unsure ones, else passed with figures."""
    for verdict, status in WORST:
        if groups := trial.of(verdict):
            texts = [f"{', '.join(group)}: {trial.why(group)}" for group in groups[:3]]
            message = f"{len(groups)} of {len(trial.runs)} runs: {'; '.join(texts)}"
            return Outcome(status, message, run_id=trial.runs[groups[0]][-1].run_id)
    last = trial.last()
    summary = _summary(trial.figures()) or human.count(len(last), "run")
    if trial.check.limits and not trial.bounds:
        summary += f"; {NOT_JUDGED}"
    return Outcome("passed", summary, run_id=last[0].run_id if len(last) == 1 else "")


def of_nodes(trial: Trial, verdicts: Mapping[str, Verdict]) -> Outcome:
    """Return a check's outcome: failed with the first bad nodes, else unsure ones, else passed with figures."""
    for verdict, status in WORST:
        nodes = [node for node, of_node in verdicts.items() if of_node == verdict]
        if nodes:
            texts = [f"{node}: {against(trial, node)}" for node in nodes[:3]]
            run_id = trial.runs[nodes[0]][-1].run_id
            return Outcome(status, f"{len(nodes)} of {len(verdicts)} nodes: {'; '.join(texts)}", run_id=run_id)
    parts = [_summary(trial.figures()) or human.count(len(verdicts), "run")]
    if recovered := trial.recovered():
        parts.append(f"{', '.join(recovered)} passed when run again")
    if not trial.is_judged:
        parts.append(NOT_JUDGED)
    return Outcome("passed", "; ".join(parts))


def against(trial: Trial, node: str) -> str:
    """Return in a line what speaks against a node: its failed runs, else its unequal, bad or missing figures."""
    return trial.failing().get(node) or "; ".join(trial.texts(node))


def _summary(judged: Sequence[Figure]) -> str:
    """Render each metric's span of values, as ``memory 11.2 to 12.1 GB/s``; empty without figures."""
    parts = []
    for metric in dict.fromkeys(figure.what for figure in judged):
        of_metric = [figure for figure in judged if figure.what == metric]
        values = [figure.value for figure in of_metric if figure.value is not None]
        parts.append(f"{metric} {human.span(values)} {of_metric[0].unit}".rstrip())
    return ", ".join(parts)
