"""A cluster without the user's permissions or a run's requirements: exit code 3, and the command to fix it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import FreshLab
from kubernetes import config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError
from support.harness import Answer, Lab, wait_until
from support.operator import fresh_namespace

pytestmark = [pytest.mark.docker, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
PERSON = "person"
ALL = {
    "": ["configmaps", "secrets", "pods", "pods/log", "pods/exec", "events", "persistentvolumeclaims"],
    "kubeflow.org": ["mpijobs"],
    "trainer.kubeflow.org": ["trainjobs", "trainingruntimes"],
}
"""Resources of a lab by API group."""


class Cluster:
    """A namespace, a user with the rights that a test grants, and the job definitions."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        """Connect as the cluster's administrator and create a service account without rights in the namespace."""
        self.kubeconfig, self.namespace = kubeconfig, namespace
        self.api = DynamicClient(config.new_client_from_config(config_file=str(kubeconfig)))
        self._kind("ServiceAccount").create(body={"metadata": {"name": PERSON}}, namespace=namespace)

    def _kind(self, kind: str, version: str = "v1") -> Any:
        return self.api.resources.get(api_version=version, kind=kind)

    def grant(self, rights: dict[str, list[str]], verbs: str = "get list create patch delete") -> None:
        """Grant the user these verbs on these resources, by API group, with a role in the namespace."""
        rules = [{"apiGroups": [of], "resources": names, "verbs": verbs.split()} for of, names in rights.items()]
        group = "rbac.authorization.k8s.io"
        subject = {"kind": "ServiceAccount", "name": PERSON, "namespace": self.namespace}
        reference = {"apiGroup": group, "kind": "Role", "name": PERSON}
        made = {"metadata": {"name": PERSON}}
        self._kind("Role", f"{group}/v1").create(body={**made, "rules": rules}, namespace=self.namespace)
        binding = {**made, "roleRef": reference, "subjects": [subject]}
        self._kind("RoleBinding", f"{group}/v1").create(body=binding, namespace=self.namespace)

    def persons_token(self) -> str:
        """Return a new token of the user's service account."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{PERSON}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.api.request("POST", path, body=body).status.token)

    def forget_person(self) -> None:
        """Delete the user's service account, which invalidates its tokens as if expired."""
        self._kind("ServiceAccount").delete(name=PERSON, namespace=self.namespace)

    @contextlib.contextmanager
    def serving(self, *versions: str) -> Iterator[None]:
        """Make the cluster serve just these versions of MPIJob in the block; wait for that; restore them after it."""
        definitions = self._kind("CustomResourceDefinition", "apiextensions.k8s.io/v1")
        name = "mpijobs.kubeflow.org"
        before = definitions.get(name=name).to_dict()["spec"]["versions"]
        given = copy.deepcopy(before)
        for version in given:
            version["served"] = version["name"] in versions
        schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
        existing = {version["name"] for version in given}
        given += [
            {"name": version, "served": True, "storage": False, "schema": schema}
            for version in versions
            if version not in existing
        ]
        self._set_versions(definitions, name, given)
        try:
            wait_until(lambda: self.served() == {*versions}, 60, f"only {versions} is served")
            yield
        finally:
            self._set_versions(definitions, name, before)
            wait_until(
                lambda: self.served() == {version["name"] for version in before if version["served"]},
                60,
                "all is as it was",
            )

    def _set_versions(self, definitions: Any, name: str, versions: list[dict[str, Any]]) -> None:
        """Replace the versions in a custom resource definition."""
        body = {"metadata": {"name": name}, "spec": {"versions": versions}}
        definitions.patch(name=name, body=body, content_type="application/merge-patch+json")

    def served(self) -> set[str]:
        """Return the versions of MPIJob that the API server lists as served."""
        groups = self.api.request("GET", "/apis").to_dict()["groups"]
        versions = [at["version"] for group in groups if group["name"] == "kubeflow.org" for at in group["versions"]]
        return {version for version in versions if "mpijobs" in self._resources(version)}

    def _resources(self, version: str) -> list[str]:
        """List the resources of a version; empty if it is just being removed."""
        try:
            resources = self.api.request("GET", f"/apis/kubeflow.org/{version}").to_dict()["resources"]
        except NotFoundError:
            return []
        return [resource["name"] for resource in resources]


@pytest.fixture
def cluster(kubeconfig: Path) -> Iterator[Cluster]:
    """Yield a Cluster in a new namespace."""
    with fresh_namespace(kubeconfig) as namespace:
        yield Cluster(kubeconfig, namespace)


