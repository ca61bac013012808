"""What is wrong here, and what mends it: host, engine, image, mounts, limits, the lab and its nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labctl import execute, images, lock, render
from labctl.engines.local import LocalEngine
from labctl.errors import HostError, LabError
from labctl.model import Lab
from labctl.prerequisites import OLDEST_ENGINE, major

GIB = 1 << 30
IMAGE_SPACE = 8 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: code, level, node, what was seen, why it matters, what to type."""

    code: str
    level: Literal["ok", "warn", "error"]
    node: str
    seen: str
    why: str = ""
    fix: str = ""

    @classmethod
    def of_error(cls, code: str, error: LabError) -> Finding:
        """A finding that stands for a check which could not go on."""
        why = "no node can be made before this is mended"
        return cls(code=code, level="error", node=error.node or "local", seen=error.message, why=why, fix=error.hint)


Check = Callable[[Lab, LocalEngine], Iterator[Finding]]


def examine(lab: Lab, engine: LocalEngine) -> tuple[Finding, ...]:
    """Every check in order; those that need the engine are left out where it does not answer."""
    found = [finding for check in (resources, mounts) for finding in check(lab, engine)]
    found += tools()
    try:
        found += daemon(engine)
    except HostError as error:
        return (*found, _error("LAB-ENGINE-001", error.message, "nothing runs without it", error.hint))
    for check in (image, limits, containers):
        found += check(lab, engine)
    return tuple(found)


def resources(lab: Lab, engine: LocalEngine) -> Iterator[Finding]:  # noqa: ARG001
    """Cores, memory and disk of this host."""
    here = lab.hosts[0]
    yield _ok(
        "LAB-HOST-001", f"{len(here.cpus)} cores, {here.memory / GIB:.0f} GiB memory, accelerator {lab.accelerator}"
    )
    if lab.accelerator == "cpu" and len(lab.nodes) > len(here.cpus):
        yield _warn(
            "LAB-HOST-002",
            f"{len(lab.nodes)} nodes share {len(here.cpus)} cores",
            "they get in each other's way",
            f"set LAB_NODES={len(here.cpus)} in .env",
        )


def mounts(lab: Lab, engine: LocalEngine) -> Iterator[Finding]:  # noqa: ARG001
    """The directories that containers see."""
    for mount in lab.mounts:
        if Path(mount.source).is_dir() or Path(mount.source).is_relative_to(lab.directory):
            yield _ok("LAB-MOUNT-001", f"{mount.source} -> {mount.target}")
        elif mount.source == str(Path.home() / ".cache/labctl"):
            yield _ok("LAB-MOUNT-001", f"{mount.source} -> {mount.target} (made on first `labctl up`)")
        else:
            yield _error(
                "LAB-MOUNT-001", f"{mount.source} is not there", "its node would not start", f"mkdir -p {mount.source}"
            )


def tools() -> Iterator[Finding]:
    """The docker client's plugins."""
    from labctl import shell

    for code, plugin in (("LAB-ENGINE-002", "compose"), ("LAB-ENGINE-003", "buildx")):
        try:
            version = shell.run(["docker", plugin, "version"]).out.strip().splitlines()[0]
        except (HostError, IndexError) as error:
            yield _error(code, f"docker {plugin}: {error}", "labctl cannot work without it", "labctl setup")
        else:
            yield _ok(code, version)


def daemon(engine: LocalEngine) -> Iterator[Finding]:
    """The engine's version, and the disk that its images lie on."""
    version = engine.versions()["engine"]
    if major(version) < OLDEST_ENGINE:
        why = f"at least {OLDEST_ENGINE} is needed"
        yield _error("LAB-ENGINE-001", f"Docker Engine {version}", why, "labctl setup")
    else:
        yield _ok("LAB-ENGINE-001", f"Docker Engine {version}")
    folder = Path(engine.storage())
    if folder.is_dir():
        free = shutil.disk_usage(folder).free
        seen = f"{free / GIB:.0f} GiB free at {folder}"
        if free > IMAGE_SPACE:
            yield _ok("LAB-DISK-001", seen)
        else:
            yield _warn("LAB-DISK-001", seen, "image and build cache take about 8 GiB", "docker builder prune")


