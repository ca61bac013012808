"""What the quotas of a namespace leave for a run.

Source: the Kubernetes documentation, Resource Quotas and Limit Ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from labctl.backends.finding import Finding
from labctl.backends.kubernetes.api import Manifest
from labctl.backends.kubernetes.capacity import Amounts, amount, number, numbers
from labctl.backends.kubernetes.examination import View, error, found_ok
from labctl.backends.kubernetes.render import LAUNCHER_REQUESTS, asked

PODS = ("pods", "count/pods")
# Where a quota has one of these, pods that do not say it are refused.
TO_BE_SAID = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")


def quotas(view: View) -> Iterator[Finding]:
    """Whether the namespace's quotas leave what a run asks for in all; and what they want every pod to say."""
    there = view.lab.api.list("ResourceQuota")
    asked_for = demand(view, view.lab.api.list("LimitRange")) if there else []
    found = [(one, asks) for one in there if (asks := counted(one, asked_for))]
    if not found:
        return
    unsaid, short = set(), []
    for quota, asks in found:
        hard, used = (quota.get("status", {}).get(key) or {} for key in ("hard", "used"))
        unsaid |= {name for name in hard if name in TO_BE_SAID and any(name not in one for _, one in asks)}
        for name, most in hard.items():
            wanted = sum(count * one.get(name, 0.0) for count, one in asks)
            left = number(most) - number(used.get(name, "0"))
            if wanted > left:
                short.append(f"{name} {amount(name, wanted)}, and {amount(name, left)} of {most} is left")
    names = ", ".join(quota["metadata"]["name"] for quota, _ in found)
    impact = "pods of the run would be refused"
    if unsaid:
        summary = f"quota {names} wants every pod to say its {', '.join(sorted(unsaid))}"
        fix = (
            f"LAB_K8S_CPU and LAB_MEMORY in .env, for the launcher a LimitRange with defaults: {view.typed} get limits"
        )
        yield error("LAB-K8S-008", summary, impact, fix)
    if short:
        fix = f"{view.typed} describe quota; ask for less: LAB_NODES, LAB_SLOTS, LAB_K8S_CPU, LAB_MEMORY in .env"
        yield error("LAB-K8S-008", f"quota {names}: the run asks for {'; '.join(short)}", impact, fix)
    if not unsaid and not short:
        yield found_ok("LAB-K8S-008", f"quota {names} leaves what a run asks for")


def counted(quota: Manifest, asks: list[tuple[int, Amounts]]) -> list[tuple[int, Amounts]]:
    """What of a run a quota counts, by its scopes: pods of jobs have no time limit of their own, nor a priority."""
    selected = quota["spec"].get("scopeSelector", {}).get("matchExpressions", [])
    scopes = {*quota["spec"].get("scopes", []), *(one["scopeName"] for one in selected)}
    if scopes - {"NotTerminating", "NotBestEffort", "BestEffort"}:
        return []
    # A pod that asks for neither is one of best effort, whatever devices it asks for.
    other = {True: "BestEffort", False: "NotBestEffort"}
    return [(count, one) for count, one in asks if other[bool({"cpu", "memory"} & one.keys())] not in scopes]


def demand(view: View, ranges: list[Manifest]) -> list[tuple[int, Amounts]]:
    """What a run asks for by the names of quotas: so many workers, its launcher, and the claim if it is yet to be made.

    With the defaults of the namespace's LimitRanges. Source: the Kubernetes documentation, Resource Quotas.
    """
    worker = asked(view.target, view.slots)
    found: list[tuple[int, Amounts]] = [
        (view.workers, names_of_quotas(worker, worker, ranges)),
        (1, names_of_quotas(LAUNCHER_REQUESTS, {}, ranges)),
    ]
    if view.target.storage and not view.claim:
        claims = {"requests.storage": number(view.target.storage), "persistentvolumeclaims": 1.0}
        # What is no pod has nothing to say of cores and memory.
        found.append((1, dict.fromkeys(TO_BE_SAID, 0.0) | claims))
    return found


def names_of_quotas(requests: Mapping[str, str], limits: Mapping[str, str], ranges: list[Manifest]) -> Amounts:
    """What a pod asks for, as quotas count it."""
    defaults = [one for limit in ranges for one in limit["spec"]["limits"] if one["type"] == "Container"]
    for one in defaults:
        limits = {**one.get("default", {}), **limits}
        requests = {**one.get("defaultRequest", {}), **requests}
    wanted = numbers({**limits, **requests})
    counted = {f"limits.{name}": many for name, many in numbers(limits).items()}
    return {
        **counted,
        **{f"requests.{name}": many for name, many in wanted.items()},
        **wanted,
        **dict.fromkeys(PODS, 1.0),
    }
