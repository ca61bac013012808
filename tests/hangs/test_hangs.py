"""Runs of programs that hang end with one sentence, which names the rank, its node, the collective and the line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import FreshLab
from support.harness import Answer, Lab, wait_until

from hangs.cases import CASES, PROGRAMS, Case
from hangs.grading import RIGHT, UNKNOWN, WRONG, grade, said

pytestmark = pytest.mark.docker

MOST_UNKNOWN = 3
IN_CI = [pytest.param(case, id=case.name) for case in CASES if case.in_ci]
ALL = [pytest.param(case, id=case.name) for case in CASES]


@pytest.fixture
def lab(lend: FreshLab) -> Lab:
    """Return a lab of two nodes with two slots each, up."""
    return lend(LAB_SLOTS="2")


@pytest.fixture(scope="module")
def unknown() -> list[str]:
    """Return the list, shared by the module's tests, of the cases that labctl could not explain."""
    return []


@pytest.mark.parametrize("case", IN_CI)
def test_a_hang_is_named_with_its_rank_and_line(lab: Lab, case: Case) -> None:
    """Run each case of CI: its sentence is graded RIGHT."""
    answer = run(lab, case)
    assert grade(case, answer.json, answer.err) == (RIGHT, [])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_no_hang_is_named_wrongly_and_few_are_unknown(lab: Lab, case: Case, unknown: list[str]) -> None:
    """No case is graded WRONG, and at most three are UNKNOWN."""
    answer = run(lab, case)
    mark, mistakes = grade(case, answer.json, answer.err)
    assert mark != WRONG, (mistakes, said(case, answer.json, answer.err))
    if mark == UNKNOWN:
        unknown.append(f"{case.name}: {mistakes}")
        assert len(unknown) <= MOST_UNKNOWN, unknown


def run(lab: Lab, case: Case) -> Answer:
    """Run a case's program, acting on worker-1 after step 10 if the case says so; return the answer."""
    shutil.copy(PROGRAMS / f"{case.program}.py", lab.path)
    hostfile = lab.path / "hostfile-of-case"
    lines = [f"worker-{number} slots={slots}\n" for number, slots in enumerate(case.slots)]
    hostfile.write_text("".join(lines), encoding="utf-8")
    argv = ("run", "--script", f"{case.program}.py", "--launcher", case.launcher, "--hostfile", str(hostfile))
    # Flags of the case come last, so that they win.
    limits = ("--timeout", "2m", "-s", "LAB_STALL_SECONDS=4")
    with lab.start(*argv, *limits, *case.flags, "--json") as running:
        if not case.action:
            return running.answer(240)
        wait_until(lambda: "step 10/" in running.err, 120, "step 10")
        with act(lab, case.action):
            return running.answer(240)


@contextmanager
def act(lab: Lab, action: str) -> Iterator[None]:
    """Kill a process of worker-1, or cut its network; in the latter case restart it after the block."""
    worker = lab.containers()["worker-1"]
    if action.startswith("kill "):
        lab.inside("worker-1", "sh", "-c", 'kill -KILL "$(pgrep -o -f "$0")"', action.partition(" ")[2], user="0")
        yield
        return
    (network,) = worker.attrs["NetworkSettings"]["Networks"]
    other = lab.containers()["worker-0"].attrs["NetworkSettings"]["Networks"][network]["IPAddress"]
    ways = {
        "cut the network": ["link", "set", "eth0", "down"],
        "cut the way to worker-0": ["route", "add", "blackhole", f"{other}/32"],
    }
    # The engine sees no event of this, as of a cable that is pulled.
    lab.engine.containers.run(
        lab.image(),
        ways[action],
        entrypoint="ip",
        network_mode=f"container:{worker.id}",
        cap_add=["NET_ADMIN"],
        remove=True,
    )
    try:
        yield
    finally:
        worker.restart(timeout=1)


def test_a_node_that_is_late_at_each_collective_is_named_while_the_run_goes_on_and_at_its_end(lab: Lab) -> None:
    """Be 0.25 s late at each step on worker-1 for 35 s: `top` and the result name it, and about that time."""
    shutil.copy(PROGRAMS / "others/late.py", lab.path)
    hostfile = lab.path / "hostfile-of-two"
    hostfile.write_text("worker-0 slots=1\nworker-1 slots=1\n", encoding="utf-8")
    argv = ("--script", "late.py", "--launcher", "torchrun", "--hostfile", str(hostfile))
    with lab.start("run", *argv, "--json") as running:
        wait_until(lambda: "step 80/" in running.err, 180, "step 80")
        seen = lab.call("top", "--json").expect(0).json["straggler"]
        late = running.answer(120).json["straggler"]
    assert seen["node"] == late["node"] == "worker-1"
    assert (late["share"] < 0.2, late["others"] > 0.5) == (True, True)
    assert late["behind"] == pytest.approx(0.25, abs=0.1)