Labs = Callable[..., Lab]


@pytest.fixture
def lab_of(cluster: Cluster, fresh_lab: FreshLab, tmp_path: Path) -> Labs:
    """Return a function that makes a lab in the namespace for a token's owner, or for the administrator."""

    def make(token: str = "", **settings: str) -> Lab:
        """Write a kubeconfig with the token, if any, and return a new lab of the namespace that uses it."""
        content = yaml.safe_load(cluster.kubeconfig.read_text())
        if token:
            content["users"][0]["user"] = {"token": token}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
        lab = fresh_lab(LAB_ENGINE="kubernetes", LAB_K8S_NAMESPACE=cluster.namespace, **settings)
        lab.environ["KUBECONFIG"] = str(tmp_path / "kubeconfig")
        return lab

    return make


def refused(lab: Lab) -> Answer:
    """Assert that `run` and `doctor` exit with 3 and that no run is recorded; return the answer of `run`."""
    answer = lab.call("run", "hello-mpi").expect(3)
    assert lab.run_ids() == []
    lab.call("doctor").expect(3)
    return answer


def test_missing_rights_are_named_with_the_role_that_grants_them(cluster: Cluster, lab_of: Labs) -> None:
    """Without rights on mpijobs: exit code 3, the missing verbs, and a `kubectl create role`."""
    cluster.grant({**ALL, "kubeflow.org": ["mpijobs/status"]})
    lab = lab_of(cluster.persons_token())
    answer = refused(lab)
    assert "you may not, in namespace" in answer.err
    assert "create mpijobs.kubeflow.org" in answer.err
    assert f"kubectl -n {cluster.namespace} create role" in answer.err
    findings = lab.call("doctor", "--json").expect(3).json["findings"]
    missing = next(finding for finding in findings if finding["code"] == "LAB-K8S-002")
    assert "get/list/create/patch/delete mpijobs.kubeflow.org" in missing["summary"]


def test_who_has_the_lab_s_rights_and_no_more_submits_and_removes_a_job(cluster: Cluster, lab_of: Labs) -> None:
    """With the documented rights, `k8s submit`, `k8s delete` and `down` exit with 0."""
    cluster.grant(ALL)
    lab = lab_of(cluster.persons_token())
    name = lab.call("k8s", "submit", "hello-mpi", "--json").expect(0).json["name"]
    assert f"MPIJob/{name}" in lab.call("k8s", "delete", "hello-mpi", "--json").expect(0).json["objects"]
    assert lab.call("down", "--json").expect(0)


def test_a_token_that_is_no_longer_accepted_is_said_to_have_expired(cluster: Cluster, lab_of: Labs) -> None:
    """A token of a deleted account: exit code 3, with the advice to log in again."""
    cluster.grant(ALL)
    token = cluster.persons_token()
    cluster.forget_person()
    answer = refused(lab_of(token))
    assert "does not accept the credentials of this context" in answer.err
    assert "log in to the cluster again" in answer.err


def test_a_context_that_is_not_there_is_named(lab_of: Labs) -> None:
    """LAB_K8S_CONTEXT that the kubeconfig has not: exit code 3, it is named, and how to list contexts."""
    answer = refused(lab_of(LAB_K8S_CONTEXT="nowhere"))
    assert "the kubeconfig has no context `nowhere`" in answer.err
    assert "kubectl config get-contexts" in answer.err


def test_a_cluster_without_the_operator_is_told_what_to_install(cluster: Cluster, lab_of: Labs) -> None:
    """No version of MPIJob is served: exit code 3, with the advice to install the mpi-operator."""
    lab = lab_of(LAB_K8S_JOB="mpijob")
    with cluster.serving():
        answer = refused(lab)
    assert "has no MPIJob" in answer.err
    assert "install Kubeflow's mpi-operator" in answer.err


def test_a_definition_that_the_training_operator_left_is_named(cluster: Cluster, lab_of: Labs) -> None:
    """Only MPIJob v1 is served: exit code 3; beside v2beta1 it is a finding of doctor."""
    lab = lab_of(LAB_K8S_JOB="mpijob")
    with cluster.serving("v1"):
        answer = refused(lab)
    assert "it has MPIJob v1, of the training operator" in answer.err
    with cluster.serving("v1", "v2beta1"):
        findings = lab.call("doctor", "--json").json["findings"]
    (remaining,) = [finding for finding in findings if finding["code"] == "LAB-K8S-005"]
    assert "kubectl get deployments -A | grep training-operator" in remaining["fix"]
