"""Whether trying again helps, told from what failed programs wrote and from causes that labctl finds itself."""

from __future__ import annotations

import pytest
from support.builders import job, lab, printed

from labctl.model import Cause
from labctl.records import outlook
from labctl.records.crash import CrashWatch

WORKLOAD, INFRASTRUCTURE, UNKNOWN = "workload", "infrastructure", "unknown"
HELPS, DOES_NOT = "helps", "does not"

RAISED = """\
Traceback (most recent call last):
  File "/workspace/outputs/r1/work/train.py", line 7, in <module>
    main()
"""
ABORTED = "\nFatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n  <no Python frame>"
STACK = "\n".join(f"frame #{number}: c10d::watchdog() + 0x{number}d2 (0x7f5d)" for number in range(12))
LATE = (
    "[rank1]:[E1016 03:31:38.878 ProcessGroupNCCL.cpp:621] [Rank 1] Some NCCL operations have failed or timed out.\n"
    "[rank1]:[E1016 03:31:38.878 ProcessGroupNCCL.cpp:627] [Rank 1] To avoid data inconsistency, we are taking the "
    "entire process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG 0 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=880, OpType=BROADCAST) ran for 1800695 milliseconds before "
    "timing out.\n"
    f"Exception raised from checkTimeout at ProcessGroupNCCL.cpp:609 (most recent call first):\n{STACK}{ABORTED}"
)
CUDA = (
    "CUDA kernel errors might be asynchronously reported at some other API call.\nFor debugging consider passing X=1."
)

