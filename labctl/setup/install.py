"""Sets this host up to run a lab: Docker Engine, buildx and compose. First a plan, then its execution."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labctl.errors import HostError
from labctl.setup import apt
from labctl.setup.requirements import OLDEST_ENGINE, PACKAGES, Facts, major, observe
from labctl.system import process

Emit = Callable[[str], None]

AGAIN = "log in again to use it (here and now: newgrp docker)"
STATE = Path("/var/lib/labctl")
LOG = STATE / "dockerd.log"
NEXT = {"bookworm": "trixie", "trixie": "forky"}
"""Debian releases and the one after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupStep:
    """A command to run as root, and why; ``input`` is its stdin."""

    argv: tuple[str, ...]
    reason: str
    input: str = ""

    def typed(self, prefix: tuple[str, ...] = ()) -> str:
        """The step as a shell command line."""
        command = shlex.join((*prefix, *self.argv))
        return (
            f"printf '%s\\n' {shlex.join(self.input.splitlines())} | {command} > /dev/null" if self.input else command
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupPlan:
    """The steps in order; ``unfinished`` if the rest depends on their outcome."""

    steps: tuple[SetupStep, ...]
    present: str
    prefix: tuple[str, ...] | None = ()
    unfinished: bool = False

    def __str__(self) -> str:
        if not self.steps:
            return f"nothing to do: {self.present}"
        typed = self.typed()
        listed = (f"  {n}. {step.reason}\n     {typed[n - 1]}" for n, step in enumerate(self.steps, 1))
        return "\n".join(("to make this host able to run a lab:", *listed))

    def typed(self) -> tuple[str, ...]:
        """The steps as shell command lines of this user; root's if there is no sudo."""
        return tuple(step.typed(self.prefix or ()) for step in self.steps)


# --- decide --------------------------------------------------------------------------------------------------


def plan(facts: Facts) -> SetupPlan:
    """What this host is missing and how to install it. HostError if it cannot be installed by labctl."""
    missing = _missing(facts)
    present = f"Docker Engine {facts.engine}, buildx {facts.buildx}, compose {facts.compose}"
    if missing and facts.distribution not in {"debian", "ubuntu"}:
        raise _unknown_way(facts, missing)
    if missing and not facts.candidates:
        update = SetupStep(argv=("apt-get", "update"), reason="package lists are empty: update them")
        return SetupPlan(steps=(update,), present=present, prefix=facts.prefix, unfinished=True)
    packages, from_next = _packages(facts, missing)
    steps = (*(_next_release(facts) if from_next else ()), *(_install(packages) if packages else ()))
    if not (facts.running or facts.denied) or "Docker Engine" in missing:
        steps += _start(facts)
    if facts.outsider and (steps or facts.denied):
        steps += (_join(facts.outsider),)
    return SetupPlan(steps=steps, present=present, prefix=facts.prefix)


def _missing(facts: Facts) -> tuple[str, ...]:
    has = {
        "Docker Engine": major(facts.engine) >= OLDEST_ENGINE,
        "docker command": facts.command,
        "buildx": bool(facts.buildx),
        "compose v2": major(facts.compose) >= 2,
    }
    return tuple(need for need, there in has.items() if not there)


def _packages(facts: Facts, missing: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """The packages to install, and whether they come from the next release because this one's are too old."""
    found = {need: _candidate(facts, need) for need in missing}
    if found.get("Docker Engine") and found.get("docker command") == "":
        # Older packages of the engine bring the command with them.
        del found["docker command"]
    if all(found.values()):
        return tuple(found.values()), False
    if facts.distribution != "debian" or facts.codename not in NEXT:
        raise _unknown_way(facts, missing)
    return tuple(PACKAGES[need][0][0] for need in missing), True


def _candidate(facts: Facts, need: str) -> str:
    fits = (
        name for name, oldest in PACKAGES[need] if name in facts.candidates and major(facts.candidates[name]) >= oldest
    )
    return next(fits, "")


def _next_release(facts: Facts) -> tuple[SetupStep, ...]:
    own = apt.archive(facts.sources, facts.distribution, facts.codename)
    if own is None:
        raise HostError(
            f"no source under /etc/apt is the main archive of Debian {facts.codename}, which this host runs",
            hint=f"add that source, or install Docker Engine {OLDEST_ENGINE} or newer by hand",
        )
    release = NEXT[facts.codename]
    signed = f"Signed-By: {own.signed_by}\n" if own.signed_by else ""
    source = f"Types: deb\nURIs: {' '.join(own.uris)}\nSuites: {release}\nComponents: main\n{signed}"
    named = " ".join(names[0][0] for names in PACKAGES.values())
    pins = (
        f"Package: *\nPin: release n={release}\nPin-Priority: 1\n\n"
        f"Package: {named}\nPin: release n={release}\nPin-Priority: 990\n"
    )
    return (
        # The pin first: at no moment may the next release be open to the whole system.
        SetupStep(
            argv=("tee", "/etc/apt/preferences.d/labctl-next"),
            input=pins,
            reason=f"keep everything but {named} away from Debian {release}",
        ),
        SetupStep(
            argv=("tee", "/etc/apt/sources.list.d/labctl-next.sources"),
            input=source,
            reason=f"Debian {facts.codename}'s own packages are too old: add Debian {release} as a source",
        ),
        SetupStep(argv=("apt-get", "update"), reason="update the package lists"),
    )


def _install(packages: tuple[str, ...]) -> tuple[SetupStep, ...]:
    return (
        SetupStep(
            argv=("apt-get", "install", "--simulate", "--no-install-recommends", *packages),
            reason="check that nothing else is upgraded or removed",
        ),
        SetupStep(
            argv=(
                "env", "DEBIAN_FRONTEND=noninteractive",
                "apt-get", "install", "--yes", "--no-install-recommends", *packages,
            ),
            reason=f"install {', '.join(packages)}",
        ),
    )  # fmt: skip


def _start(facts: Facts) -> tuple[SetupStep, ...]:
    if facts.systemd:
        return (SetupStep(argv=("systemctl", "enable", "--now", "docker"), reason="start Docker, now and at boot"),)
    daemon = (
        "start-stop-daemon", "--start", "--oknodo", "--background", "--make-pidfile",
        "--pidfile", str(STATE / "dockerd.pid"), "--output", str(LOG),
        "--exec", facts.daemon, "--", "--mtu", str(facts.mtu),
    )  # fmt: skip
    return (
        SetupStep(argv=("mkdir", "--parents", str(STATE)), reason="a place for Docker's log and pid"),
        SetupStep(
            argv=daemon,
            reason=f"start Docker (there is no service manager here) with the default route's MTU, {facts.mtu}",
        ),
    )


def _join(person: str) -> SetupStep:
    return SetupStep(
        argv=("usermod", "--append", "--groups", "docker", person),
        reason=f"let {person} use Docker (members of group docker are as powerful as root on this host)",
    )


def _unknown_way(facts: Facts, missing: tuple[str, ...]) -> HostError:
    where = f"{facts.distribution} {facts.codename}".strip() or "this distribution"
    return HostError(
        f"missing: {', '.join(missing)}; {where} has no packages of it that labctl knows",
        hint=f"install Docker Engine {OLDEST_ENGINE} or newer with buildx and compose: https://docs.docker.com/engine/install/",
    )


# --- act -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetupResult:
    """Whether this host was changed."""

    changed: bool


def setup(*, yes: bool, ask: Callable[[str], bool] | None, emit: Emit) -> bool:
    """Set this host up to run a lab; False if it already was. ``ask`` is None if there is no terminal.

    HostError if root is needed and not available (its hint has the commands), if aborted, or if a step failed.
    """
    agreed, acted = yes, False
    while (steps := plan(observe())).steps:
        emit(str(steps))
        if steps.prefix is None:
            raise HostError("permission denied: this needs root or sudo", hint=as_root(steps))
        if not agreed and ask is None:
            raise HostError("cannot prompt: not a terminal", hint="labctl setup --yes")
        if not agreed and ask and not ask("do this?"):
            raise HostError("aborted", hint="labctl setup")
        carry_out(steps, emit)
        agreed = acted = True
        if not steps.unfinished:
            break
    facts = observe()
    if facts.denied and not acted:
        raise HostError("this session is older than your membership of group docker", hint=AGAIN)
    emit(f"ready: {plan(facts).present}" if acted else str(steps))
    if facts.denied:
        emit(f"you are in group docker now; {AGAIN}")
    return acted


def as_root(steps: SetupPlan) -> str:
    """What root must type."""
    return "as root:\n" + "\n".join((*steps.typed(), *(("labctl setup",) if steps.unfinished else ())))


def carry_out(steps: SetupPlan, emit: Emit) -> None:
    """Run the steps in order, and wait until Docker answers. HostError at the first failure."""
    prefix = steps.prefix or ()
    for number, step in enumerate(steps.steps, 1):
        emit(f"[{number}/{len(steps.steps)}] {step.reason}")
        argv = (*prefix, *step.argv)
        if step.input:
            process.run(argv, input=step.input)
        elif "--simulate" in step.argv:
            _require_harmless(apt.simulated(process.run(argv).out), step.argv)
        else:
            process.stream(argv, lambda line: emit(f"  {line}") if line.startswith(("Get:", "Setting up ")) else None)
    if not steps.unfinished:
        _wait_until_it_answers(prefix, limit=60)


def _require_harmless(result: apt.Simulated, argv: tuple[str, ...]) -> None:
    """HostError if an installation would change other packages than it names, or install too old an engine."""
    upgraded = sorted(set(result.upgraded) - set(argv))
    if upgraded or result.removed:
        would = [f"upgrade {', '.join(upgraded)}"] * bool(upgraded) + [f"remove {', '.join(result.removed)}"] * bool(
            result.removed
        )
        raise HostError(
            f"not installed: {shlex.join(argv)} would {' and '.join(would)}",
            hint="decide on these yourself first, then: labctl setup",
        )
    engine = {**result.installed, **result.upgraded}.get("docker.io")
    if engine and major(engine) < OLDEST_ENGINE:
        raise HostError(
            f"not installed: that would be Docker Engine {engine}, and a lab needs {OLDEST_ENGINE} or newer",
            hint="https://docs.docker.com/engine/install/",
        )


def _wait_until_it_answers(prefix: tuple[str, ...], limit: float) -> None:
    from python_on_whales import DockerClient
    from python_on_whales.exceptions import DockerException

    deadline = time.monotonic() + limit
    # With the prefix, as this session may not be in group docker yet.
    docker = DockerClient(client_call=[*prefix, "docker"])
    while True:
        try:
            server = docker.version().server
            break
        except DockerException as error:
            reason = (error.stderr or "").strip()
        if _has_died() or time.monotonic() > deadline:
            log = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-20:] if LOG.is_file() else []
            raise HostError(
                "\n".join((f"Docker does not answer: {reason}", *log)),
                hint=f"less {LOG}" if log else "journalctl --unit docker",
            )
        time.sleep(0.5)
    version = server.version or "" if server else ""
    if major(version) < OLDEST_ENGINE:
        raise HostError(f"Docker Engine {version} still runs", hint="restart it, then: labctl setup")


def _has_died() -> bool:
    """Whether the daemon that was started here has exited."""
    pid_file = STATE / "dockerd.pid"
    return pid_file.is_file() and not Path(f"/proc/{pid_file.read_text(encoding='utf-8').strip()}").exists()
