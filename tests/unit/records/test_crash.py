"""What a failed run's output says of its ranks."""

from __future__ import annotations

import pytest
from support.builders import job, lab, printed

from labctl.records.crash import CrashWatch, signal_name


@pytest.fixture
def crashes() -> CrashWatch:
    return CrashWatch(lab(), job())


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [pair.cc:553] Connection closed by peer [192.168.80.3]:3994",
        "RuntimeError: [pair.cc:534] Read error: Connection reset by peer",
        "DistNetworkError: Connection was likely closed. Did the remote server shutdown or crash?",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_lost_peer_is_told_by_every_backend_in_its_own_words(crashes: CrashWatch, words: str) -> None:
    crashes.look_at((printed(f"worker-0: {words}"),))
    crashes.look_at((printed("worker-0: \x010!\x02labctl: rank 0 on worker-0 exited with code 1"),))
    assert crashes.reason is not None
    assert crashes.reason.follows


def test_of_two_ranks_with_reasons_of_their_own_the_first_is_named(crashes: CrashWatch) -> None:
    for rank in (1, 0):
        crashes.look_at((printed(f"worker-{rank}: ValueError: {rank}"),))
        crashes.look_at(
            (printed(f"worker-{rank}: \x01{rank}!\x02labctl: rank {rank} on worker-{rank} exited with code 1"),)
        )
    assert str(crashes.reason) == "rank 1 on worker-1 exited with code 1: ValueError: 1"


def test_the_last_words_of_a_rank_are_those_that_a_bar_was_drawn_over_with(crashes: CrashWatch) -> None:
    bars = "".join(f"\r {step}%|###   | {step}/100 [00:10<00:23]" for step in range(100))
    crashes.look_at((printed(f"worker-0: {bars}\rValueError: no data"),))
    crashes.look_at((printed("worker-0: \x010!\x02labctl: rank 0 on worker-0 exited with code 1"),))
    assert str(crashes.reason) == "rank 0 on worker-0 exited with code 1: ValueError: no data"


@pytest.mark.parametrize(("code", "name"), [(1, ""), (137, " (SIGKILL)"), (139, " (SIGSEGV)"), (255, ""), (128, "")])
def test_codes_above_128_are_signals(code: int, name: str) -> None:
    assert signal_name(code) == name
