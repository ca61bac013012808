"""The pod that fills a lab's claim, in a cluster in memory."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import clusters, running
from support.api_server import SUCCESS, failure
from support.fake_api import FakeApi
from support.running import RunningApi

from labctl.backends.kubernetes import storage
from labctl.backends.kubernetes.api import KubernetesEngine, Manifest, Unreachable
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.errors import ConfigError, HostError
from labctl.hub.client import Kind
from labctl.model import Event

WANTED: list[tuple[Kind, str]] = [("model", "acme/tiny"), ("dataset", "acme/words")]
MODEL = {"kind": "model", "name": "acme/tiny", "revision": "1a2b", "bytes": 7}
WORDS = {"kind": "dataset", "name": "acme/words", "revision": "3c4d", "bytes": 0}
RUNS = {"running": {"startedAt": "2026-01-02T03:04:05Z"}}


class Storing(RunningApi):
    """An API server whose pod takes these states, one per request; the last one stays."""

    def __init__(self, *states: dict[str, Any]) -> None:
        """Take these states for the pod, one per request."""
        super().__init__()
        self.states, self.pod = list(states), dict[str, Any]()
        self.seen: set[str] = set()
        self.said: list[str] = []

    def _answer_of(self, kind: str, name: str, method: str, body: Manifest | None, options: Any) -> Manifest | None:
        """Answer as the fake API; a GET of the pod sets its log and takes its next state, None if ``gone``."""
        found = super()._answer_of(kind, name, method, body, options)
        self.seen |= {one for one, _ in self.objects}
        if kind != "Pod" or method != "GET" or not name or not found:
            return found
        self.pod = self.states.pop(0) if self.states else self.pod
        self.printed[name] = [f"2026-01-02T03:04:05.{number:09}Z {line}" for number, line in enumerate(self.said)]
        return None if self.pod.get("gone") else {**found, "status": self.pod}


def status(phase: str, **state: Any) -> dict[str, Any]:
    """Return the status of a pod of this phase with the state of its container."""
    return {"phase": phase, "containerStatuses": [{"name": "program", "state": state}]}


STARTS = status("Pending", waiting={"reason": "ContainerCreating"})
GOES = status("Running", **RUNS)
WELL = status("Succeeded", terminated={"exitCode": 0})
ILL = status("Failed", terminated={"exitCode": 1, "reason": "Error"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between requests."""
    monkeypatch.setattr(storage, "LOOK", 0)


@pytest.fixture
def said() -> list[str]:
    """Return an empty list, to which the lab adds the texts of its events."""
    return []


def lab(api: FakeApi, directory: Path, said: list[str], **given: str) -> ClusterLab:
    """Build a lab with a claim, whose events are added to ``said``."""
    settings = {"LAB_K8S_STORAGE_SIZE": "10g", "LAB_ACCELERATOR": "cpu", "HF_TOKEN": "hf_canary", **given}
    made = clusters.lab(api, running.own_workload(directory), **settings)

    def hear(event: Event) -> None:
        """Add the event's text."""
        said.append(event.text)

    return replace(made, context=replace(made.context, emit=hear))


def test_what_is_downloaded_is_said_and_the_pod_is_removed(tmp_path: Path, said: list[str]) -> None:
    """fill() returns the downloaded items with revision and bytes, and leaves only namespace and claim."""
    api = Storing(STARTS, STARTS, GOES, GOES, WELL)
    api.said = ["Fetching 3 files", json.dumps(MODEL), "", json.dumps(WORDS)]
    items = storage.fill(lab(api, tmp_path, said), WANTED, "https://hub.example.com")
    assert [(one.kind, one.name, one.revision, one.bytes, one.fetched_bytes, one.state) for one in items] == [
        ("model", "acme/tiny", "1a2b", 7, 7, "fetched"),
        ("dataset", "acme/words", "3c4d", 0, 0, "fetched"),
    ]
    assert {kind for kind, _ in api.objects} == {"Namespace", "PersistentVolumeClaim"}
    assert api.seen >= {"Pod", "ConfigMap", "Secret"}
    assert said == []


