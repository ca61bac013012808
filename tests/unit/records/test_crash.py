"""Crashed ranks, read from a failed run's output."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from support.builders import job, lab, printed

from labctl.records import store
from labctl.records.crash import CrashWatch, memory_limit, signal_name

CRASH = "worker-1: \x011!\x02labctl: rank 1 on worker-1 exited with code 9"
LOST = "worker-0: RuntimeError: [pair.cc:553] Connection closed by peer [192.168.80.3]:3994. Check the remote worker."
NOTICED = "worker-0: \x010!\x02labctl: rank 0 on worker-0 exited with code 1"
FAILED = "worker-1: [2026-01-02 15:04:05] [ERROR] [launch.py:341:sigkill_handler] [] exits with return code = "


@pytest.fixture
def crashes() -> CrashWatch:
    """Return a CrashWatch of a deepspeed job."""
    return CrashWatch(lab(), job())


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [pair.cc:553] Connection closed by peer [192.168.80.3]:3994",
        "RuntimeError: [pair.cc:534] Read error: Connection reset by peer",
        "DistNetworkError: Connection was likely closed. Did the remote server shutdown or crash?",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "what():  [PG 0 Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9141, OpType=ALLREDUCE) ran for 600022 milliseconds",
        "what():  [Rank 5] NCCL watchdog thread terminated with exception: NCCL communicator was aborted on rank 5.",
        "what():  NCCL error: remote process exited or there was a network error, NCCL version 2.14.3",
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistStoreError: The connection to the C10d store has failed.",
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 71 got signal: 15",
        "W0409 07:28:49.531000 1359 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 1365 closing "
        "signal SIGTERM",
        "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD with errorcode 1.",
        "An MPI communication peer process has unexpectedly disconnected.  This",
        "AbortedError (see above for traceback): Horovod has been shut down. This was caused by an exception",
    ],
)
def test_a_lost_peer_is_told_by_every_backend_in_its_own_words(crashes: CrashWatch, line: str) -> None:
    """Print a lost connection and exit code 1 of rank 0: the reason follows from another failure."""
    crashes.look_at((printed(f"worker-0: {line}"),))
    crashes.look_at((printed("worker-0: \x010!\x02labctl: rank 0 on worker-0 exited with code 1"),))
    assert crashes.reason is not None
    assert crashes.reason.follows


@pytest.mark.parametrize(
    "line",
    [
        "what():  [PG 0] Process group watchdog thread terminated with exception: CUDA error: launch failure",
        "ValueError: no such data",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (worker-0, 29500).",
    ],
)
def test_an_error_of_the_ranks_own_is_no_lost_peer(crashes: CrashWatch, line: str) -> None:
    """Print a rank's own error and exit code 1: the reason does not follow from another."""
    crashes.look_at((printed(f"worker-0: {line}"), printed(NOTICED)))
    assert crashes.reason is not None
    assert not crashes.reason.follows


@pytest.mark.parametrize(("words", "named"), [("step 3", "rank 1"), ("ValueError: x", "rank 0")])
def test_a_rank_that_was_told_to_end_is_not_the_reason_unless_it_tells_of_an_error(
    crashes: CrashWatch, words: str, named: str
) -> None:
    """End rank 0 with SIGTERM and crash rank 1: rank 1 is named, unless rank 0 printed an error."""
    crashes.look_at((printed(f"worker-0: |{words}", 0), printed(NOTICED.replace("code 1", "code 143"))))
    crashes.look_at((printed("worker-1: |ValueError: no such data", 1), printed(CRASH)))
    assert crashes.message.startswith(f"{named} on ")


@pytest.mark.parametrize(
    "late",
    [
        "what():  [Rank 0] watchdog thread terminated with exception: Watchdog caught collective operation timeout",
        "what():  NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error",
    ],
)
def test_the_first_failure_is_told_from_the_aborts_that_follow_it(crashes: CrashWatch, late: str) -> None:
    """Abort rank 0 with a watchdog's words before rank 1 crashes: rank 1's error comes first."""
    frames = [printed(f"worker-0: |frame #{number}: clone + 0x43 (0x1555)", 0) for number in range(9)]
    crashes.look_at((printed(f"worker-0: |{late}", 0), *frames, printed("worker-0: |Fatal Python error: Aborted", 0)))
    crashes.look_at((printed(NOTICED.replace("code 1", "code 134")),))
    crashes.look_at((printed("worker-1: |KeyError: 'text'", 1), printed(CRASH)))
    assert crashes.message == (
        "rank 1 on worker-1 exited with code 9: KeyError: 'text'; rank 0 on worker-0 exited with code 134 (SIGABRT)"
    )


