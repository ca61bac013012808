"""Evidence of a validation against nodes, hosts and links, and the verdicts that follow from it."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, NamedTuple

from labctl.model import HERE
from labctl.reports.validation import HEALTH, Health, LinkVerdict, NodeVerdict, StepResult


class Evidence(NamedTuple):
    """Evidence of a step against a node or host, and advice; with the run that shows it, or the logs of several."""

    health: Health
    text: str
    advice: str
    run_id: str = ""
    logs: str = ""


class Verdicts:
    """Nodes and links of a validation, with the evidence against them."""

    def __init__(self) -> None:
        """Start without nodes or evidence."""
        self.evidence: defaultdict[str, list[Evidence]] = defaultdict(list)
        """Per node or host."""
        self.links: list[LinkVerdict] = []
        self.placement: dict[str, str] = {}
        """Host per node."""
        self.slots: dict[str, int] = {}
        """Slots per node that is up."""
        self.tested: set[str] = set()
        """Nodes that were in a run that passed."""
        self.steps: list[StepResult] = []
        self.interrupted = False

    def accuse(self, name: str, health: Health, text: str, advice: str, *, run_id: str = "", logs: str = "") -> None:
        """Append evidence of this health, with text and advice, to a node or host."""
        self.evidence[name].append(Evidence(health, text, advice, run_id, logs))

    def evidence_of(self, node: str) -> list[Evidence]:
        """Return evidence against a node and its host, worst first, but not of this machine as a host."""
        host = self.placement.get(node, "")
        on_host = self.evidence[host] if host not in ("", HERE, node) else []
        return sorted([*self.evidence[node], *on_host], key=lambda item: HEALTH.index(item.health))

    def health(self, node: str) -> Health | None:
        """Return the worst health that the evidence against a node shows; None without evidence."""
        return next((item.health for item in self.evidence_of(node)), None)

    def node_verdicts(self) -> tuple[NodeVerdict, ...]:
        """Return a verdict for each node, and for hosts with evidence but no node, and this machine."""
        others = {*self.placement.values()} - {HERE}
        hosts = [name for name, items in self.evidence.items() if items and name not in others]
        return tuple(map(self.node_verdict, dict.fromkeys((*self.placement, *hosts))))

    def node_verdict(self, node: str) -> NodeVerdict:
        """Return a node's verdict: not reached if not up, else the worst evidence, unsure if untested, good."""
        against = self.evidence_of(node)
        if not against and node not in self.tested:
            against = [Evidence("unsure", "no run on it passed", "")]
        verdict: Health = against[0].health if against else "good"
        if node in self.placement and node not in self.slots:
            verdict = "not reached"
        return NodeVerdict(
            node=node,
            host=self.placement.get(node, node),
            verdict=verdict,
            evidence=tuple(dict.fromkeys(item.text for item in against)),
            advice=against[0].advice if against else "",
            runs=tuple(dict.fromkeys(item.run_id for item in against if item.run_id)),
            logs=tuple(dict.fromkeys(item.logs for item in against if item.logs)),
        )

    @property
    def verdict(self) -> Literal["PASS", "FAIL", "UNSURE", "ERROR"]:
        """Return ERROR after Ctrl-C or without nodes up, else FAIL, UNSURE or PASS by steps, then nodes."""
        if self.interrupted or not self.slots:
            return "ERROR"
        if any(step.status == "failed" for step in self.steps):
            return "FAIL"
        if any(step.status == "unsure" for step in self.steps):
            return "UNSURE"
        return "PASS" if all(node.verdict == "good" for node in self.node_verdicts()) else "FAIL"

    def message(self) -> str:
        """Summarise the validation in a sentence: worst nodes and links, else the first failed or unsure step."""
        if self.interrupted:
            return "Interrupted."
        if self.verdict == "PASS":
            return f"All {len(self.slots)} nodes are good." if len(self.slots) > 1 else "The node is good."
        nodes = [node for node in self.node_verdicts() if node.verdict != "good"]
        worst = sorted(nodes, key=lambda node: HEALTH.index(node.verdict))
        parts = [_accusation(node.node, node) for node in worst if node.verdict != "unsure"][:3]
        parts += [_accusation(f"the link {link.a} - {link.b}", link) for link in self.links][:3]
        if parts:
            return f"{'; '.join(parts)}."
        failed = next((step for step in self.steps if step.status == "failed"), None)
        unsure = next((step for step in self.steps if step.status == "unsure"), None)
        if failed:
            parts = [f"step {failed.name} failed: {failed.message}"]
        elif nodes:
            parts = [_accusation(node.node, node) for node in nodes[:3]]
        elif unsure:
            parts = [f"step {unsure.name} is unsure: {unsure.message}"]
        return f"{'; '.join(parts)}."


def _accusation(name: str, verdict: NodeVerdict | LinkVerdict) -> str:
    """Render the verdict on a node or link with its worst evidence."""
    return f"{name} is {verdict.verdict}: {verdict.evidence[0]}"
