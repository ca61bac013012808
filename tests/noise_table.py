"""`python tests/noise_table.py`: verdicts of `validate` and `bisect` with and without a slow node, idle and busy.

Each row is real: containers of this machine, a quota or stops that make worker-1 slow, programs that use the cores.
Idle means that nothing else runs here. Labs and rows can be chosen; all of them take about an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from docker.errors import NotFound
from docker.models.containers import Container
from msgspec import Struct
from support.rack.rack import Rack

import docker

LABCTL = Path(sys.executable).with_name("labctl")
PLANTED = "worker-1"
IMAGE = "labctl/cpu"
STOPPED = 0.25
"""Seconds of each second for which a node's processes are stopped."""
BURST, PAUSE = 3, 4
"""Seconds of a burst of load, and between two."""


class OpenLab(Struct, frozen=True, kw_only=True):
    """A lab to measure: where it is, and the cores that a node has to itself in its turn."""

    path: Path
    environ: dict[str, str]
    nodes: int
    cores: float
    planted: Callable[[], Container]
    """Return the container of this machine that is made slow: that of PLANTED, which is up, or of its host."""


@contextlib.contextmanager
def on_this_machine(nodes: int, cores: float, override: str = "") -> Iterator[OpenLab]:
    """Provide a temporary lab directory on this machine, with compose.override.yml if given; remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="labctl-noise-") as directory:
        path = Path(directory).resolve()
        subprocess.run((LABCTL, "init"), cwd=path, check=True, capture_output=True)
        (path / ".env").write_text(f"LAB_NAME=noise\nLAB_NODES={nodes}\n")
        if override:
            (path / "compose.override.yml").write_text(override)

        def planted() -> Container:
            """Return the container of PLANTED."""
            label: dict[str, str | list[str] | bool] = {
                "label": [f"labctl.directory={path}", f"com.docker.compose.service={PLANTED}"]
            }
            (container,) = docker.from_env().containers.list(filters=label)
            return container

        yield OpenLab(path=path, environ=dict(os.environ), nodes=nodes, cores=cores, planted=planted)


@contextlib.contextmanager
def on_two_hosts() -> Iterator[OpenLab]:
    """Provide a lab on two containers that are hosts with a core each; remove all afterwards."""
    engine = docker.from_env()
    with (
        tempfile.TemporaryDirectory(prefix="labctl-noise-") as directory,
        contextlib.closing(Rack(engine, "noise", Path(directory).resolve(), IMAGE)) as rack,
    ):
        path = Path(directory).resolve() / "lab"
        path.mkdir()
        lab = rack.lab(path, "noise", rack.hosts(2), {})
        containers = [engine.containers.get(f"noise-{host.name}") for host in lab.hosts]
        for core, container in enumerate(containers):
            container.update(cpuset_cpus=str(core))
        yield OpenLab(path=path, environ=lab.environ, nodes=2, cores=1, planted=lambda: containers[1])


CORE_EACH = "services: {worker-0: {cpuset: '0'}, worker-1: {cpuset: '1'}}\n"
LABS: dict[str, Callable[[], contextlib.AbstractContextManager[OpenLab]]] = {
    "two nodes, a core each": partial(on_this_machine, 2, 1, CORE_EACH),
    "four nodes in turn": partial(on_this_machine, 4, os.cpu_count() or 1),
    "two hosts, a core each": on_two_hosts,
}


class Row(Struct, frozen=True, kw_only=True):
    """A verdict, and what was planted."""

    lab: str
    plant: str
    load: str
    command: str
    verdict: str
    accused: tuple[str, ...]
    seconds: float

    def result(self) -> str:
        """Return FALSE if a good node is accused, right if the planted is; else unsure if UNSURE, right or missed."""
        if set(self.accused) - ({PLANTED} if self.plant != "nothing" else set()):
            return "FALSE"
        if self.plant == "nothing" or self.accused:
            return "unsure" if self.verdict == "UNSURE" and not self.accused else "right"
        return "unsure" if self.verdict == "UNSURE" else "missed"


# --- plants and loads ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def quota(container: Container, cores: float) -> Iterator[None]:
    """Limit a container to so many cores during the block; after it lift the limit, unless the container is gone."""
    container.update(cpu_period=100_000, cpu_quota=int(cores * 100_000))
    try:
        yield
    finally:
        # The node may be gone; a host stays.
        with contextlib.suppress(NotFound):
            container.update(cpu_period=100_000, cpu_quota=-1)


@contextlib.contextmanager
def stops(container: Container) -> Iterator[None]:
    """Stop a container's processes by SIGSTOP for STOPPED seconds of each second, during the block."""
    ended = threading.Event()

    def signal_all(number: int, processes: list[int]) -> None:
        """Send a signal to each process that still exists."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def work() -> None:
        """Stop and continue the container's processes until the block ends."""
        while not ended.wait(1 - STOPPED):
            # The first process is the node's init.
            processes = [int(words[1]) for words in container.top()["Processes"][1:]]
            signal_all(signal.SIGSTOP, processes)
            ended.wait(STOPPED)
            signal_all(signal.SIGCONT, processes)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def load(kind: str) -> Iterator[None]:
    """Run a busy loop per core in containers during the block: ``steady``, in ``bursts``, or none if ``idle``."""
    spin = "while :; do :; done"
    program = spin if kind == "steady" else f"while :; do timeout {BURST} sh -c '{spin}'; sleep {PAUSE}; done"
    count = 0 if kind == "idle" else os.cpu_count() or 1
    programs = [
        docker.from_env().containers.run(IMAGE, ["-c", program], entrypoint="sh", detach=True, remove=True, init=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for container in programs:
            container.kill()


def planted(lab: OpenLab, plant: str) -> contextlib.AbstractContextManager[None]:
    """Return the context that slows a node down by ``stops`` or a share of its cores, or does ``nothing``."""
    if plant == "nothing":
        return contextlib.nullcontext()
    container = lab.planted()
    container.reload()
    return stops(container) if plant == "stops" else quota(container, lab.cores * float(plant))


# --- commands ------------------------------------------------------------------------------------------------


def run(words: tuple[str, ...], lab: OpenLab, begin: Callable[[], object], sign: str) -> dict[str, object]:
    """Run labctl with --json; call ``begin`` when stderr has ``sign``, at once if that is empty; return its JSON."""
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(
            (LABCTL, *words, "--json"),
            cwd=lab.path,
            env=lab.environ,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        ) as labctl,
    ):
        if not sign:
            begin()
        assert labctl.stderr
        for line in labctl.stderr:
            if sign and sign in line:
                begin()
                sign = ""
        labctl.wait()
        out.seek(0)
        return dict(json.load(out))


def measured(name: str, lab: OpenLab, plant: str, kind: str, command: str) -> Row:
    """Bring the lab up, run a command under load with a planted slow node, take it down; return the Row."""
    words = ("bisect", "matmul", "--set", "rounds=10") if command == "bisect" else ("validate", "--profile", command)
    subprocess.run((LABCTL, "up"), cwd=lab.path, env=lab.environ, check=True, capture_output=True)
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            """Slow the planted node down until the measurement ends."""
            stack.enter_context(planted(lab, plant))

        # `up` of a validation renews nodes that are not as they should be.
        sign = "" if command == "bisect" else "validate: ssh-check"
        stack.enter_context(load(kind))
        began = time.monotonic()
        answer = run(words, lab, begin, sign)
        seconds = time.monotonic() - began
    subprocess.run((LABCTL, "down"), cwd=lab.path, env=lab.environ, check=True, capture_output=True)
    verdict, accused = accusation(command, answer)
    return Row(
        lab=name, plant=plant, load=kind, command=command, verdict=verdict, accused=accused, seconds=round(seconds)
    )


def accusation(command: str, answer: dict) -> tuple[str, tuple[str, ...]]:  # type: ignore[type-arg]
    """Return verdict and the accused nodes and links of a command's answer."""
    if command != "bisect":
        validation = answer["validation"]
        nodes = [node["node"] for node in validation["nodes"] if node["verdict"] in ("slow", "failing")]
        links = [f"{link['a']} - {link['b']}" for link in validation["links"]]
        return validation["verdict"], (*nodes, *links)
    diagnosis = answer["diagnosis"]
    accused = [bad["node"] for bad in diagnosis["bad"]] + [" - ".join(link["nodes"]) for link in diagnosis["links"]]
    return "FAIL" if accused else "UNSURE" if diagnosis["unsure"] else "PASS", tuple(accused)


HEAD = """\
| lab | planted | load | command | verdict | accused | result | seconds |
|---|---|---|---|---|---|---|---|
"""
PLANTS = ("nothing", "0.75", "0.5", "0.2", "stops")
LOADS = ("idle", "steady", "bursts")


def main() -> None:
    """Measure all chosen labs, loads, plants and commands, and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=3, help="validations with the profile quick of each row")
    add("--lab", default="", help="labs whose name holds this text")
    add("--plant", choices=PLANTS, action="append")
    add("--load", choices=LOADS, action="append")
    add("--command", choices=("quick", "cpu", "bisect"), action="append")
    options = parser.parse_args()
    commands = [("quick", options.runs), ("cpu", 1), ("bisect", 1)]
    sys.stdout.write(HEAD)
    for name, opened in LABS.items():
        if options.lab not in name:
            continue
        with opened() as lab:
            for busy in options.load or LOADS:
                for plant in options.plant or PLANTS:
                    for command, times in commands:
                        for _ in range(times if not options.command or command in options.command else 0):
                            show(measured(name, lab, plant, busy, command))


def show(row: Row) -> None:
    """Print a row of the table."""
    accused = ", ".join(row.accused)
    words = (row.lab, row.plant, row.load, row.command, row.verdict, accused, row.result(), str(int(row.seconds)))
    sys.stdout.write(f"| {' | '.join(words)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