OWN = {
    "nan": ("step 3 loss nan\nLoss is nan, stopping training", 1, WORKLOAD, DOES_NOT),
    "no module": (f"{RAISED}ModuleNotFoundError: No module named 'peft'", 1, WORKLOAD, DOES_NOT),
    "killed": ("step 3", 137, UNKNOWN, UNKNOWN),
    "says Killed": ("step 3\nKilled", 137, UNKNOWN, UNKNOWN),
    "segmentation fault": ("step 3\nFatal Python error: Segmentation fault", 139, UNKNOWN, UNKNOWN),
    "nobody answers": (f"{RAISED}EOFError: EOF when reading a line", 1, WORKLOAD, DOES_NOT),
    "no program": ("timeout: failed to run command './a.sh': No such file or directory", 127, WORKLOAD, DOES_NOT),
    "no word": ("step 3", 3, UNKNOWN, UNKNOWN),
    "key error": (f"{RAISED}KeyError: 'input_ids'", 1, WORKLOAD, DOES_NOT),
    "arguments": (
        "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --learning_rat",
        2,
        WORKLOAD,
        DOES_NOT,
    ),
    "full disk": (f"{RAISED}OSError: [Errno 28] No space left on device", 1, INFRASTRUCTURE, DOES_NOT),
    "full shared memory": (
        f"{RAISED}RuntimeError: unable to write to file </torch_12_1>: No space left on device (28)",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "lost peers alone": ("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.3]:3994", 1, UNKNOWN, UNKNOWN),
}
"""What a rank wrote, its exit code, and the domain and outlook that are right."""

STRANGERS = {
    "memory of a bad card, and the watchdog after it": (
        f"{RAISED}RuntimeError: CUDA error: uncorrectable ECC error encountered\n{CUDA}\n\n"
        "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: "
        "uncorrectable "
        f"ECC error encountered\n{CUDA}\nException raised from check at CUDAException.cpp:44:\n{STACK}",
        1,
        INFRASTRUCTURE,
        HELPS,
    ),
    "link between cards": (
        "terminate called after throwing an instance of 'c10::Error'\n"
        f"  what():  CUDA error: uncorrectable NVLink error detected during the execution\n{STACK}{ABORTED}",
        134,
        INFRASTRUCTURE,
        HELPS,
    ),
    "a rank that waited half an hour": (LATE, 134, UNKNOWN, UNKNOWN),
    "remote process gone": (
        f"{RAISED}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited "
        f"or there was "
        "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error "
        "or a remote "
        "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv failed : Connection reset by peer",
        1,
        UNKNOWN,
        UNKNOWN,
    ),
    "InfiniBand": (
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  NCCL error: remote "
        "process exited "
        "or there was a network error ncclRemoteError Last error: NET/IB : Got completion from peer "
        "10.0.0.2<38560> with "
        "error 12, opcode 0, len 0, vendor err 129",
        134,
        INFRASTRUCTURE,
        UNKNOWN,
    ),
    "loss scale": (
        f"{RAISED}Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "infinite loss": (
        f"{RAISED}FloatingPointError: Loss became infinite or NaN at iteration=41!\nloss_dict = {{'loss_cls': nan}}",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "shapes": (
        f"{RAISED}RuntimeError: mat1 and mat2 shapes cannot be multiplied (29056x22016 and 11008x4096)",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "shared memory": (
        f"{RAISED}RuntimeError: DataLoader worker (pid 467) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "network file system": (f"{RAISED}OSError: [Errno 116] Stale file handle", 1, INFRASTRUCTURE, HELPS),
    "memory of a card": (
        f"{RAISED}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total "
        f"capacity of "
        "6.00 GiB of which 0 bytes is free. Including non-PyTorch memory, this process has 5.9 GiB memory in use.",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "memory of a card that another process has": (
        f"{RAISED}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total "
        f"capacity of "
        "80.00 GiB of which 1 GiB is free. Process 4711 has 70.10 GiB memory in use.",
        1,
        UNKNOWN,
        UNKNOWN,
    ),
    "a launcher that tells of its child": (
        f"{RAISED}KeyError: 'text'\n"
        "E0801 13:23:20.000000 32974 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) "
        f"local_rank: 3 (pid: 33054) of binary: python3\n{RAISED}"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        + "=" * 60
        + "\ntrain.py FAILED\n"
        + "-" * 60
        + "\nFailures:\n  <NO_OTHER_FAILURES>\n"
        + "-" * 60
        + "\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-08-01_13:23:17\n  exitcode  : 1\n"
        + "=" * 60,
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "another launcher that does": (
        f"{RAISED}ValueError: The model has no layer `lm_head`\n{RAISED}subprocess.CalledProcessError: Command "
        "'['python', 'train.py']' returned non-zero exit status 1.",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "a label out of range": (
        f"{RAISED}RuntimeError: CUDA error: device-side assert triggered\n{CUDA}",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "an illegal access": (
        f"{RAISED}RuntimeError: CUDA error: an illegal memory access was encountered",
        1,
        UNKNOWN,
        UNKNOWN,
    ),
    "Horovod's last word": (
        f"{RAISED}RuntimeError: Horovod has been shut down. This was caused by an exception on one of the ranks.",
        1,
        UNKNOWN,
        UNKNOWN,
    ),
    "no way to the hub": (
        f"{RAISED}OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
        f"them in "
        "the cached files.",
        1,
        INFRASTRUCTURE,
        UNKNOWN,
    ),
    "a busy server": (
        f"{RAISED}requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://example.com/x",
        1,
        INFRASTRUCTURE,
        HELPS,
    ),
    "unused parameters": (
        f"{RAISED}RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        1,
        WORKLOAD,
        DOES_NOT,
    ),
    "a server that did not start": (
        f"{RAISED}torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
        "connect to (worker-0, 29500).",
        1,
        UNKNOWN,
        UNKNOWN,
    ),
}
"""The same of other people's programs, shortened, as they are told of in public."""


def ended(written: str, code: int, launcher: str = "deepspeed") -> CrashWatch:
    """Return what is found out about a rank that wrote this and ended with a code."""
    watch = CrashWatch(lab(), job(launcher=launcher))
    watch.look_at([printed(f"worker-1: |{line}", 1) for line in written.splitlines()])
    watch.look_at((printed(f"worker-1: \x011!\x02labctl: rank 1 on worker-1 exited with code {code}"),))
    return watch


@pytest.mark.parametrize(
    ("written", "code", "domain", "retry"), [*OWN.values(), *STRANGERS.values()], ids=[*OWN, *STRANGERS]
)
def test_what_a_failed_program_wrote_tells_whether_trying_again_helps(
    written: str, code: int, domain: str, retry: str
) -> None:
    """Read a failed program's output: domain and outlook of a retry, with evidence from the message."""
    watch = ended(written, code)
    found = outlook.of(watch.cause, watch.message)
    assert (found.domain, found.retry) == (domain, retry), found.evidence
    assert found.evidence.removesuffix(" ...") in watch.message


@pytest.mark.parametrize(
    ("cause", "message", "domain", "retry"),
    [
        ("node-lost", "worker-1 (rank 1): container exited", INFRASTRUCTURE, HELPS),
        ("device-lost", "worker-0 (rank 0): device lost: /dev/x", INFRASTRUCTURE, HELPS),
        ("lab-lost", "the lab's nodes are gone", INFRASTRUCTURE, HELPS),
        ("stalled", "worker-1 (rank 1): container is paused; to resume it: docker unpause w", INFRASTRUCTURE, HELPS),
        ("stalled", "no step and no line for 600 s", UNKNOWN, UNKNOWN),
        ("timeout", "timed out after 40 s", UNKNOWN, DOES_NOT),
        ("timeout", "timed out after 40 s, after step 7/9; no rank wrote a line", UNKNOWN, DOES_NOT),
        ("timeout", "timed out after 40 s; rank 1 (worker-1) has not joined all_reduce #6", UNKNOWN, UNKNOWN),
        ("does-not-fit", "needs 30 GiB, a node has 8 GiB", WORKLOAD, DOES_NOT),
        ("no-metric", "Metric `loss` is nan; its criteria cannot be checked.", WORKLOAD, DOES_NOT),
        ("disk-full", "cannot write output.log: No space left on device", INFRASTRUCTURE, DOES_NOT),
        ("interrupted", "stopped by ann@host", UNKNOWN, UNKNOWN),
        ("launcher-failed", "the launcher exited with code 1: ssh: No route to host", INFRASTRUCTURE, UNKNOWN),
        ("launcher-failed", "Only 0 of 2 ranks reported.", UNKNOWN, UNKNOWN),
        ("rank-crashed", "rank 0 on a exited with code 1: python: No module named makemoer", WORKLOAD, DOES_NOT),
        ("out-of-memory", "rank 0 on a exited with code 137 (SIGKILL): ran out of memory; a node has LAB_MEMORY=2g",
         WORKLOAD, DOES_NOT),
        ("out-of-memory", "rank 0 on a exited with code 137 (SIGKILL): ran out of memory; LAB_MEMORY is not set: x",
         UNKNOWN, UNKNOWN),
    ],
)  # fmt: skip
def test_a_cause_that_labctl_finds_itself_tells_it_too(cause: Cause, message: str, domain: str, retry: str) -> None:
    """Judge causes that labctl finds itself: domain and outlook, with evidence from the message."""
    found = outlook.of(cause, message)
    assert (found.domain, found.retry) == (domain, retry)
    assert found.evidence in message


def test_a_run_that_passed_has_none() -> None:
    """Judge a PASS: the empty outlook."""
    assert outlook.of(None, "All criteria met.") == outlook.PASSED


def test_the_fact_is_that_of_the_first_failure_with_its_place() -> None:
    """Fail two ranks: the evidence is the first error, with its place."""
    watch = ended(*OWN["key error"][:2])
    watch.look_at((printed("worker-0: \x010!\x02labctl: rank 0 on worker-0 exited with code 1"),))
    assert outlook.of(watch.cause, watch.message).evidence == "KeyError: 'input_ids' (train.py:7)"


def test_a_signal_without_an_error_is_its_own_evidence() -> None:
    """Kill a rank without an error: the evidence is the report of its end."""
    watch = ended("step 3, loss nan", 137)
    assert outlook.of(watch.cause, watch.message).evidence == (
        "rank 1 on worker-1 exited with code 137 (SIGKILL); the last it wrote: step 3, loss nan"
    )


def test_what_deepspeeds_launcher_reports_alone_is_unknown() -> None:
    """Read a kill from DeepSpeed's launcher alone: the outlook is unknown."""
    watch = CrashWatch(lab(), job(launcher="script"))
    killed = (
        "worker-1: [2026-01-02 15:04:05,885] [ERROR] [launch.py:434:sigkill_handler] [] exits with return code = -9"
    )
    watch.look_at((printed(killed),))
    assert outlook.of(watch.cause, watch.message).retry == UNKNOWN


def test_evidence_far_back_in_long_words_begins_with_it() -> None:
    """Judge a long message with a known text in its middle: the evidence begins with it and is cut."""
    found = outlook.of(
        "rank-crashed", f"rank 1 on a exited with code 1: Error: {'x' * 900} size mismatch for b{'y' * 900}"
    )
    assert found.evidence.startswith("size mismatch for b")
    assert len(found.evidence) == outlook.LONGEST
