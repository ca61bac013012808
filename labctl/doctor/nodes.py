"""The lab's containers: running as the settings say, reached from the launcher, and what they see themselves."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from labctl import model, naming
from labctl.accelerators import leases
from labctl.config.settings import EXTRA
from labctl.deploy import plan
from labctl.doctor.engine import judge_clock
from labctl.doctor.finding import ANEW, LIMIT, UP, Examination, Finding, error, ok, warn
from labctl.engines import agent
from labctl.engines.state import Container, lost
from labctl.errors import HostError
from labctl.hosts import ssh_errors
from labctl.system import files

Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network
PATIENCE = 4
"""Seconds for a login from the launcher and for the bytes that are handed over then."""
REACHING = 20.0
"""Seconds for all workers: a slow one is tried twice, and beyond 32 they take turns."""
HANDED = 1 << 20
SLOW = 1e6
"""Bytes per second through ssh; two containers on a laptop have a hundred times as much."""
PYTHON = ("/usr/bin/python3", "-I")


def states(examination: Examination) -> Iterator[Finding]:
    """Whether each container is there, runs, and was made from what the settings say now."""
    lab, observed = examination.lab, examination.observed
    if not observed.containers:
        yield ok("LAB-NODE-001", f"lab {lab.name} is down")
        return
    fingerprints = {file.path: naming.fingerprint(file.content) for file in examination.files if is_compose(file.path)}
    for name in examination.names:
        owner = lab.nodes[0].name if name == model.LAUNCHER else name
        yield state(examination, name, observed.container(name), fingerprints[naming.compose_path(owner)])
    wanted = replace(examination, only="").names
    for one in observed.containers:
        if one.node not in wanted and not examination.only:
            why = "the settings ask for fewer nodes; it holds cores and memory"
            yield warn("LAB-NODE-005", "is not in the settings", why=why, fix=UP, node=one.node, runnable=True)


def is_compose(path: str) -> bool:
    return path.endswith("compose.yml")


def state(examination: Examination, name: str, one: Container | None, fingerprint: str) -> Finding:
    """What one container is like, by what the engine says of it."""
    lab = examination.lab
    if one and one.state == "paused":
        fix = examination.place.there(f"docker unpause {one.name}")
        why = "its processes stand still, and a run waits for them for ever"
        return error("LAB-NODE-002", "is paused", why=why, fix=fix, node=name, runnable=True)
    if one and (cause := lost(one.reason)):
        why = f"a run on it would end with {cause}"
        return error("LAB-NODE-004", f"is unhealthy: {one.reason}", why=why, fix=UP, node=name, runnable=True)
    stuck = plan.why_stuck(lab, one, {}) if one else None
    if one is None or one.state != "running" or stuck:
        seen = stuck or (f"is {one.state}" if one else "is missing")
        return error("LAB-NODE-001", seen, why="a run needs every node", fix=UP, node=name, runnable=True)
    reason = plan.why_not_current(one, fingerprint, examination.observed.image)
    if reason and examination.observed.image:
        why = "`labctl run` refuses a lab that is not as its settings say"
        seen = f"{reason} than `labctl up` would give it now"
        return error("LAB-NODE-003", seen, why=why, fix=UP, node=name, runnable=True)
    # The engine calls a node unhealthy that was paused, until it is checked again: then the last check said nothing.
    if one.health == "unhealthy" and one.reason:
        why = "a machine that is too busy, or a node that hangs"
        return warn(
            "LAB-NODE-006",
            f"is unhealthy: {one.reason}",
            why=why,
            fix=examination.place.there(f"docker restart -t 1 {one.name}"),
            node=name,
            runnable=True,
        )
    health = "its health is not known yet" if one.health == "unhealthy" else one.health
    return ok("LAB-NODE-001", f"runs, {health}" if health else "runs", node=name)


# --- from the launcher ---------------------------------------------------------------------------------------


def links(examination: Examination) -> Iterator[Finding]:
    """Each worker as the launcher reaches it: the login, the pinned key, and how fast bytes get there."""
    workers = tuple(one for one in examination.running if one.node != model.LAUNCHER)
    launcher = examination.observed.container(model.LAUNCHER)
    if not workers or launcher is None or launcher.state != "running":
        return
    words = ("links", str(PATIENCE), str(HANDED), str(SLOW), *(one.node for one in workers))
    answers = {answer["node"]: answer for answer in ask(examination, launcher, *words, limit=REACHING - 1)}
    for one in workers:
        answer = answers.get(one.node, {"said": "the launcher gave no answer about it", "code": 1})
        yield from link(one, answer, examination.at(one.node).place.there)


def link(one: Container, answer: dict[str, Any], there: Callable[[str], str] = str) -> Iterator[Finding]:
    """One worker, by what the launcher says of it; ``there`` makes a command one that is run on its host."""
    if answer.get("name") != one.node:
        yield unreached(one, answer, there)
        return
    yield ok("LAB-SSH-001", f"reached from the launcher in {answer['seconds']:.2f} s", node=one.node)
    rate = answer["rate"]
    if rate is None or rate < SLOW:
        seen = f"{rate / 1e6:.2f} MB/s" if rate else f"less than {HANDED / PATIENCE / 1e6:.1f} MB/s"
        why = "what ranks tell each other takes the same way"
        yield warn("LAB-NET-005", f"{seen} from the launcher", why=why, fix=ANEW, node=one.node)
    else:
        yield ok("LAB-NET-005", f"{rate / 1e6:.0f} MB/s through ssh from the launcher", node=one.node)


def unreached(one: Container, answer: dict[str, Any], there: Callable[[str], str]) -> Finding:
    # The node copies its pinned host key and its keys anew when it starts.
    again = there(f"docker restart -t 1 {one.name}")
    said = str(answer["said"]) or f"no answer over ssh within {PATIENCE} s"
    if "IDENTIFICATION HAS CHANGED" in said or "verification failed" in said:
        why = "something else than the node made by `labctl up` answers in its name; it is not trusted"
        seen = "its host key is not the one pinned for it"
        return error("LAB-SSH-002", seen, why=why, fix=again, node=one.node, runnable=True)
    seen = f"not reached from the launcher: {ssh_errors.ssh_reason(said)}"
    return error("LAB-SSH-001", seen, why="launchers start ranks over ssh", fix=again, node=one.node, runnable=True)


# --- from within ---------------------------------------------------------------------------------------------


def inside(examination: Examination, one: Container) -> Iterator[Finding]:
    """A node as it sees itself: its clock, the interfaces that collectives are told, the master port."""
    before = time.time()
    (seen,) = ask(examination, one, "look", str(examination.lab.master_port))
    yield judge_clock(examination, seen["time"], before, time.time(), one.node)
    yield from interfaces(examination, one.node, seen)
    if one.node == examination.lab.nodes[0].name:
        yield master_port(examination, one, seen["listener"])


def interfaces(examination: Examination, node: str, seen: dict[str, Any]) -> Iterator[Finding]:
    """Whether each collective library is sent to an interface of the node that is on the lab's network."""
    network = examination.network
    subnets = [ipaddress.ip_network(one["Subnet"]) for one in network["IPAM"]["Config"]] if network else []
    addresses = {name: one["address"] for name, one in seen["interfaces"].items() if one["address"]}
    on_lab = [name for name, text in addresses.items() if any(ipaddress.ip_address(text) in net for net in subnets)]
    if examination.lab.network == "host":
        address = examination.here.address
        on_lab = [name for name, text in addresses.items() if text == address]
        if not on_lab:
            seen_now = ", ".join(f"{name} {text}" for name, text in addresses.items())
            why = "the other nodes look for it there"
            yield error("LAB-NET-004", f"has no address {address} any more: {seen_now}", why=why, fix=UP, node=node)
    if not on_lab:
        # A node that is on no network is told of by itself.
        return
    told = seen["told"].items()
    wrong = {key: value for key, value in told if not chooses(key, value, on_lab, subnets)}
    for key, value in wrong.items():
        own = any(found.key == EXTRA + key for found in examination.settings.extra)
        yield error(
            "LAB-NET-004",
            f"{key}={value}, but the lab's network is on {', '.join(on_lab)}",
            why="ranks would listen where no other node reaches them, and hang at their first collective",
            fix=f"{examination.drop(EXTRA + key)} && {UP}" if own else ANEW,
            node=node,
        )
    if not wrong:
        yield ok("LAB-NET-004", f"collectives use {', '.join(on_lab)}, which is on the lab's network", node=node)