def test_of_two_ranks_with_reasons_of_their_own_the_first_is_named(crashes: CrashWatch) -> None:
    """Fail two ranks with own errors: the first is the reason."""
    for rank in (1, 0):
        crashes.look_at((printed(f"worker-{rank}: ValueError: {rank}"),))
        crashes.look_at(
            (printed(f"worker-{rank}: \x01{rank}!\x02labctl: rank {rank} on worker-{rank} exited with code 1"),)
        )
    assert str(crashes.reason) == "rank 1 on worker-1 exited with code 1: ValueError: 1"


def test_the_last_words_of_a_rank_are_those_that_a_bar_was_drawn_over_with(crashes: CrashWatch) -> None:
    """Print an error after a bar in one line: the error is the last word."""
    bars = "".join(f"\r {step}%|###   | {step}/100 [00:10<00:23]" for step in range(100))
    crashes.look_at((printed(f"worker-0: {bars}\rValueError: no data"),))
    crashes.look_at((printed("worker-0: \x010!\x02labctl: rank 0 on worker-0 exited with code 1"),))
    assert str(crashes.reason) == "rank 0 on worker-0 exited with code 1: ValueError: no data"


@pytest.mark.parametrize(("code", "name"), [(1, ""), (137, " (SIGKILL)"), (139, " (SIGSEGV)"), (255, ""), (128, "")])
def test_codes_above_128_are_signals(code: int, name: str) -> None:
    """Name exit codes: signals above 128, else ""."""
    assert signal_name(code) == name


def watching(launcher: str = "deepspeed") -> CrashWatch:
    """Return a CrashWatch of a job with this launcher."""
    return CrashWatch(lab(), job(launcher=launcher))


def test_a_crashed_rank_is_the_reason_even_when_the_others_end_by_themselves() -> None:
    """Crash one rank, then exit the other: cause rank-crashed, both in the message."""
    watch = watching()
    watch.look_at((printed("Traceback (most recent call last):"),))
    watch.look_at((printed(CRASH),))
    watch.look_at((printed("\x010!\x02labctl: rank 0 on worker-0 exited with code 1"),))
    assert watch.cause == "rank-crashed"
    assert watch.message == "rank 1 on worker-1 exited with code 9; rank 0 on worker-0 exited with code 1"


def test_a_crashed_ranks_last_words_are_in_the_reason() -> None:
    """Print an error before the crash: it is in the message."""
    watch = watching()
    watch.look_at((printed("worker-1: ValueError: no such data"),))
    watch.look_at((printed("worker-0: step 3"),))
    watch.look_at((printed(CRASH),))
    assert watch.message == "rank 1 on worker-1 exited with code 9: ValueError: no such data"


def test_an_exception_without_a_word_has_its_place_in_the_reason() -> None:
    """Print a traceback whose exception has no text: its place in the user's file is in the message."""
    watch = watching()
    for text in (
        "Traceback (most recent call last):",
        '  File "/workspace/outputs/r1/work/train.py", line 9, in save',
        '  File "/opt/venv/lib/python3.11/site-packages/transformers/base.py", line 2581, in save_vocabulary',
        "NotImplementedError",
    ):
        watch.look_at((printed(f"worker-1: |{text}", 1),))
    watch.look_at((printed(CRASH),))
    assert watch.message == "rank 1 on worker-1 exited with code 9: NotImplementedError (train.py:9)"


