"""Time limits of ending runs and labs, as in docs/dev/failures.md, on an idle machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from support.harness import Lab, Running

pytestmark = [pytest.mark.docker, pytest.mark.slow]

LAUNCHERS = ("deepspeed", "mpirun", "torchrun")
Deed = Callable[[Lab, Running], object]
DEEDS: dict[str, tuple[Deed, int]] = {
    "a worker is killed": (lambda lab, _: lab.containers()["worker-1"].kill("SIGKILL"), 4),
    "the launcher is killed": (lambda lab, _: lab.containers()["launcher"].kill("SIGKILL"), 4),
    "Ctrl-C": (lambda _, running: running.press(), 130),
    "TERM to labctl alone": (lambda _, running: running.process.send_signal(signal.SIGTERM), 130),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_run_ends_within_fifteen_seconds(lab: Lab, launcher: str, deed: str) -> None:
    """After a kill of a container, Ctrl-C or TERM, labctl ends within 15 s with its exit code."""
    do, code = DEEDS[deed]
    with lab.stubborn_run("--launcher", launcher) as (running, _):
        done = time.monotonic()
        do(lab, running)
        running.answer(120).expect(code)
        assert time.monotonic() - done < 15


def test_a_second_ctrl_c_does_not_wait_for_the_grace(lab: Lab) -> None:
    """The second Ctrl-C ends the run within 4 s with exit code 130."""
    with lab.stubborn_run() as (running, _):
        running.press()
        assert not running.ends_within(0.5)
        pressed = time.monotonic()
        running.press()
        running.answer(120).expect(130)
        assert time.monotonic() - pressed < 4


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_time_limit_is_kept(lab: Lab, launcher: str) -> None:
    """`--timeout 8` ends a run after 8 to 23 s with exit code 124."""
    document = lab.call("run", "stubborn", "--launcher", launcher, "--timeout", "8", "--json").expect(124).json
    assert 8 <= document["seconds"] < 23


def test_a_rank_that_crashes_ends_the_run_soon(lab: Lab) -> None:
    """A run in which a rank crashes takes less than 40 s and exits with 4."""
    assert lab.call("run", "crash", "--launcher", "deepspeed", "--json").expect(4).json["seconds"] < 40


def test_health_of_this_machine_is_told_at_once(lab: Lab) -> None:
    """`health` takes less than 5 s, also the second time, in which it compares."""
    assert max(lab.call("health").expect(0).seconds for _ in range(2)) < 5


def test_a_lab_that_is_idle_is_down_at_once(lab: Lab) -> None:
    """`down` of an idle lab takes less than 5 s."""
    assert lab.call("down").expect(0).seconds < 5
