"""Checks of the user's rights to what labctl does in a namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from labctl.backends.finding import Finding
from labctl.backends.kubernetes.api import Refused, grant
from labctl.backends.kubernetes.examination import View, error, found_ok
from labctl.backends.kubernetes.target import Target
from labctl.system.parallel import pool

Rights = tuple[tuple[str, str], ...]
"""Pairs of verbs, separated by spaces, and their resource."""
JOBS = {"mpijob": "mpijobs.kubeflow.org", "trainjob": "trainjobs.trainer.kubeflow.org"}
APPLIED = "list create patch delete"
AT_ONCE = 8
"""Concurrent access reviews."""


def rights_of(target: Target) -> Rights:
    """Return the verbs and resources that labctl needs in a namespace, by kind of job and storage."""
    return (
        (f"get {APPLIED}", JOBS[target.kind]),
        *([(APPLIED, "trainingruntimes.trainer.kubeflow.org")] if target.kind == "trainjob" else []),
        (APPLIED, "configmaps"),
        (f"get {APPLIED}" if target.pull_secret else APPLIED, "secrets"),
        (f"get {APPLIED}" if target.storage else "list", "persistentvolumeclaims"),
        # A pod fills the claim.
        (f"get {APPLIED}" if target.storage else "get list delete", "pods"),
        ("get", "pods/log"),
        ("get create", "pods/exec"),
        ("list", "events"),
    )


def rights(view: View) -> Iterator[Finding]:
    """Yield ok or an error on the rights that labctl needs, also to create a missing namespace."""
    try:
        missing = view.lab.api.get("Namespace", view.namespace) is None
    except Refused as refused:
        if refused.status != 403:
            raise
        # Users with rights in one namespace only cannot get the namespace itself.
        missing = False
    if missing:
        yield from namespace_rights(view)
    yield from missing_rights(view, rights_of(view.target))


def namespace_rights(view: View) -> Iterator[Finding]:
    """Yield ok, or an error if the user may not create the namespace, which does not exist."""
    if not denied(view, (("create patch", "namespaces"),)):
        yield found_ok("LAB-K8S-003", f"namespace {view.namespace} is created with the first run")
        return
    impact = "the first run would be refused"
    fix = f"ask who runs the cluster for: kubectl create namespace {view.namespace}; another: LAB_K8S_NAMESPACE in .env"
    yield error("LAB-K8S-003", f"namespace {view.namespace} not found, and you may not create it", impact, fix)


def rights_to_run(view: View) -> Iterator[Finding]:
    """Yield ok or an error on the rights to submit a job, read its log and fetch its results."""
    yield from missing_rights(view, (("create", JOBS[view.target.kind]), ("get", "pods/log"), ("create", "pods/exec")))


def missing_rights(view: View, needed: Rights) -> Iterator[Finding]:
    """Yield ok, or an error with the rights that the user lacks and the commands that grant them."""
    missing = denied(view, needed)
    if not missing:
        yield found_ok("LAB-K8S-002", f"you may do all that labctl needs in namespace {view.namespace}")
        return
    actions = ", ".join(f"{'/'.join(verbs)} {resource}" for resource, verbs in missing.items())
    verbs = dict.fromkeys(chain.from_iterable(missing.values()))
    fix = grant(",".join(verbs), ",".join(missing), view.namespace)
    summary = f"you may not, in namespace {view.namespace}: {actions}"
    yield error("LAB-K8S-002", summary, "runs cannot be submitted, followed or removed", fix)


def denied(view: View, needed: Rights) -> dict[str, list[str]]:
    """Ask the API server for each right, AT_ONCE at a time; return the denied verbs by resource."""
    pairs: list[tuple[str, str]] = []
    for verbs, resource in needed:
        pairs += [(verb, resource) for verb in verbs.split()]
    with pool(AT_ONCE) as threads:
        allowed = list(threads.map(lambda pair: may(view, *pair), pairs))
    missing: dict[str, list[str]] = defaultdict(list)
    for (verb, resource), yes in zip(pairs, allowed, strict=True):
        if not yes:
            missing[resource].append(verb)
    return missing


def may(view: View, verb: str, resource: str) -> bool:
    """Ask the API server by SelfSubjectAccessReview if the user may use a verb on a resource."""
    whole, _, subresource = resource.partition("/")
    name, _, group = whole.partition(".")
    asks = {"namespace": view.namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}
    kind = "SelfSubjectAccessReview"
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": {"resourceAttributes": asks}}
    return bool(view.lab.api.create(kind, body)["status"].get("allowed"))