def test_a_container_that_the_cluster_has_added_does_not_keep_a_download_from_its_end(
    tmp_path: Path, said: list[str]
) -> None:
    """fill() ends when the pod's own container has ended, though an added one runs."""
    api = Storing(GOES, status("Running", terminated={"exitCode": 0}))
    api.said = [json.dumps(MODEL)]
    assert len(storage.fill(lab(api, tmp_path, said), WANTED, "https://hub.example.com")) == 1


def test_the_pod_is_given_what_is_wanted_the_hub_and_the_token_as_a_file(tmp_path: Path, said: list[str]) -> None:
    """The pod has the items as arguments, the hub as a variable, no limits, and no token outside the Secret."""
    api, sent = Storing(GOES, WELL), list[Manifest]()
    put = api.put

    def keep(manifest: Manifest) -> Manifest:
        """Record the object, then put it."""
        sent.append(manifest)
        return put(manifest)

    api.put = keep  # type: ignore[method-assign]
    storage.fill(lab(api, tmp_path, said), WANTED, "https://hub.example.com")
    pod = next(one for one in sent if one["kind"] == "Pod")
    (program,) = pod["spec"]["containers"]
    assert program["command"][-2:] == ["model:acme/tiny", "dataset:acme/words"]
    assert {"name": "HF_ENDPOINT", "value": "https://hub.example.com"} in program["env"]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert "limits" not in program["resources"]
    assert "hf_canary" not in json.dumps([one for one in sent if one["kind"] != "Secret"])


def test_a_lab_without_a_claim_has_nowhere_to_download_to(tmp_path: Path, said: list[str]) -> None:
    """fill() of a lab without a claim raises ConfigError and makes nothing."""
    api = Storing()
    with pytest.raises(ConfigError, match="no claim to download to") as nowhere:
        storage.fill(lab(api, tmp_path, said, LAB_K8S_STORAGE_SIZE=""), WANTED, "")
    assert "LAB_K8S_STORAGE_SIZE=" in nowhere.value.hint
    assert not api.objects


def test_what_the_program_said_last_is_why_it_failed(tmp_path: Path, said: list[str]) -> None:
    """fill() of a failed pod raises HostError with its last line, and removes pod, ConfigMap and Secret."""
    api = Storing(GOES, GOES, ILL)
    api.said = [json.dumps(MODEL), "dataset acme/words is gated: accept its terms", ""]
    with pytest.raises(HostError, match="dataset acme/words is gated: accept its terms") as failed:
        storage.fill(lab(api, tmp_path, said), WANTED, "")
    assert failed.value.hint == "re-run to resume: complete files stay on the claim"
    assert {kind for kind, _ in api.objects} == {"Namespace", "PersistentVolumeClaim"}


def test_a_program_that_failed_without_a_word_has_its_exit_code(tmp_path: Path, said: list[str]) -> None:
    """fill() of a failed pod without output raises HostError with its exit code."""
    with pytest.raises(HostError, match=r"ended with exit code 1 \(Error\)"):
        storage.fill(lab(Storing(GOES, ILL), tmp_path, said), WANTED, "")


def test_a_lost_connection_is_told_and_the_log_is_read_on(tmp_path: Path, said: list[str]) -> None:
    """A log whose connection breaks is one notice, and all items are returned."""
    api = Storing(GOES, GOES, GOES, GOES, WELL)
    api.said = [json.dumps(MODEL), json.dumps(WORDS)]
    api.broken = [(1, OSError("reset")), (1, OSError("reset"))]
    items = storage.fill(lab(api, tmp_path, said), WANTED, "")
    assert [one.name for one in items] == ["acme/tiny", "acme/words"]
    (notice,) = said
    assert notice.endswith("reset; the download goes on, and labctl asks again for 10 min")


