"""A run that has not begun, request by request on a simulated clock."""

from __future__ import annotations

from typing import Any

import pytest
from support.running import condition, runs, unplaced, waits

from labctl.backends.kubernetes.api import Manifest
from labctl.backends.kubernetes.waiting import IMAGE_PATIENCE, Waiting

BEGAN, PATIENCE = 1000.0, 300.0
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
QUEUED = condition("Suspended", "MPIJobSuspended", "MPIJob suspended")


def pod(node: str, **status: Any) -> Manifest:
    """Return a node's pod with this status."""
    role = node.partition("-")[0]
    metadata = {"name": f"demo-m-{node}", "labels": {"labctl.role": role}}
    return {"metadata": metadata, "spec": {"containers": [{"name": role}]}, "status": status}


@pytest.fixture
def waiting() -> Waiting:
    """Return the waiting of an MPIJob from BEGAN, with a limit of 300 s."""
    return Waiting("MPIJob", "labctl/cpu", PATIENCE, BEGAN)


@pytest.mark.parametrize(
    ("job", "found", "missing", "reasons"),
    [
        ({}, [], "", {}),
        ({}, [pod("worker-0", **waits("ContainerCreating"))], "", {}),
        ({}, [pod("worker-0", **unplaced(NO_ROOM)), pod("worker-1", **runs())], "", {"worker-0": NO_ROOM}),
        ({}, [pod("worker-0", **runs())], "FailedCreate: exceeded quota", {"MPIJob": "FailedCreate: exceeded quota"}),
        (QUEUED, [], "old news", {"MPIJob": "waits to be admitted: MPIJob suspended"}),
        ({"spec": {"runPolicy": {"suspend": True}}}, [], "", {"MPIJob": "is suspended"}),
        ({"spec": {"suspend": True}}, [], "", {"MPIJob": "is suspended"}),
    ],
)
def test_what_a_run_waits_for_is_said_by_node_and_by_job(
    waiting: Waiting, job: Manifest, found: list[Manifest], missing: str, reasons: dict[str, str]
) -> None:
    """reasons has what pods and job wait for, by node and job kind; look() is None."""
    assert waiting.look(job, found, missing, BEGAN + 1) is None
    assert waiting.reasons == reasons


@pytest.mark.parametrize(
    ("found", "missing", "cause", "said"),
    [
        ([], "", "does-not-fit", "pods did not become ready"),
        ([pod("worker-0", **runs())], "", "launcher-failed", "pods did not become ready"),
        ([pod("worker-0", **unplaced(NO_ROOM)), pod("worker-1", **unplaced(NO_ROOM))], "", "does-not-fit",
         f"worker-0, worker-1: {NO_ROOM}"),
        ([pod("worker-0", **runs())], "FailedCreate: exceeded quota", "does-not-fit",
         "MPIJob: FailedCreate: exceeded quota"),
    ],
)  # fmt: skip
def test_a_run_is_given_up_at_its_limit_for_what_it_waits_for_then(
    waiting: Waiting, found: list[Manifest], missing: str, cause: str, said: str
) -> None:
    """After the limit look() returns cause and message of what the run waits for then."""
    assert waiting.look({}, found, missing, BEGAN + PATIENCE) is None
    given_up = waiting.look({}, found, missing, BEGAN + PATIENCE + 1)
    assert given_up == (cause, f"not started within 300 s (LAB_K8S_PATIENCE): {said}")


def test_time_in_a_queue_is_not_waited(waiting: Waiting) -> None:
    """Time in a queue does not count to the limit."""
    assert waiting.look(QUEUED, [], "", BEGAN + 10 * PATIENCE) is None
    assert waiting.look({}, [], "", BEGAN + 11 * PATIENCE) is None
    assert waiting.look({}, [], "", BEGAN + 11 * PATIENCE + 1) is not None


def test_an_image_is_waited_for_as_long_as_it_is_refused_without_a_break(waiting: Waiting) -> None:
    """no-image comes after IMAGE_PATIENCE without a break; a pod that pulls again restarts that time."""
    bad, good = [pod("worker-0", **waits("ErrImagePull", "503"))], [pod("worker-0", **waits("ContainerCreating"))]
    assert waiting.look({}, bad, "", BEGAN) is None
    assert waiting.look({}, good, "", BEGAN + IMAGE_PATIENCE) is None
    assert waiting.look({}, bad, "", BEGAN + IMAGE_PATIENCE + 1) is None
    assert waiting.look({}, bad, "", BEGAN + 2 * IMAGE_PATIENCE + 1) is None
    assert waiting.look({}, bad, "", BEGAN + 2 * IMAGE_PATIENCE + 2) == (
        "no-image", "worker-0: the cluster cannot pull image labctl/cpu: ErrImagePull: 503",
    )  # fmt: skip


def test_a_run_that_waits_has_no_limit_for_room_but_one_for_starting() -> None:
    """With waits=True there is no limit for room; once all pods are placed the limit counts."""
    waiting = Waiting("MPIJob", "labctl/cpu", PATIENCE, BEGAN, waits=True)
    full = [pod("worker-0", **runs()), pod("worker-1", **unplaced(NO_ROOM))]
    assert waiting.look({}, full, "", BEGAN + 100 * PATIENCE) is None
    started = [pod("worker-0", **runs()), pod("worker-1", **runs())]
    assert waiting.look({}, started, "", BEGAN + 101 * PATIENCE) is None
    assert waiting.look({}, started, "", BEGAN + 101 * PATIENCE + 1) is not None
