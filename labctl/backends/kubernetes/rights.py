"""What labctl does in a namespace, and whether the server lets this person do it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from labctl.backends.finding import Finding
from labctl.backends.kubernetes.api import Refused, grant
from labctl.backends.kubernetes.examination import View, error, found_ok
from labctl.backends.kubernetes.target import Target
from labctl.system.parallel import pool

Rights = tuple[tuple[str, str], ...]
"""Verbs, with spaces between, and the resources that they are of."""
JOBS = {"mpijob": "mpijobs.kubeflow.org", "trainjob": "trainjobs.trainer.kubeflow.org"}
APPLIED = "list create patch delete"
AT_ONCE = 8
"""Reviews that the server is asked for at a time."""


def rights_of(target: Target) -> Rights:
    """What labctl does in a namespace."""
    return (
        (f"get {APPLIED}", JOBS[target.kind]),
        *([(APPLIED, "trainingruntimes.trainer.kubeflow.org")] if target.kind == "trainjob" else []),
        (APPLIED, "configmaps"),
        (f"get {APPLIED}" if target.pull_secret else APPLIED, "secrets"),
        (f"get {APPLIED}" if target.storage else "list", "persistentvolumeclaims"),
        ("get list delete", "pods"),
        ("get", "pods/log"),
        ("get create", "pods/exec"),
        ("list", "events"),
    )


def rights(view: View) -> Iterator[Finding]:
    """Whether this person may do all that labctl does."""
    try:
        missing = view.lab.api.get("Namespace", view.namespace) is None
    except Refused as refused:
        if refused.status != 403:
            raise
        # Who may work in a namespace alone may not look at it.
        missing = False
    if missing:
        yield from namespace_rights(view)
    yield from missing_rights(view, rights_of(view.target))


def namespace_rights(view: View) -> Iterator[Finding]:
    """Whether this person may create the namespace, which is missing."""
    if not denied(view, (("create patch", "namespaces"),)):
        yield found_ok("LAB-K8S-003", f"namespace {view.namespace} is created with the first run")
        return
    impact = "the first run would be refused"
    fix = f"ask who runs the cluster for: kubectl create namespace {view.namespace}; another: LAB_K8S_NAMESPACE in .env"
    yield error("LAB-K8S-003", f"namespace {view.namespace} not found, and you may not create it", impact, fix)


def rights_to_run(view: View) -> Iterator[Finding]:
    """Whether this person may submit a job, read its log and fetch its results."""
    yield from missing_rights(view, (("create", JOBS[view.target.kind]), ("get", "pods/log"), ("create", "pods/exec")))


def missing_rights(view: View, wanted: Rights) -> Iterator[Finding]:
    missing = denied(view, wanted)
    if not missing:
        yield found_ok("LAB-K8S-002", f"you may do all that labctl does in namespace {view.namespace}")
        return
    words = ", ".join(f"{'/'.join(verbs)} {resource}" for resource, verbs in missing.items())
    verbs = dict.fromkeys(verb for found in missing.values() for verb in found)
    fix = grant(",".join(verbs), ",".join(missing), view.namespace)
    summary = f"you may not, in namespace {view.namespace}: {words}"
    yield error("LAB-K8S-002", summary, "runs cannot be submitted, followed or removed", fix)


def denied(view: View, wanted: Rights) -> dict[str, list[str]]:
    """The resources with the verbs that this person may not use on them."""
    pairs = [(verb, resource) for verbs, resource in wanted for verb in verbs.split()]
    with pool(AT_ONCE) as threads:
        allowed = list(threads.map(lambda pair: may(view, *pair), pairs))
    missing: dict[str, list[str]] = defaultdict(list)
    for (verb, resource), yes in zip(pairs, allowed, strict=True):
        if not yes:
            missing[resource].append(verb)
    return missing


def may(view: View, verb: str, resource: str) -> bool:
    """Whether the server lets this person do so; ``resource`` as ``kubectl create role`` has it."""
    whole, _, subresource = resource.partition("/")
    name, _, group = whole.partition(".")
    asks = {"namespace": view.namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}
    kind = "SelfSubjectAccessReview"
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": {"resourceAttributes": asks}}
    return bool(view.lab.api.create(kind, body)["status"].get("allowed"))
