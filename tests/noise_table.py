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
from pathlib import Path

from docker.models.containers import Container
from msgspec import Struct

import docker

LABCTL = Path(sys.executable).with_name("labctl")
PLANTED = "worker-1"
IMAGE = "labctl/cpu"
STOPPED = 0.25
"""Seconds of each second for which a node's processes are stopped."""
BURST, PAUSE = 3, 4
"""Seconds of a burst of load, and between two."""


class LabKind(Struct, frozen=True, kw_only=True):
    """A lab to measure: its settings, and the cores that a node has to itself in its turn."""

    settings: dict[str, str]
    cores: float
    override: str = ""


CORE_EACH = "services: {worker-0: {cpuset: '0'}, worker-1: {cpuset: '1'}}\n"
LABS = {
    "two nodes, a core each": LabKind(settings={"LAB_NODES": "2"}, cores=1, override=CORE_EACH),
    "four nodes in turn": LabKind(settings={"LAB_NODES": "4"}, cores=os.cpu_count() or 1),
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
        """Return ``right``, ``unsure``, ``missed``, or ``FALSE`` if a good node was accused."""
        if set(self.accused) - ({PLANTED} if self.plant != "nothing" else set()):
            return "FALSE"
        if self.plant == "nothing" or self.accused:
            return "unsure" if self.verdict == "UNSURE" and not self.accused else "right"
        return "unsure" if self.verdict == "UNSURE" else "missed"


# --- plants and loads ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def quota(container: Container, cores: float) -> Iterator[None]:
    """Hold a container to so many cores."""
    container.update(cpu_period=100_000, cpu_quota=int(cores * 100_000))
    yield


@contextlib.contextmanager
def stops(container: Container) -> Iterator[None]:
    """Stop a container's processes for STOPPED seconds of each second."""
    ended = threading.Event()

    def signal_all(number: int, processes: list[int]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def work() -> None:
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
    """Use all cores, each by a container, as the nodes are: ``steady``, in ``bursts``, or not at all if ``idle``."""
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


def planted(lab: Path, plant: str, cores: float) -> contextlib.AbstractContextManager[None]:
    """Return the context that makes the lab's PLANTED node slow; its container must be up."""
    if plant == "nothing":
        return contextlib.nullcontext()
    label: dict[str, str | list[str] | bool] = {
        "label": [f"labctl.directory={lab}", f"com.docker.compose.service={PLANTED}"]
    }
    (container,) = docker.from_env().containers.list(filters=label)
    container.reload()
    return stops(container) if plant == "stops" else quota(container, cores * float(plant))


# --- commands ------------------------------------------------------------------------------------------------


def run(words: tuple[str, ...], lab: Path, begin: Callable[[], object], sign: str) -> dict[str, object]:
    """Run labctl; call ``begin`` once it has said ``sign`` on standard error, at once if empty. Return its JSON."""
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen((LABCTL, *words, "--json"), cwd=lab, stdout=out, stderr=subprocess.PIPE, text=True) as labctl,
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


def measured(name: str, lab: Path, plant: str, kind: str, command: str) -> Row:
    """Plant a slow node and a load, run a command, and return its row."""
    words = ("bisect", "matmul", "--set", "rounds=10") if command == "bisect" else ("validate", "--profile", command)
    subprocess.run((LABCTL, "up"), cwd=lab, check=True, capture_output=True)
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(planted(lab, plant, LABS[name].cores))

        # `up` of a validation renews nodes that are not as they should be.
        sign = "" if command == "bisect" else "validate: ssh-check"
        stack.enter_context(load(kind))
        began = time.monotonic()
        answer = run(words, lab, begin, sign)
        seconds = time.monotonic() - began
    subprocess.run((LABCTL, "down"), cwd=lab, check=True, capture_output=True)
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


def new_lab(kind: LabKind, directory: Path) -> Path:
    """Create a lab's directory with its settings."""
    subprocess.run((LABCTL, "init"), cwd=directory, check=True, capture_output=True)
    settings = {"LAB_NAME": "noise", **kind.settings}
    (directory / ".env").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    if kind.override:
        (directory / "compose.override.yml").write_text(kind.override)
    return directory


HEAD = """\
| lab | planted | load | command | verdict | accused | result | seconds |
|---|---|---|---|---|---|---|---|
"""
PLANTS = ("nothing", "0.75", "0.5", "0.2", "stops")
LOADS = ("idle", "steady", "bursts")


def main() -> None:
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
    for name, kind in LABS.items():
        if options.lab not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="labctl-noise-") as directory:
            lab = new_lab(kind, Path(directory).resolve())
            for busy in options.load or LOADS:
                for plant in options.plant or PLANTS:
                    for command, times in commands:
                        for _ in range(times if not options.command or command in options.command else 0):
                            show(measured(name, lab, plant, busy, command))


def show(row: Row) -> None:
    accused = ", ".join(row.accused)
    words = (row.lab, row.plant, row.load, row.command, row.verdict, accused, row.result(), str(int(row.seconds)))
    sys.stdout.write(f"| {' | '.join(words)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