@pytest.mark.parametrize(
    "words",
    [
        "OSError: [Errno 28] No space left on device: 'ckpt/last.pt'",
        "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos; No space left on device",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
)
def test_a_rank_that_found_no_room_ended_for_a_full_disk(words: str) -> None:
    """Print "No space left on device" or quota exceeded: cause disk-full."""
    watch = watching()
    watch.look_at((printed(f"worker-1: {words}"),))
    watch.look_at((printed(CRASH),))
    assert (watch.cause, watch.message) == ("disk-full", f"rank 1 on worker-1 exited with code 9: {words}")


def test_the_rank_whose_last_line_gives_up_is_named() -> None:
    """Print a last line that gives up: gave_up() has rank and line; "" once another line follows."""
    watch = watching()
    watch.look_at((printed("worker-0: |step 3", 0), printed("worker-1: |CUDA is not available", 1)))
    assert watch.gave_up() == "rank 1: CUDA is not available"
    watch.look_at((printed("worker-1: |using the CPU", 1),))
    assert watch.gave_up() == ""
    script = watching("script")
    script.look_at((printed("No GPU found"), printed("")))
    assert (script.gave_up(), script.is_silent) == ("the script: No GPU found", False)


def test_a_last_line_that_tells_of_no_error_is_not_told_as_one() -> None:
    """Crash after a line without an error: the message has it as the last that the rank wrote."""
    watch = watching()
    watch.look_at((printed("worker-1: step 3, loss 0.5"),))
    watch.look_at((printed(CRASH),))
    assert watch.message == "rank 1 on worker-1 exited with code 9; the last it wrote: step 3, loss 0.5"


@pytest.mark.parametrize(
    ("lines", "is_silent"),
    [
        ((), True),
        (("worker-1: \x011!\x02labctl: rank 1 of 2 on worker-1", "labctl: silent for 7 s: no rank waits"), True),
        (("[1,1]<stdout>:step 1",), False),
        (("worker-1: step 1",), False),
    ],
)
def test_it_is_known_at_the_end_if_no_rank_wrote_a_line(lines: tuple[str, ...], is_silent: bool) -> None:
    """Print labctl's own lines alone or a rank's: is_silent is True or False."""
    watch = watching()
    for line in lines:
        watch.look_at((printed(line),))
    assert watch.is_silent is is_silent
    assert watch.launcher_words == ""


def test_that_a_rank_reported_in_is_not_its_last_word() -> None:
    """Crash after the rank's first report: it is not quoted."""
    watch = watching()
    watch.look_at((printed("worker-1: \x011!\x02labctl: rank 1 of 2 on worker-1"),))
    watch.look_at((printed(CRASH),))
    assert watch.message == "rank 1 on worker-1 exited with code 9"


@pytest.mark.parametrize("mark", ["[1,1]<stderr>:", "[1]<stderr>:", "[1] "])
def test_last_words_are_found_under_the_marks_of_every_launcher(mark: str) -> None:
    """Print with the marks of Open MPI and MPICH: the rank's error is quoted."""
    watch = watching()
    watch.look_at((printed(f"{mark}ValueError: no such data"),))
    watch.look_at((printed(mark.replace("1", "0", 2) + "step 3"),))
    watch.look_at((printed(mark + CRASH),))
    assert watch.message == "rank 1 on worker-1 exited with code 9: ValueError: no such data"


def test_a_ranks_last_words_are_its_own_where_each_line_says_whose_it_is() -> None:
    """Print lines of several ranks of a node: the crashed rank's own error is quoted."""
    watch = watching()
    watch.look_at((printed("worker-1: |ValueError: no such data", 1),))
    watch.look_at((printed("worker-1: |step 3", 0),))
    watch.look_at((printed("worker-1: RuntimeError: what its launcher says of it"),))
    watch.look_at((printed(f"worker-1: |{CRASH.removeprefix('worker-1: ')}", 1),))
    assert watch.message == "rank 1 on worker-1 exited with code 9: ValueError: no such data"


def test_what_an_elastic_launcher_started_again_is_no_reason_any_more() -> None:
    """Crash twice under an elastic launcher: the second error is the reason."""
    watch = watching("torchrun:elastic")
    watch.look_at((printed("worker-1: |ValueError: the first", 1),))
    watch.look_at((printed(CRASH),))
    watch.look_at((printed("worker-1: \x011!\x02labctl: rank 1 of 2 on worker-1"),))
    watch.look_at((printed("worker-1: |ValueError: the second", 1),))
    watch.look_at((printed(CRASH),))
    assert watch.message == "rank 1 on worker-1 exited with code 9: ValueError: the second"


@pytest.mark.parametrize("noticed_first", [True, False])
def test_a_rank_that_lost_its_peer_is_not_the_reason_where_the_peer_tells_its_own(*, noticed_first: bool) -> None:
    """Lose a peer that has an own error: the peer comes first in the message, whoever ended first."""
    watch = watching()
    watch.look_at((printed("worker-1: ValueError: no such data"),))
    watch.look_at((printed(LOST),))
    for line in (NOTICED, CRASH) if noticed_first else (CRASH, NOTICED):
        watch.look_at((printed(line),))
    first, _, other = watch.message.partition("; ")
    assert first == "rank 1 on worker-1 exited with code 9: ValueError: no such data"
    assert other == "rank 0 on worker-0 exited with code 1"


def test_a_rank_that_lost_its_peer_is_the_reason_where_no_other_says_one() -> None:
    """Lose a peer that says nothing: the lost connection is the reason."""
    watch = watching()
    watch.look_at((printed(LOST),))
    watch.look_at((printed(NOTICED),))
    assert watch.message == f"rank 0 on worker-0 exited with code 1: {LOST.removeprefix('worker-0: ')}"


@pytest.mark.parametrize(
    ("code", "message"), [("1", "a rank on worker-1 exited with code 1"), ("-9", "exited with code 137 (SIGKILL)")]
)
def test_deepspeed_reports_for_ranks_that_a_script_started(code: str, message: str) -> None:
    """Read DeepSpeed's report of an exit code under a script: cause rank-crashed with node, code and error."""
    watch = watching("script")
    watch.look_at((printed("worker-1: ValueError: no such data"),))
    killing = "[2026-01-02 15:04:05,000] [INFO] [launch.py:335:sigkill_handler] Killing subprocess 7"
    watch.look_at((printed(f"worker-1: {killing}"),))
    watch.look_at((printed(f"{FAILED}{code}"),))
    assert watch.cause == "rank-crashed"
    assert message in watch.message
    assert watch.message.endswith(": ValueError: no such data")


def test_a_rank_that_reports_by_itself_is_not_reported_for() -> None:
    """Read DeepSpeed's report where ranks report: it is no reason."""
    watch = watching()
    watch.look_at((printed(f"{FAILED}1"),))
    assert watch.cause is None


def test_what_nobody_of_the_run_says_is_not_kept() -> None:
    """Read a thousand long lines of unknown sources: only the rank's are kept, the message below 2000 characters."""
    watch = watching()
    for number in range(1000):
        watch.look_at((printed(f"{number}: {'x' * 10_000}"),))
    watch.look_at((printed(f"worker-1: {'y' * 10_000}"),))
    watch.look_at((printed(CRASH),))
    assert len(watch.message) < 2000
    assert len(watch._last) == 1


@pytest.mark.parametrize("start", ["a: [launch.py:", "a: global_rank_mapping=defaultdict(<class 'list'>, {"])
def test_a_line_of_a_mebibyte_takes_no_time(tmp_path: Path, start: str) -> None:
    """Read a line of 1 MiB that looks like DeepSpeed's: below 1 s of processor time."""
    began = time.process_time()
    line = start * ((1 << 20) // len(start))
    watching("script").look_at((printed(line),))
    (tmp_path / "runs").mkdir()
    with contextlib.closing(store.RunLog(tmp_path, lab(directory=tmp_path), job().workload)) as log:
        log.keep((printed(line),))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA out of memory",
        "torch.OutOfMemoryError: x",
        "DefaultCPUAllocator: can't allocate memory",
        "OSError: [Errno 12] Cannot allocate memory",
        "MemoryError",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 6.71 GiB for an array with shape (30000, 30000)",
        "ResourceExhaustedError: OOM when allocating tensor with shape[32,512,28,28] and type float",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::134217728 (128)MB",
        "RuntimeError: Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ],
)
def test_a_rank_that_had_no_memory_is_out_of_memory(line: str) -> None:
    """Print a failed allocation: cause out-of-memory."""
    watch = watching()
    watch.look_at((printed(line, 1),))
    watch.look_at((printed(CRASH),))
    assert watch.cause == "out-of-memory"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (("CUDA out of memory, trying half the batch", "ValueError: no such layer"), "rank-crashed"),
        (("CUDA out of memory", "step 4/10"), "out-of-memory"),
    ],
)
def test_a_word_of_memory_counts_where_no_other_error_follows_it(lines: tuple[str, ...], cause: str) -> None:
    """Print out of memory and then another error or a step: rank-crashed or out-of-memory."""
    watch = watching()
    for line in lines:
        watch.look_at((printed(line, 1),))
    watch.look_at((printed(CRASH),))
    assert watch.cause == cause


