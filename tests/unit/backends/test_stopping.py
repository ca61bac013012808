"""The reason for which a run is stopped."""

from __future__ import annotations

import os
import queue
import signal
import threading

import pytest
from support.builders import job, lab

from labctl.backends.stopping import RunStopper, interrupts


class Stopper(RunStopper):
    """Stop signal without a run to end."""

    def end(self, grace: float) -> None:
        pass


@pytest.fixture
def stop() -> Stopper:
    """Return a stopper of a run."""
    return Stopper(lab(), job())


def test_the_first_reason_stands(stop: Stopper) -> None:
    """A second reason does not replace the first."""
    stop.because("timeout", "first")
    stop.because("interrupted", "second")
    assert (stop.cause, stop.message) == ("timeout", "first")


def test_a_run_that_has_ended_takes_no_reason(stop: Stopper) -> None:
    """After close() a reason is not noted."""
    stop.close()
    stop.because("node-lost", "late")
    assert stop.cause is None


def test_each_ctrl_c_is_acknowledged(stop: Stopper) -> None:
    """Send SIGINT in interrupts(): a notice comes and the cause is interrupted; with a second one the run is killed."""
    notices: queue.Queue[str] = queue.Queue()
    with interrupts(stop, notices.put):
        os.kill(os.getpid(), signal.SIGINT)
        assert notices.get(timeout=60).startswith("stopping the run (5 s), then ")
        os.kill(os.getpid(), signal.SIGINT)
        assert notices.get(timeout=60) == "killing the run"
    assert (stop.cause, stop.message, notices.empty()) == ("interrupted", "stopped by SIGINT", True)


def test_a_signal_while_a_reason_is_noted_does_not_hang(stop: Stopper, monkeypatch: pytest.MonkeyPatch) -> None:
    """because() inside a signal handler that interrupts because() does not block; the first reason stands."""

    class Interrupted:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            """Note another reason, as a signal handler would."""
            stop.because("interrupted", "stopped by SIGINT")

    caller = threading.Thread(target=stop.because, args=("rank-crashed", "rank 0"), daemon=True)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert stop.cause == "rank-crashed"
