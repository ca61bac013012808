"""Compare what an .env renders for a single machine and for several hosts: only host facts may differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
DIRECTORY = "/srv/lab"
PAIRS = (("cpu-3-nodes", "cpu-3-hosts"), ("nvidia-3-nodes", "nvidia-3-hosts"))
# One machine: a bridge network, by its own name and MTU. Several: their own network, and names without a DNS server.
NETWORK = {
    *("networks", "services.*.networks", "services.*.network_mode", "services.*.extra_hosts"),
    "services.*.environment.LAB_SSH_ADDRESS",
    *(f"services.*.environment.{name}" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")),
    *(f"services.*.environment.OMPI_MCA_{name}_tcp_if_include" for name in ("btl", "oob")),
}
# Nodes of one machine share its cores and devices; a host has its own, and a person may have other ids there.
MACHINE = {
    *("services.*.cpuset", "services.*.labels.labctl.limits", "services.*.environment.OMP_NUM_THREADS"),
    *("services.*.environment.LAB_UID", "services.*.environment.LAB_GID", "services.*.tmpfs"),
    *("services.*.labels.labctl.devices", "services.*.deploy.resources.reservations.devices"),
    "services.*.volumes./etc/lab/leases",
}
# What was sent is changed where it came from, by editors in the launcher too.
SENT = {"services.*.volumes./workspace/workloads.read_only"}
# A digest of the rest.
FINGERPRINT = {"services.*.labels.labctl.config-hash"}


def differences(first: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the shortest paths at which two documents differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in first.keys() | other.keys():
            yield from differences(first.get(key), other.get(key), f"{path}.{key}" if path else key)
    elif first != other:
        yield path


def document(path: Path, directory: str) -> dict[str, Any]:
    """Parse a compose file with the lab's directory replaced by a common one, and volumes by target."""
    compose: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8").replace(directory, DIRECTORY))
    for service in compose["services"].values():
        service["volumes"] = {volume["target"]: volume for volume in service["volumes"]}
    return compose


def shortened(path: str) -> str:
    """Shorten a path: without the service's name, and without parts that identify a device."""
    services, _, rest = path.partition(".")
    kind = f"{services}.*.{rest.partition('.')[2]}" if rest else path
    return "services.*.volumes./etc/lab/leases" if ".volumes./etc/lab/leases/" in kind else kind


def found_in(here: str, there: str) -> set[str]:
    """Return the keys, by shortened path, that differ between a case on one machine and its twin on several hosts."""
    hosts = json.loads((HERE / there / "host.json").read_text(encoding="utf-8"))
    return {
        shortened(path)
        for number, host in enumerate(hosts)
        for path in differences(
            document(HERE / here / f"expected/nodes/worker-{number}/compose.yml", DIRECTORY),
            document(HERE / there / f"expected/nodes/worker-{number}/compose.yml", host["directory"]),
        )
    }


def settings(case: str) -> list[str]:
    """Return the lines of a case's .env that are no comments."""
    return [line for line in (HERE / case / "case.env").read_text(encoding="utf-8").splitlines() if line[0] != "#"]


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_the_settings_are_the_same_but_for_the_hosts(here: str, there: str) -> None:
    assert settings(there) == [*settings(here), "LAB_HOSTS=hosts.txt"]


def test_compose_files_differ_only_in_what_the_hosts_are() -> None:
    assert set.union(*(found_in(*pair) for pair in PAIRS)) == NETWORK | MACHINE | SENT | FINGERPRINT


def other_files(case: str) -> dict[str, str]:
    """Return the content of a case's expected files by path, except compose files and plans."""
    root = HERE / case / "expected"
    names = ("compose.yml", "plan-up.txt", "plan-run.txt")
    paths = (path for path in root.rglob("*") if path.is_file() and path.name not in names)
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_all_else_is_the_same_but_for_the_name_of_the_interface(here: str, there: str) -> None:
    assert {path: text.replace("ens3", "eth0") for path, text in other_files(there).items()} == other_files(here)


def steps_of_run(case: str) -> list[str]:
    """Return the steps of a case's run plan, without numbers and causes."""
    lines = (HERE / case / "expected/plan-run.txt").read_text(encoding="utf-8").splitlines()
    return [line.partition(" ")[2].rpartition("  [")[0] for line in lines]


def test_the_plan_of_a_run_differs_only_in_what_is_pushed_and_fetched() -> None:
    here, there = map(steps_of_run, PAIRS[0])
    outputs = "runs/.outputs/20260102-150405-ask-3fa2"
    push = f"push workloads, {outputs} to red, blue"
    fetch = f"move {outputs} to runs, and fetch it from red, blue"
    assert there == [*here[:2], push, here[2], fetch, here[4]]
    assert here[3] == f"move {outputs} to runs"