def test_a_rank_that_the_kernel_killed_is_out_of_memory_and_says_so() -> None:
    """Read that the kernel killed processes: cause out-of-memory, the message says what LAB_MEMORY is."""
    watch = watching()
    watch.look_at((printed("step 3/9", 0),))
    watch.look_at((printed("\x010!\x02labctl: worker-0 ran out of memory: the kernel killed 1 of its processes", 0),))
    watch.look_at((printed("\x010!\x02labctl: rank 0 on worker-0 exited with code 137", 0),))
    assert watch.cause == "out-of-memory"
    ended = "rank 0 on worker-0 exited with code 137 (SIGKILL)"
    had = "LAB_MEMORY is not set: a node has what its host has left"
    assert watch.message == f"{ended}: ran out of memory: the kernel killed 1 of its processes; {had}"


def test_words_alone_stop_nothing() -> None:
    """Print a warning about memory: no cause."""
    watch = watching()
    watch.look_at((printed("warning: out of memory is near"),))
    assert watch.cause is None


def test_a_node_without_memory_had_what_its_lab_gives_it() -> None:
    """Ask for the memory limit of a lab with LAB_MEMORY=2g: a sentence with it."""
    assert memory_limit(lab(memory="2g")) == "a node has LAB_MEMORY=2g"
