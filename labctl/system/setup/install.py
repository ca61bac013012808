"""Installs Docker Engine, buildx and compose on this host: first a plan, then its execution."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from labctl.errors import HostError
from labctl.system import process, procfs
from labctl.system.setup import apt
from labctl.system.setup.requirements import (
    OLDEST,
    OLDEST_COMPOSE,
    OLDEST_ENGINE,
    PACKAGES,
    Facts,
    ask_docker,
    engine_version,
    is_older,
    observe,
)

Emit = Callable[[str], None]

AGAIN = "log in again to use it (here and now: newgrp docker)"
MANUAL = "https://docs.docker.com/engine/install/"
STATE = Path("/var/lib/labctl")
LOG = STATE / "dockerd.log"
NEXT = {"bookworm": "trixie", "trixie": "forky"}
"""Debian releases and their successors."""


class SetupStep(Struct, frozen=True):
    """A command to run as root and the reason for it; ``input`` is its stdin."""

    argv: tuple[str, ...]
    reason: str
    input: str = ""


class SetupPlan(Struct, frozen=True):
    """Steps in order; ``unfinished`` if further steps depend on their outcome."""

    steps: tuple[SetupStep, ...]
    present: str
    prefix: tuple[str, ...] | None = ()
    unfinished: bool = False

    def __str__(self) -> str:
        """Return the numbered steps, each with its reason and shell line, or ``nothing to do: ...``."""
        if not self.steps:
            return f"nothing to do: {self.present}"
        pairs = zip(self.steps, self.typed(), strict=True)
        listed = (f"  {n}. {step.reason}\n     {typed}" for n, (step, typed) in enumerate(pairs, 1))
        return "\n".join(("to make this host able to run a lab:", *listed))

    def typed(self) -> tuple[str, ...]:
        """Return each step as a shell line with the plan's prefix (``sudo``), its input piped in."""
        lines = []
        for step in self.steps:
            line = shlex.join((*(self.prefix or ()), *step.argv))
            if step.input:
                line = f"printf '%s\\n' {shlex.join(step.input.splitlines())} | {line} > /dev/null"
            lines.append(line)
        return tuple(lines)


# --- decide --------------------------------------------------------------------------------------------------


def plan(facts: Facts) -> SetupPlan:
    """Plan to install what is missing, start Docker, add the user to its group; HostError without known packages."""
    missing = _missing(facts)
    present = f"Docker Engine {facts.engine}, buildx {facts.buildx}, compose {facts.compose}"
    if missing and facts.distribution not in {"debian", "ubuntu"}:
        raise _unknown_way(facts, missing)
    if missing and not facts.candidates:
        update = SetupStep(("apt-get", "update"), "package lists are empty: update them")
        return SetupPlan((update,), present, facts.prefix, unfinished=True)
    packages, from_next = _packages(facts, missing)
    steps = _next_release(facts) if from_next else ()
    steps += _install(packages)
    if not (facts.running or facts.denied) or "Docker Engine" in missing:
        steps += _start(facts)
    if (person := facts.outsider) and (steps or facts.denied):
        reason = f"let {person} use Docker (members of group docker are as powerful as root on this host)"
        steps += (SetupStep(("usermod", "--append", "--groups", "docker", person), reason),)
    return SetupPlan(steps, present, facts.prefix)


def _install(packages: tuple[str, ...]) -> tuple[SetupStep, ...]:
    """Return the steps that install packages, after a simulation; none without packages."""
    if not packages:
        return ()
    selection = ("--no-install-recommends", *packages)
    install = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "--yes", *selection)
    return (
        SetupStep(("apt-get", "install", "--simulate", *selection), "check that nothing else is upgraded or removed"),
        SetupStep(install, f"install {', '.join(packages)}"),
    )


def _missing(facts: Facts) -> tuple[str, ...]:
    """Return the names of the requirements that are not installed or too old."""
    versions = {
        "Docker Engine": facts.engine,
        # Any version will do.
        "docker command": OLDEST["docker command"] if facts.command else "",
        "buildx": facts.buildx,
        "compose": facts.compose,
    }
    return tuple(need for need, version in versions.items() if is_older(version, OLDEST[need]))


