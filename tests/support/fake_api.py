"""An in-memory API server, behind the client's own paths and errors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from labctl.backends.kubernetes.api import COLLECTIONS, Api, Manifest, Unreachable, asked_for

MPIJOBS, TRAINJOBS, OLD = "kubeflow.org/v2beta1", "trainer.kubeflow.org/v1alpha1", "kubeflow.org/v1"
"""API versions of the operators' custom resources."""
SERVED = {MPIJOBS: "mpijobs", TRAINJOBS: "trainjobs", OLD: "mpijobs"}


class FakeApi(Api):
    """In-memory API server: objects of a namespace by kind and name; pods elsewhere carry ``metadata.namespace``.

    ``denied`` are rights such as ``list nodes`` or ``get pods/log``; ``asked`` what it was asked for, in order.
    """

    def __init__(
        self,
        *objects: Manifest,
        denied: Iterable[str] = (),
        knows: Iterable[str] = (MPIJOBS,),
        namespace: str = "demo",
        fails: int | None = None,
    ) -> None:
        """Store these objects; ``fails`` is the status of every answer, 0 for an unreachable server."""
        self.namespace, self.context = namespace, ""
        self.denied, self.knows = set(denied), set(knows)
        self.fails = fails
        """HTTP status of every answer; 0 if the server is unreachable."""
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.asked: list[str] = []
        for one in objects:
            self.put(one)

    @property
    def server(self) -> str:
        return "https://cluster:6443"

    def put(self, manifest: Manifest) -> Manifest:
        """Store an object, replacing one of its kind and name; return it."""
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = manifest
        return manifest

    def _respond(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Any:
        """Record a request and answer it; raise if the server fails, the right is denied, or nothing is found."""
        verb, resource = asked_for(method, path)
        self.asked.append(f"{verb} {resource}")
        if self.fails == 0:
            raise Unreachable(f"the API server {self.server} does not answer: refused", hint="kubectl cluster-info")
        if self.fails:
            raise self._refused(method, path, self.fails, "", "Unauthorized")
        if f"{verb} {resource}" in self.denied:
            raise self._refused(method, path, 403, "", f"cannot {verb} {resource}")
        answer = self._answer(method, path, body, **options)
        if answer is None:
            raise self._refused(method, path, 404, "", "not found")
        return SimpleNamespace(data=json.dumps(answer))

    def _answer(self, method: str, path: str, body: Manifest | None, **options: Any) -> Manifest | None:
        """Return the answer for a path: version, pods of all namespaces, resources or objects; None if unknown."""
        if path == "/version":
            return {"gitVersion": "v1.33.0", "major": "1", "minor": "33"}
        if path == "/api/v1/pods":
            return {"items": self._chosen("Pod", **options)}
        if (version := path.removeprefix("/apis/")) in self.knows:
            return {"resources": [{"name": SERVED.get(version)}]}
        kind = next((kind for kind in COLLECTIONS if self._is(kind, path)), "")
        return (
            self._answer_of(kind, path.removeprefix(self.path(kind)).strip("/"), method, body, options)
            if kind
            else None
        )

    def _answer_of(
        self, kind: str, name: str, method: str, body: Manifest | None, options: dict[str, Any]
    ) -> Manifest | None:
        """Answer a request about objects of a kind: review a right, apply, list, get or delete."""
        if kind == "SelfSubjectAccessReview" and body:
            return {"status": {"allowed": self._may(body["spec"]["resourceAttributes"])}}
        if method == "PATCH" and body:
            made = {**body, "metadata": {"uid": f"uid-{kind}", **body["metadata"]}}
            return made if options.get("dryRun") else self.put(made)
        if method == "GET" and not name:
            return {"items": [one for one in self._chosen(kind, **options) if self._is_here(one)]}
        found = self.objects.get((kind, name))
        return self.objects.pop((kind, name)) if found and method == "DELETE" else found

    def _is(self, kind: str, path: str) -> bool:
        """Return True if a path is that of the kind's collection or of an object in it."""
        own = self.path(kind)
        return path == own or (path.startswith(f"{own}/") and "/" not in path.removeprefix(f"{own}/"))

    def _is_here(self, one: Manifest) -> bool:
        """Return True if an object is in this API's namespace, where those without one are."""
        return bool(one["metadata"].get("namespace", self.namespace) == self.namespace)

    def _may(self, asks: dict[str, str]) -> bool:
        """Return True unless the right that a review asks for is denied."""
        resource = ".".join(filter(None, (asks["resource"], asks["group"])))
        whole = "/".join(filter(None, (resource, asks["subresource"])))
        return f"{asks['verb']} {whole}" not in self.denied

    def _chosen(self, kind: str, labelSelector: str = "", **_: Any) -> list[Manifest]:  # noqa: N803 - as in the API
        """Return the objects of a kind that have all labels of the selector."""
        wanted = dict(pair.split("=") for pair in labelSelector.split(",") if pair)
        found = [one for (known, _), one in self.objects.items() if known == kind]
        return [one for one in found if wanted.items() <= one["metadata"].get("labels", {}).items()]