def image(lab: Lab, engine: LocalEngine) -> Iterator[Finding]:
    """The lab's image: there, and built from the files that labctl has now."""
    own = images.name_of(lab.image)
    if engine.image_id(lab.image) is None:
        yield _warn("LAB-IMAGE-001", f"no image {lab.image}", "the first `labctl up` builds it", "labctl build")
    elif own and images.is_stale(engine.image_labels(lab.image), own):
        yield _warn(
            "LAB-IMAGE-002", f"image {lab.image} is older than labctl's files", "nodes run old code", "labctl build"
        )
    else:
        yield _ok("LAB-IMAGE-001", f"image {lab.image}")


def limits(lab: Lab, engine: LocalEngine) -> Iterator[Finding]:  # noqa: ARG001
    """Kernel limits that the host was found to refuse."""
    refused = [name for name in ("memlock", "stack", "nofile") if getattr(lab.limits, name) is None]
    if refused:
        yield _warn(
            "LAB-LIMIT-001",
            f"{', '.join(refused)} stay at this host's own limit",
            "RDMA needs memlock, large labs need nofile; a CPU lab of a few nodes needs neither",
            "raise them for the Docker daemon (systemctl edit docker: LimitMEMLOCK=infinity, LimitNOFILE=1048576), "
            "then: labctl doctor && labctl up",
        )
    else:
        yield _ok("LAB-LIMIT-001", "memlock, stack and nofile as asked")


def containers(lab: Lab, engine: LocalEngine) -> Iterator[Finding]:
    """The lab's nodes, once it is up: running, and reached over ssh."""
    observed = engine.observe(lab.name, lab.image)
    if not observed.containers:
        yield _ok("LAB-NODE-001", f"lab {lab.name} is down")
        return
    names = (render.LAUNCHER, *(node.name for node in lab.nodes))
    lost = [name for name in names if (one := observed.container(name)) is None or one.state != "running"]
    for name in lost:
        one = observed.container(name)
        yield _error("LAB-NODE-001", one.state if one else "missing", "a run needs every node", "labctl up", node=name)
    if render.LAUNCHER in lost:
        return
    for node in lab.nodes:
        if node.name not in lost:
            yield from reached(lab, engine, node.name)
    if lab.nodes[0].name not in lost:
        yield from master_port(lab, engine, lab.nodes[0].name)


def reached(lab: Lab, engine: LocalEngine, node: str) -> Iterator[Finding]:
    try:
        seconds = execute.reach(lab, engine, (node,), 5)[node]
    except LabError as error:
        seen = error.message.splitlines()[-1].strip()
        yield _error("LAB-SSH-001", seen, "launchers start ranks over ssh", "labctl down && labctl up", node=node)
    else:
        yield Finding(code="LAB-SSH-001", level="ok", node=node, seen=f"reached from the launcher in {seconds:.2f} s")


def master_port(lab: Lab, engine: LocalEngine, node: str) -> Iterator[Finding]:
    """Nothing of the host's ports is used; within the lab, the first node's master port must be free for a run."""
    probe = ("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{lab.master_port}")
    said = engine.call(render.container_name(lab, node), probe, user=execute.user(lab))
    if said.code and "refused" not in said.err:
        yield _error("LAB-PORT-001", said.err.strip(), "the node could not be asked", f"labctl logs {node}", node=node)
    elif said.code:
        seen = f"ports {lab.ssh_port} (ssh) and {lab.master_port} (master) are the lab's own; none of the host is used"
        yield Finding(code="LAB-PORT-001", level="ok", node=node, seen=seen)
    elif lock.is_held(lab.directory / lock.RUN):
        yield Finding(code="LAB-PORT-001", level="ok", node=node, seen=f"port {lab.master_port} is in use by a run")
    else:
        fix = f"labctl exec -n {node} -- ss -ltnp; then end it, or set another LAB_MASTER_PORT in .env"
        yield _error("LAB-PORT-001", f"port {lab.master_port} is taken", "the ranks meet there", fix, node=node)


def _ok(code: str, seen: str) -> Finding:
    return Finding(code=code, level="ok", node="local", seen=seen)


def _warn(code: str, seen: str, why: str, fix: str) -> Finding:
    return Finding(code=code, level="warn", node="local", seen=seen, why=why, fix=fix)


def _error(code: str, seen: str, why: str, fix: str, node: str = "local") -> Finding:
    return Finding(code=code, level="error", node=node, seen=seen, why=why, fix=fix)