def _packages(facts: Facts, missing: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Return the packages to install, and True if they come from the next release. HostError if no release has them."""
    packages = {need: _new_enough(facts, need) for need in missing}
    if packages.get("Docker Engine") and packages.get("docker command") == "":
        # Older packages of the engine include the command.
        del packages["docker command"]
    if all(packages.values()):
        return tuple(packages.values()), False
    if facts.distribution != "debian" or facts.codename not in NEXT:
        raise _unknown_way(facts, missing)
    return tuple(PACKAGES[need][0] for need in missing), True


def _new_enough(facts: Facts, need: str) -> str:
    """Return the first package that is available in a sufficient version; empty if none is."""
    candidates = {name: facts.candidates[name] for name in PACKAGES[need] if name in facts.candidates}
    return next((name for name, version in candidates.items() if not is_older(version, OLDEST[need])), "")


def _next_release(facts: Facts) -> tuple[SetupStep, ...]:
    """Return steps that add the next Debian release as a source, pinned. HostError without this release's source."""
    archive = apt.archive(facts.sources, facts.distribution, facts.codename)
    if archive is None:
        raise HostError(
            f"no source under /etc/apt is the main archive of Debian {facts.codename}, which this host runs",
            hint=f"add that source, or install Docker Engine {OLDEST_ENGINE} or newer by hand",
        )
    release = NEXT[facts.codename]
    signed = f"Signed-By: {archive.signed_by}\n" if archive.signed_by else ""
    source = f"Types: deb\nURIs: {' '.join(archive.uris)}\nSuites: {release}\nComponents: main\n{signed}"
    named = " ".join(names[0] for names in PACKAGES.values())
    pins = (
        f"Package: *\nPin: release n={release}\nPin-Priority: 1\n\n"
        f"Package: {named}\nPin: release n={release}\nPin-Priority: 990\n"
    )
    pinning = f"keep everything but {named} away from Debian {release}"
    adding = f"Debian {facts.codename}'s own packages are too old: add Debian {release} as a source"
    return (
        # The pin comes first: no other package may come from the next release even for a moment.
        SetupStep(("tee", "/etc/apt/preferences.d/labctl-next"), pinning, pins),
        SetupStep(("tee", "/etc/apt/sources.list.d/labctl-next.sources"), adding, source),
        SetupStep(("apt-get", "update"), "update the package lists"),
    )


def _start(facts: Facts) -> tuple[SetupStep, ...]:
    """Return the steps that start Docker: with systemd, else with start-stop-daemon and the default route's MTU."""
    if facts.systemd:
        return (SetupStep(("systemctl", "enable", "--now", "docker"), "start Docker, now and at boot"),)
    daemon = (
        "start-stop-daemon", "--start", "--oknodo", "--background", "--make-pidfile",
        "--pidfile", str(STATE / "dockerd.pid"), "--output", str(LOG),
        "--exec", facts.daemon, "--", "--mtu", str(facts.mtu),
    )  # fmt: skip
    reason = f"start Docker (there is no service manager here) with the default route's MTU, {facts.mtu}"
    folder = SetupStep(("mkdir", "--parents", str(STATE)), "a place for Docker's log and pid")
    return (folder, SetupStep(daemon, reason))


def _unknown_way(facts: Facts, missing: tuple[str, ...]) -> HostError:
    """Return the error for requirements that this distribution has no packages of."""
    where = f"{facts.distribution} {facts.codename}".strip() or "this distribution"
    message = f"missing: {', '.join(missing)}; {where} has no packages of it that labctl knows"
    needed = f"Docker Engine {OLDEST_ENGINE} or newer with buildx and compose {OLDEST_COMPOSE} or newer"
    return HostError(message, hint=f"install {needed}: {MANUAL}")


# --- act -----------------------------------------------------------------------------------------------------


class SetupResult(Struct, frozen=True):
    """Result of ``setup``: ``changed`` if this host was changed."""

    changed: bool


def setup(*, yes: bool, ask: Callable[[str], bool] | None, emit: Emit) -> bool:
    """Set this host up for labs, asking first unless ``yes``; return True if it changed. HostError if that fails.

    ``ask`` is None without a terminal. HostError if root is needed and not available (the hint has the commands), if
    aborted, or if a step failed.
    """
    agreed, acted = yes, False
    while (steps := plan(observe())).steps:
        emit(str(steps))
        _require_root(steps)
        if not agreed:
            _confirm(ask)
        carry_out(steps, emit)
        agreed = acted = True
        if not steps.unfinished:
            break
    facts = observe()
    if acted and (unmet := _missing(facts)):
        raise HostError(f"still missing or too old: {', '.join(unmet)}", hint="labctl doctor")
    if facts.denied and not acted:
        raise HostError("this session is older than your membership of group docker", hint=AGAIN)
    emit(f"ready: {plan(facts).present}" if acted else str(steps))
    if facts.denied:
        emit(f"you are in group docker now; {AGAIN}")
    return acted


def _require_root(steps: SetupPlan) -> None:
    """Raise HostError, with the commands to run as root, if this user can neither be root nor use sudo."""
    if steps.prefix is None:
        again = ("labctl setup",) if steps.unfinished else ()
        commands = ("as root:", *steps.typed(), *again)
        raise HostError("permission denied: this needs root or sudo", hint="\n".join(commands))


def _confirm(ask: Callable[[str], bool] | None) -> None:
    """Raise HostError without a terminal (``ask`` is None) or if the user declines."""
    if ask is None:
        raise HostError("cannot prompt: not a terminal", hint="labctl setup --yes")
    if not ask("do this?"):
        raise HostError("aborted", hint="labctl setup")


def carry_out(steps: SetupPlan, emit: Emit) -> None:
    """Run the steps in order; then, if the plan is finished, wait until Docker answers. HostError at a failure."""
    prefix = steps.prefix or ()
    for number, step in enumerate(steps.steps, 1):
        emit(f"[{number}/{len(steps.steps)}] {step.reason}")
        argv = (*prefix, *step.argv)
        if step.input:
            process.run(argv, input=step.input)
        elif "--simulate" in step.argv:
            _require_harmless(process.run(argv).out, step.argv)
        else:
            process.stream(argv, lambda line: emit(f"  {line}") if line.startswith(("Get:", "Setting up ")) else None)
    if not steps.unfinished:
        _wait_until_it_answers(prefix)


def _require_harmless(simulation: str, argv: tuple[str, ...]) -> None:
    """Raise HostError if ``apt-get install`` would change unnamed packages, or install too old an engine."""
    actions = re.findall(r"^Inst (\S+) (\[\S+\] )?\((\S+)", simulation, re.MULTILINE)
    upgraded = sorted({package for package, old, _ in actions if old} - set(argv))
    removed = re.findall(r"^(?:Remv|Purg) (\S+)", simulation, re.MULTILINE)
    changes = [f"{verb} {', '.join(names)}" for verb, names in (("upgrade", upgraded), ("remove", removed)) if names]
    if changes:
        message = f"not installed: {shlex.join(argv)} would {' and '.join(changes)}"
        raise HostError(message, hint="decide on these yourself first, then: labctl setup")
    engine = next((version for package, _, version in actions if package == "docker.io"), "")
    if engine and is_older(engine, OLDEST_ENGINE):
        message = f"not installed: that would be Docker Engine {engine}, and a lab needs {OLDEST_ENGINE} or newer"
        raise HostError(message, hint=MANUAL)


def _wait_until_it_answers(prefix: tuple[str, ...]) -> None:
    """Wait up to 60 s for Docker to answer. HostError if it does not, died, or an old engine still runs."""
    deadline, pid_file = time.monotonic() + 60, STATE / "dockerd.pid"
    while True:
        # As root: this session may not be in group docker yet.
        version, reason = ask_docker(engine_version, prefix=prefix)
        if not reason:
            break
        # Without systemd, a step above started the daemon and wrote this file.
        died = pid_file.is_file() and not Path(f"/proc/{pid_file.read_text(encoding='utf-8').strip()}").exists()
        if died or time.monotonic() > deadline:
            log = procfs.read(LOG).splitlines()[-20:]
            message = "\n".join((f"Docker does not answer: {reason}", *log))
            raise HostError(message, hint=f"less {LOG}" if log else "journalctl --unit docker")
        time.sleep(0.5)
    if is_older(version, OLDEST_ENGINE):
        raise HostError(f"Docker Engine {version} still runs", hint="restart it, then: labctl setup")
