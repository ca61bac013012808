"""Check of a namespace's quotas against the requests of a run.

Source: the Kubernetes documentation, Resource Quotas and Limit Ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from labctl.backends.finding import Finding
from labctl.backends.kubernetes.api import Manifest
from labctl.backends.kubernetes.capacity import Amounts, amount, number, numbers
from labctl.backends.kubernetes.examination import View, error, found_ok
from labctl.backends.kubernetes.render import LAUNCHER_REQUESTS, asked

PODS = ("pods", "count/pods")
# A quota on one of these refuses pods that do not set it.
TO_BE_SAID = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")


def quotas(view: View) -> Iterator[Finding]:
    """Yield ok, or errors if quotas lack room for a run or want what its pods do not set; nothing without quotas."""
    listed = view.lab.api.list("ResourceQuota")
    demands = demand(view, view.lab.api.list("LimitRange")) if listed else []
    counting = [(quota, asks) for quota in listed if (asks := counted(quota, demands))]
    if not counting:
        return
    unsaid: set[str] = set()
    short: list[str] = []
    for quota, asks in counting:
        unsaid.update(_unset(quota, asks))
        short += _short(quota, asks)
    names = ", ".join(quota["metadata"]["name"] for quota, _ in counting)
    impact = "pods of the run would be refused"
    if unsaid:
        summary = f"quota {names} requires every pod to set {', '.join(sorted(unsaid))}"
        fix = (
            f"LAB_K8S_CPU and LAB_MEMORY in .env; for the launcher a LimitRange with defaults: {view.typed} get limits"
        )
        yield error("LAB-K8S-008", summary, impact, fix)
    if short:
        fix = f"{view.typed} describe quota; ask for less: LAB_NODES, LAB_SLOTS, LAB_K8S_CPU, LAB_MEMORY in .env"
        yield error("LAB-K8S-008", f"quota {names}: the run asks for {'; '.join(short)}", impact, fix)
    if not unsaid and not short:
        yield found_ok("LAB-K8S-008", f"quota {names} has room for a run")


def _unset(quota: Manifest, asks: list[tuple[int, Amounts]]) -> Iterator[str]:
    """Yield the resources that a quota requires every pod to set and some pod of the run does not."""
    for name in quota.get("status", {}).get("hard") or {}:
        if name in TO_BE_SAID and any(name not in request for _, request in asks):
            yield name


def _short(quota: Manifest, asks: list[tuple[int, Amounts]]) -> Iterator[str]:
    """Yield a text per amount of which the run asks for more than the quota has left."""
    hard, used = (quota.get("status", {}).get(key) or {} for key in ("hard", "used"))
    for name, most in hard.items():
        total = sum(count * request.get(name, 0.0) for count, request in asks)
        left = number(most) - number(used.get(name, "0"))
        if total > left:
            yield f"{name} {amount(name, total)}, and {amount(name, left)} of {most} is left"


def counted(quota: Manifest, asks: list[tuple[int, Amounts]]) -> list[tuple[int, Amounts]]:
    """Return the requests that a quota counts by its scopes; [] if it is for deadlines or priorities."""
    selected = quota["spec"].get("scopeSelector", {}).get("matchExpressions", [])
    scopes = {*quota["spec"].get("scopes", []), *(expression["scopeName"] for expression in selected)}
    if scopes - {"NotTerminating", "NotBestEffort", "BestEffort"}:
        return []
    # A pod that requests neither is BestEffort, whatever devices it requests.
    other = {True: "BestEffort", False: "NotBestEffort"}
    return [
        (count, request) for count, request in asks if other[bool({"cpu", "memory"} & request.keys())] not in scopes
    ]


def demand(view: View, ranges: list[Manifest]) -> list[tuple[int, Amounts]]:
    """Return count and amounts of a run's workers, of its launcher and, if there is none yet, of its claim.

    Named as in quotas, with the defaults of the namespace's LimitRanges. Source: the Kubernetes documentation,
    Resource Quotas.
    """
    worker = asked(view.target, view.slots)
    requests: list[tuple[int, Amounts]] = [
        (view.workers, names_of_quotas(worker, worker, ranges)),
        (1, names_of_quotas(LAUNCHER_REQUESTS, {}, ranges)),
    ]
    if view.target.storage and not view.claim:
        claims = {"requests.storage": number(view.target.storage), "persistentvolumeclaims": 1.0}
        # A claim need not set cores and memory.
        requests.append((1, dict.fromkeys(TO_BE_SAID, 0.0) | claims))
    return requests


def names_of_quotas(requests: Mapping[str, str], limits: Mapping[str, str], ranges: list[Manifest]) -> Amounts:
    """Return a pod's requests and limits by their names in quotas, with defaults of LimitRanges."""
    limit_items = chain.from_iterable(limit_range["spec"]["limits"] for limit_range in ranges)
    for default in (item for item in limit_items if item["type"] == "Container"):
        limits = {**default.get("default", {}), **limits}
        requests = {**default.get("defaultRequest", {}), **requests}
    amounts = numbers({**limits, **requests})
    limited = {f"limits.{name}": many for name, many in numbers(limits).items()}
    requested = {f"requests.{name}": many for name, many in amounts.items()}
    return {**limited, **requested, **amounts, **dict.fromkeys(PODS, 1.0)}