def test_a_server_that_is_silent_for_too_long_ends_it(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that cannot be read for too long raises Unreachable after one notice, and the pod is removed."""
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    api = Storing(GOES)
    api.broken = [(0, OSError("reset"))] * 20
    with pytest.raises(Unreachable, match="reset"):
        storage.fill(lab(api, tmp_path, said), WANTED, "")
    assert len(said) == 1
    assert {kind for kind, _ in api.objects} == {"Namespace", "PersistentVolumeClaim"}


def test_while_it_downloads_the_lab_has_no_pod_of_a_run(tmp_path: Path, said: list[str]) -> None:
    """The pod of a download is not among the pods of runs, but has the lab's label."""
    api = Storing(GOES, WELL)
    # What `shell launcher` and `status` see after it was made, and what `down` would remove.
    seen: list[tuple[int, int]] = []
    put = api.put

    def look(manifest: Manifest) -> Manifest:
        """Put the object; after a pod record how many pods of runs, and of the lab, there are."""
        made = put({**manifest, "metadata": {"creationTimestamp": "", **manifest["metadata"]}})
        if manifest["kind"] == "Pod":
            seen.append(
                (
                    len(KubernetesEngine(api, "demo").pods("demo")),
                    len(api.list("Pod", "labctl.lab=demo")),
                )
            )
        return made

    api.put = look  # type: ignore[method-assign]
    storage.fill(lab(api, tmp_path, said), WANTED, "")
    assert seen == [(0, 1)]


def test_a_pod_that_somebody_deletes_is_said_to_be_deleted(tmp_path: Path, said: list[str]) -> None:
    """fill() whose pod is deleted raises HostError that it was deleted."""
    with pytest.raises(HostError, match=r"pod demo-cache-\w+ was deleted"):
        storage.fill(lab(Storing(GOES, GOES, {"gone": True}), tmp_path, said), WANTED, "")


def test_what_keeps_the_pod_from_starting_is_said_once_and_at_the_limit(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that does not start raises HostError at the limit with the reason, which is noticed once."""
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    unbound = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "unbound"}]}
    with pytest.raises(HostError, match=r"pod demo-cache-\w+ did not start within 10 s \(LAB_K8S_PATIENCE\): unbound$"):
        storage.fill(lab(Storing(STARTS, unbound), tmp_path, said, LAB_K8S_PATIENCE="10"), WANTED, "")
    (notice,) = said
    assert notice.endswith(": unbound")


def test_a_pod_of_which_nothing_is_known_just_did_not_start(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that does not start for no known reason raises HostError at the limit."""
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with pytest.raises(HostError, match=r"did not start within 10 s \(LAB_K8S_PATIENCE\)$"):
        storage.fill(lab(Storing(STARTS), tmp_path, said, LAB_K8S_PATIENCE="10"), WANTED, "")


def test_a_refused_object_leaves_nothing(tmp_path: Path, said: list[str]) -> None:
    """fill() whose pod is refused raises HostError and leaves only namespace and claim."""
    api = Storing()
    api.denied = {"patch pods"}
    with pytest.raises(HostError, match=r"Pod demo-cache-\w+ was refused"):
        storage.fill(lab(api, tmp_path, said), WANTED, "")
    assert {kind for kind, _ in api.objects} == {"Namespace", "PersistentVolumeClaim"}


def test_a_dry_run_names_what_would_be_downloaded_and_asks_nobody(tmp_path: Path, said: list[str]) -> None:
    """With dry_run fill() returns the items as `to fetch` and makes no pod."""
    api = Storing(GOES)
    items = storage.fill(lab(api, tmp_path, said), WANTED, "", dry_run=True)
    assert [(one.kind, one.name, one.revision, one.state) for one in items] == [
        ("model", "acme/tiny", "", "to fetch"),
        ("dataset", "acme/words", "", "to fetch"),
    ]
    assert "Pod" not in api.seen


def test_an_image_that_the_cluster_does_not_get_ends_it_before_its_time(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that cannot be pulled raises HostError before the limit."""
    monkeypatch.setattr(storage, "IMAGE_PATIENCE", 0.01)
    api = Storing(STARTS, status("Pending", waiting={"reason": "ErrImagePull", "message": "no such image"}))
    with pytest.raises(HostError, match=r"pod demo-cache-\w+ cannot pull its image: ErrImagePull: no such image"):
        storage.fill(lab(api, tmp_path, said), WANTED, "")


# --- the code of runs ----------------------------------------------------------------------------------------


class Receiving(Storing):
    """An API server whose pod has ``there``, and whose programs end with ``code``; ``got`` is what they read."""

    def __init__(self, code: int = 0, *, there: bool = False) -> None:
        """Start the pod; end programs with this code; `test -e` succeeds if the code is ``there``."""
        super().__init__(STARTS, GOES)
        self.sockets: list[Any] = []
        end = failure(code) if code else SUCCESS
        self.programs = lambda _, argv: (SUCCESS if there else failure(1),) if argv[0] == "test" else (end,)

    def execute(self, pod: str, argv: tuple[str, ...], **options: bool) -> Any:
        """Keep and return the program's web socket."""
        self.sockets.append(super().execute(pod, argv, **options))
        return self.sockets[-1]

    @property
    def got(self) -> bytes:
        """Return the bytes that the last program was sent."""
        return b"".join(piece[1:] for piece in self.sockets[-1].sock.sent)


PLACE = "/storage/code/1a2b.tar.gz"
CODE = bytes(range(256)) * 1000


def test_code_is_written_to_the_claim_whole_and_the_pod_is_removed(tmp_path: Path, said: list[str]) -> None:
    """send() writes the bytes with size and SHA-256 to the place on the claim, and removes the pod."""
    api = Receiving()
    storage.send(lab(api, tmp_path, said), PLACE, CODE)
    assert api.got == CODE
    place, size, _, sum_of_it = api.executed[-1][3:]
    assert (place, size, sum_of_it) == (PLACE, str(len(CODE)), hashlib.sha256(CODE).hexdigest())
    assert "Pod" in api.seen
    assert not [name for kind, name in api.objects if kind == "Pod"]


def test_code_that_is_on_the_claim_is_not_sent_again(tmp_path: Path, said: list[str]) -> None:
    """send() of code that is at its place only tests for it."""
    api = Receiving(there=True)
    storage.send(lab(api, tmp_path, said), PLACE, CODE)
    assert api.executed == [("test", "-e", PLACE)]


def test_a_claim_that_takes_no_code_is_named_and_the_pod_is_removed(tmp_path: Path, said: list[str]) -> None:
    """send() whose program fails raises HostError with place, claim and code, and removes the pod."""
    api = Receiving(1)
    with pytest.raises(HostError, match=f"cannot write {PLACE} to claim demo-storage: exit code 1"):
        storage.send(lab(api, tmp_path, said), PLACE, CODE)
    assert not [name for kind, name in api.objects if kind == "Pod"]


@pytest.mark.parametrize("whole", [True, False])
def test_what_arrives_on_the_claim_has_its_name_only_if_it_is_whole(tmp_path: Path, *, whole: bool) -> None:
    """RECEIVE writes the file and returns 0 only if size and SHA-256 of its input fit."""
    place = tmp_path / "code/1a2b.tar.gz"
    argv = ("sh", "-c", storage.RECEIVE, str(place), str(len(CODE)), "3c4d", hashlib.sha256(CODE).hexdigest())
    # More than the program reads: nobody can end its input.
    done = subprocess.run(argv, input=(CODE if whole else CODE[1:]) + b"more", check=False)
    assert (done.returncode == 0, place.exists()) == (whole, whole)
