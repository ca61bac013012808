"""Drift between two fictitious states of a lab: each difference by kind and place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from labctl.backends import Backend
from labctl.errors import ConfigError, HostError
from labctl.runs import freeze
from labctl.runs.freeze import Drift

LOCK: dict[str, Any] = {
    "schema": 1,
    "labctl": "0.1.0",
    "image": {"name": "labctl/cpu", "base": "debian:bookworm-slim", "base_digest": "sha256:aaaa"},
    "packages": {"torch": "2.13.0", "deb/libc6": "2.36-9"},
    "pinned": {"cpu": {"torch": "2.13.0", "numpy": None}},
    "settings": {"LAB_NODES": "2"},
    "files": {"workloads/opt/train.py": "1111", "workloads/opt/workload.yml": "2222"},
    "seeds": {"opt-tiny": "1234"},
    "hosts": {
        "gpu-a": {"image": "sha256:bbbb", "driver": "550.54", "data /data/corpus.txt": "3333", "cores": 8},
        "gpu-b": {
            "image": "sha256:bbbb",
            "driver": "550.54",
            "model facebook/opt-125m": "r1",
            "device 0": "H100 GPU-1",
        },
    },
    "nodes": {
        "worker-0": {"host": "gpu-a", "image": "sha256:bbbb", "slots": "8"},
        "worker-1": {"host": "gpu-b", "image": "sha256:bbbb", "slots": "8"},
    },
}


def drift(change: Callable[[dict[str, Any]], None]) -> tuple[Drift, ...]:
    """Return the drift between LOCK and a copy that ``change`` altered."""
    now = copy.deepcopy(LOCK)
    change(now)
    return freeze.differences("lab.lock", LOCK, now).drift


def test_a_lab_that_is_as_it_was_has_no_drift() -> None:
    """Compare LOCK with its copy: no drift, and the number of facts."""
    changes = freeze.differences("lab.lock", LOCK, copy.deepcopy(LOCK))
    assert (changes.drift, changes.facts) == ((), freeze.count(LOCK))


@pytest.mark.parametrize(
    ("part", "subject", "where"),
    [
        (("files", "workloads/opt/train.py"), "files workloads/opt/train.py", "lab"),
        (("packages", "torch"), "packages torch", "lab"),
        (("pinned", "cpu", "torch"), "pinned cpu torch", "lab"),
        (("image", "base_digest"), "image base_digest", "lab"),
        (("settings", "LAB_NODES"), "settings LAB_NODES", "lab"),
        (("seeds", "opt-tiny"), "seeds opt-tiny", "lab"),
        (("hosts", "gpu-a", "data /data/corpus.txt"), "data /data/corpus.txt", "gpu-a"),
        (("hosts", "gpu-b", "image"), "image", "gpu-b"),
        (("hosts", "gpu-b", "driver"), "driver", "gpu-b"),
        (("hosts", "gpu-b", "device 0"), "device 0", "gpu-b"),
        (("hosts", "gpu-b", "model facebook/opt-125m"), "model facebook/opt-125m", "gpu-b"),
        (("nodes", "worker-1", "image"), "image", "worker-1"),
    ],
)
def test_each_change_is_named_and_where_it_is(part: tuple[str, ...], subject: str, where: str) -> None:
    """Change one fact: one Drift with what, where, was and now."""
    was = LOCK
    for key in part:
        was = was[key]

    def change(now: dict[str, Any]) -> None:
        """Set the parametrized fact to "another"."""
        for key in part[:-1]:
            now = now[key]
        now[part[-1]] = "another"

    assert drift(change) == (Drift(what=subject, where=where, was=str(was), now="another"),)


def test_what_is_gone_and_what_is_new_is_drift_too() -> None:
    """Remove one fact and add another: two Drifts with an empty side."""

    def change(now: dict[str, Any]) -> None:
        """Remove a file and add a node."""
        del now["files"]["workloads/opt/train.py"]
        now["nodes"]["worker-2"] = {"host": "gpu-c"}

    assert drift(change) == (
        Drift(what="files workloads/opt/train.py", where="lab", was="1111", now=""),
        Drift(what="host", where="worker-2", was="", now="gpu-c"),
    )


HARDWARE = {"processor": "EPYC", "GPU 0": {"VBIOS": "96.00"}}


def with_hardware(*hosts: str) -> dict[str, Any]:
    """Return LOCK with the hardware of these hosts."""
    document = copy.deepcopy(LOCK)
    for host in hosts:
        document["hosts"][host]["hardware"] = HARDWARE
    return document


@pytest.mark.parametrize("swapped", [False, True])
def test_hardware_that_only_one_document_has_is_no_drift(swapped: bool) -> None:
    """Compare LOCK, of a labctl that did not record hardware, with one that has it: as it was, both ways."""
    before, now = (with_hardware("gpu-a", "gpu-b"), LOCK) if swapped else (LOCK, with_hardware("gpu-a", "gpu-b"))
    changes = freeze.differences("lab.lock", before, now)
    assert (changes.drift, changes.facts) == ((), freeze.count(LOCK))


def test_hardware_of_a_host_that_both_documents_have_is_compared() -> None:
    """Compare two hosts of which one had its hardware recorded, and a new host: the former and the new one differ."""
    before, now = with_hardware("gpu-b"), with_hardware("gpu-a", "gpu-b")
    now["hosts"]["gpu-b"]["hardware"] = {**HARDWARE, "processor": "Xeon"}
    now["hosts"]["gpu-c"] = {"hardware": {"processor": "EPYC"}}
    assert freeze.differences("lab.lock", before, now).drift == (
        Drift(what="hardware processor", where="gpu-b", was="EPYC", now="Xeon"),
        Drift(what="hardware processor", where="gpu-c", was="", now="EPYC"),
    )


def test_facts_that_only_one_document_has_of_a_device_are_no_drift() -> None:
    """Compare a device that slept when one of the documents was made; a device that one lacks is drift."""
    asleep, awake = with_hardware("gpu-a"), with_hardware("gpu-a")
    link = {"VBIOS": "97.00", "PCIe max width": "16"}
    awake["hosts"]["gpu-a"]["hardware"] = {**HARDWARE, "GPU 0": link, "GPU 1": link, "serial": "7"}
    was_asleep = freeze.differences("lab.lock", asleep, awake).drift
    assert was_asleep == (
        Drift(what="hardware GPU 0 VBIOS", where="gpu-a", was="96.00", now="97.00"),
        Drift(what="hardware GPU 1 VBIOS", where="gpu-a", was="", now="97.00"),
        Drift(what="hardware GPU 1 PCIe max width", where="gpu-a", was="", now="16"),
    )
    is_asleep = freeze.differences("lab.lock", awake, asleep).drift
    assert {(each.what, each.now, each.was) for each in is_asleep} == {
        (each.what, each.was, each.now) for each in was_asleep
    }


@pytest.mark.parametrize("has", [True, False])
def test_verify_says_that_an_older_lock_file_has_no_hardware(has: bool) -> None:
    """Verify a lock file with hardware and one without: a notice for the latter only, and no drift."""
    told: list[str] = []
    now = with_hardware("gpu-a", "gpu-b")
    backend = cast(Backend, SimpleNamespace(freeze=lambda: now, context=SimpleNamespace(warn=told.append)))
    assert freeze.verify(backend, "lab.lock", now if has else LOCK).drift == ()
    notice = "lab.lock has no hardware of gpu-a, gpu-b to compare: `labctl freeze` records it"
    assert told == ([] if has else [notice])


def test_the_file_is_sorted_and_stays_as_it_is(tmp_path: Path) -> None:
    """Write a lock: sorted, True; the same content again: False; HostError where it cannot be written."""
    path = tmp_path / "lab.lock"
    assert freeze.write(path, LOCK)
    assert not freeze.write(path, dict(reversed(LOCK.items())))
    assert freeze.read(path) == LOCK
    keys = [line for line in path.read_text().splitlines() if line.startswith('  "')]
    assert keys == sorted(keys)
    with pytest.raises(HostError, match="cannot write"):
        freeze.write(tmp_path / "nowhere/lab.lock", LOCK)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "not written by `labctl freeze`"),
        ("[1]", "not written by `labctl freeze`"),
        ("{}", "not written by `labctl freeze`"),
        ('{"schema": 9}', "of schema 9"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    """Read a missing or other file: ConfigError."""
    path = tmp_path / "lab.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        freeze.read(path)