def chooses(key: str, value: str, interfaces: list[str], subnets: Sequence[Subnet] = ()) -> bool:
    """Whether such a list of interfaces takes one of these; NCCL and its kin take names by how they begin."""
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    by_beginning = key.startswith(("NCCL", "HCCL")) and not value.startswith(("=", "^="))
    taken = [one for one in interfaces if any(one == word or (by_beginning and one.startswith(word)) for word in words)]
    if value.startswith("^"):
        return len(taken) < len(interfaces)
    # Open MPI also takes networks, such as 172.18.0.0/16.
    return bool(taken) or any(covers(word, subnet) for word in words if "/" in word for subnet in subnets)


def covers(word: str, subnet: Subnet) -> bool:
    """Whether a network, as Open MPI is told of it, has addresses of the lab's."""
    try:
        return ipaddress.ip_network(word, strict=False).overlaps(subnet)
    except (ValueError, TypeError):
        return False


def master_port(examination: Examination, one: Container, listener: dict[str, Any] | None) -> Finding:
    """Within the lab the first node's master port must be free for a run; on a bridge none of the host's is used."""
    lab = examination.lab
    whose = "the lab's own, none of the host is used" if lab.network == "bridge" else "there for the lab"
    own = f"ports {lab.ssh_port} (ssh) and {lab.master_port} (master) are {whose}"
    if listener is None:
        return ok("LAB-PORT-001", own, node=one.node)
    if examination.run_active:
        return ok("LAB-PORT-001", f"port {lab.master_port} is in use by the run under way", node=one.node)
    if listener["run"]:
        seen = f"port {lab.master_port} is held by what run {listener['run']} left behind; the next run ends it"
        return ok("LAB-PORT-001", seen, node=one.node)
    holder = f"pid {listener['pid']}: {listener['command']}" if listener["pid"] else "a process of another user"
    elsewhere = ANEW if lab.network == "bridge" else examination.put("LAB_MASTER_PORT", str(lab.master_port + 1))
    end = f"labctl exec --node {one.node} -- kill {listener['pid']}" if listener["pid"] else elsewhere
    seen = f"port {lab.master_port} is taken by {holder} (user {leases.user_name(listener['uid'])})"
    return error("LAB-PORT-001", seen, why="the ranks of a run meet there", fix=end, node=one.node)


def program() -> str:
    """What is handed to a container's Python, so that any image will do."""
    return files.path("docker", "lookaround.py").read_text(encoding="utf-8")


def ask(examination: Examination, one: Container, *words: str, limit: float = LIMIT - 1) -> list[dict[str, Any]]:
    """What `lookaround.py` prints in a container; HostError when it fails."""
    engine, user = examination.engine, agent.user(examination.lab, one.node)
    try:
        done = engine.exec(one.name, (*PYTHON, "-c", program(), *words), user=user, limit=limit)
    except HostError as failure:
        # Its message would show the whole program.
        seen = f"{words[0]}: no answer within {limit:.0f} s"
        again = examination.at(one.node).place.there(f"docker restart -t 1 {one.name}")
        raise HostError(seen, hint=again, node=one.node) from failure
    if done.code or not done.out:
        said = (done.err.strip() or "no answer").splitlines()[-1]
        raise HostError(f"cannot look around: {said}", hint=ANEW, node=one.node)
    return [json.loads(line) for line in done.out.splitlines()]
