"""Lines of a rank that its failure's message quotes."""

from __future__ import annotations

import pytest

from labctl.records import last_words

TRACEBACK = """\
step 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
{}"""

RAISED = TRACEBACK.removeprefix("step 1\n")
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.3]:3994"
CHILD = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1."
FRAMES = "Exception raised from check (most recent call first):\n" + "frame #0: clone + 0x43 (0x1555)\n" * 9


@pytest.mark.parametrize(
    ("written", "quoted"),
    [
        ("ValueError: no such data", "ValueError: no such data"),
        # The shell that started it has the last word, and not the program's own.
        (
            "terminate called after throwing an instance of 'std::runtime_error'\n"
            "  what():  no such data\n"
            "/workspace/outputs/r1/rank.sh: line 27:   382 Aborted                 timeout 130 python -u train.py",
            "what():  no such data",
        ),
        ("rank.sh: line 9: 12 Segmentation fault      (core dumped) timeout 9 ./prog", ""),
        ("./job.sh: 2: hello: not found", "./job.sh: 2: hello: not found"),
        ("timeout: failed to run command 'a': No such file", "failed to run command 'a': No such file"),
        ("timeout: no answer", "timeout: no answer"),
        (TRACEBACK.format("ValueError: no such data"), "ValueError: no such data"),
        (
            TRACEBACK.format("RuntimeError: Error(s) in loading:\n\tsize mismatch for a.\n\tsize mismatch for b."),
            "RuntimeError: Error(s) in loading: size mismatch for a. size mismatch for b.",
        ),
        # torch marks each line; what comes after it was cleaned up is no part of the message.
        (
            "\n".join(f"[rank1]: {line}" for line in TRACEBACK.format("ValueError: no\nsuch data").splitlines())
            + "\n[W1123 21:00:00 ProcessGroup.cpp:1] destroy_process_group() was not called",
            "ValueError: no such data",
        ),
        # Caught long ago: what it did since then counts.
        (TRACEBACK.format("ValueError: caught\n" + "step\n" * 20 + "step 21"), "step 21"),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n  File 'x.py'",
            "Fatal Python error: Segmentation fault",
        ),
        (
            f"compiling\n{'-' * 74}\nThe Open MPI wrapper compiler was unable to find the specified compiler\n"
            f"gcc in your PATH.\nNote that\nthis\n{'-' * 74}",
            "The Open MPI wrapper compiler was unable to find the specified compiler gcc in your PATH. Note that",
        ),
        ("error: no file\n======", "error: no file"),
        # What follows from a failure is not taken for it, neither what the launcher of a program says of it.
        (TRACEBACK.format("KeyError: 'a'\n") + RAISED.format(LOST), "KeyError: 'a'"),
        (
            TRACEBACK.format("KeyError: 'a'\n") + f"[E ProcessGroupNCCL.cpp:9] x\nwhat(): {LOST}\n{FRAMES}",
            "KeyError: 'a'",
        ),
        (TRACEBACK.format("KeyError: 'a'\n") + RAISED.format(CHILD), "KeyError: 'a'"),
        (TRACEBACK.format("ValueError: caught\n" + "step\n" * 20) + LOST, LOST),
        (TRACEBACK.format(LOST), LOST),
        (CHILD, CHILD),
        # Python says that a program was aborted, the C++ library why.
        (
            f"  what():  no such data\n{FRAMES}\nFatal Python error: Aborted\n\nThread 0x7f",
            "what():  no such data",
        ),
        (
            "terminate called without an active exception\nFatal Python error: Aborted",
            "terminate called without an active exception",
        ),
        ("step 1\nFatal Python error: Aborted\n\nThread 0x7f", "Fatal Python error: Aborted"),
        ("", ""),
    ],
)
def test_the_words_that_tell_what_went_wrong_are_quoted(written: str, quoted: str) -> None:
    """Quote outputs of failed programs: the line or message that tells the error, "" without one."""
    assert last_words.quoted(written.splitlines()) == quoted


PYDANTIC = """\
pydantic_core._pydantic_core.ValidationError: 3 validation errors for Config
lr
  Input should be a valid number [type=float_parsing, input_value='x', input_type=str]
    For further information visit https://errors.pydantic.dev/2.9/v/float_parsing
steps
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.9/v/missing
data
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.9/v/missing"""


def test_a_long_message_is_quoted_from_its_beginning() -> None:
    """Quote a message of many lines: from its beginning, cut."""
    quoted = last_words.quoted(TRACEBACK.format(PYDANTIC).splitlines())
    assert quoted.startswith(
        "pydantic_core._pydantic_core.ValidationError: 3 validation errors for Config lr Input should"
    )
    assert quoted.endswith(" data")


def test_a_traceback_of_which_only_the_end_is_kept_is_one() -> None:
    """Quote the end of a deep traceback: its whole message."""
    deep = '  File "train.py", line 3, in f\n    f()\n' * 1000
    lines = ("Traceback (most recent call last):\n" + deep + "ValueError: no\nsuch data").splitlines()
    assert last_words.quoted(lines[-last_words.MOST :]) == "ValueError: no such data"


def test_a_traceback_within_a_message_counts() -> None:
    """Quote a traceback inside an exception's message: the inner exception."""
    lines = (
        "RuntimeError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    )
    worker = "  File \"worker.py\", line 9, in _loop\n    data = fetch()\nKeyError: 'label'"
    assert last_words.quoted(TRACEBACK.format(lines + worker).splitlines()) == "KeyError: 'label'"


def test_ranks_whose_lines_alternate_are_quoted_apart() -> None:
    """Quote alternating lines of two ranks: each rank's own message; without a rank the last."""
    texts = [TRACEBACK.format(f"ValueError: of {rank}\nsecond line").splitlines()[1:] for rank in (0, 1)]
    lines = [f"[rank{rank}]: {line}" for pair in zip(*texts, strict=True) for rank, line in enumerate(pair)]
    for rank in (0, 1):
        assert last_words.quoted(lines, f"rank {rank}") == f"ValueError: of {rank} second line"
    assert last_words.quoted(lines) == "ValueError: of 1 second line"
    assert last_words.quoted([*lines, "killed by someone"], "rank 2") == "killed by someone"


IN_LIBRARY = """\
Traceback (most recent call last):
  File "/workspace/outputs/r1/work/train.py", line 9, in <module>
    main()
  File "/workspace/outputs/r1/work/utils/saving.py", line 88, in save
    tokenizer.save_vocabulary(folder)
  File "/opt/venv/lib/python3.11/site-packages/transformers/tokenization_utils_base.py", line 2581, in save_vocabulary
    raise NotImplementedError
NotImplementedError
"""


@pytest.mark.parametrize(
    ("written", "place"),
    [
        (IN_LIBRARY, "utils/saving.py:88"),
        ("".join(f"[rank1]: {line}\n" for line in IN_LIBRARY.splitlines()), "utils/saving.py:88"),
        (TRACEBACK.format("ValueError: no such data"), "train.py:3"),
        (
            IN_LIBRARY + "\nDuring handling of the above exception, another exception occurred:\n\n"
            'Traceback (most recent call last):\n  File "/workspace/clone/run.py", line 4, in f\nValueError: b\n',
            "/workspace/clone/run.py:4",
        ),
        (IN_LIBRARY.replace("/workspace/outputs/r1/work/", "/usr/lib/python3.11/"), ""),
        # labctl's startup hook stands between a script and torch's process groups.
        (IN_LIBRARY.replace("outputs/r1/work/utils/saving.py", "workloads/common/sitecustomize.py"), "train.py:9"),
        (TRACEBACK.format("ValueError: caught\n" + "step\n" * 20 + "step 21"), ""),
        (f"{IN_LIBRARY}Fatal Python error: Segmentation fault", ""),
        ("ValueError: no such data", ""),
    ],
)
def test_an_exception_has_its_place_in_the_innermost_file_of_no_library(written: str, place: str) -> None:
    """Find an exception's place: the innermost file that is no library; "" without a traceback."""
    assert last_words.place(written.splitlines(), "rank 1") == place


@pytest.mark.parametrize(
    "line",
    [
        "Unable to locate sufficient 2 gpus to run this example. Exiting.",
        "CUDA is not available",
        "XPU unavailable",
        "No GPUs detected. Exiting program.",
        "Requires at least 2 GPUs to run, but got 1.",
        "This example needs 2 GPUs",
        "Cannot find data folder, exiting",
        "Failed to load config. Exiting...",
        "torch.cuda is not available! Exit.",
    ],
)
def test_a_last_line_that_gives_up_is_known(line: str) -> None:
    """Print a line that gives up: giving_up returns it if it is the last."""
    assert last_words.giving_up(["step 1", line]) == line
    record = "[W1129 10:00:00 socket.cpp:1] destroy_process_group() was not called"
    assert last_words.giving_up(["step 1", line, record]) == line
    assert last_words.giving_up([line, "step 1"]) == ""


@pytest.mark.parametrize(
    "line",
    [
        "CUDA is not available, using CPU",
        "Device: cpu (GPU not available, running on CPU)",
        "UserWarning: 'pin_memory' argument is set as true but no accelerator is found",
        "No cuda runtime is found, using CUDA_HOME='/usr/local/cuda'",
        "Early stopping: no improvement in 5 epochs, exiting",
        "Training done. Exiting.",
        "Finished in 3 s; exiting",
        "Exiting",
        "Skipping validation",
        "12 passed, 0 failed",
        "needs 4 GPUs for the full model; completed on 2",
        "It requires 3 GB of GPU memory",
        "step 100 of 100, loss: 0.3",
    ],
)
def test_a_last_line_of_a_program_that_did_its_work_is_not_taken_for_one_that_gives_up(line: str) -> None:
    """Print a last line of a program that did its work: giving_up returns ""."""
    assert last_words.giving_up([line]) == ""


def test_very_many_ranks_keep_fewer_lines_each() -> None:
    """Ask how many lines are kept: 300, fewer for many ranks, at least 60."""
    assert [last_words.kept(ranks) for ranks in (2, 100, 300, 4096)] == [300, 300, 100, 60]


def test_the_last_of_several_exceptions_is_quoted() -> None:
    """Quote chained exceptions: the last one."""
    both = TRACEBACK.format("KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n")
    assert last_words.quoted((both + TRACEBACK.format("ValueError: b")).splitlines()) == "ValueError: b"


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  |     raise ExceptionGroup("two failed", [ValueError("a"), KeyError("b")])
  | ExceptionGroup: two failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 2, in load
    | KeyError: 'b'
    +------------------------------------
"""


def test_an_exception_group_is_quoted_with_what_it_holds() -> None:
    """Quote an exception group: it and the exceptions in it."""
    quoted = last_words.quoted(GROUP.splitlines())
    assert quoted == "ExceptionGroup: two failed (2 sub-exceptions); ValueError: a; KeyError: 'b'"


def test_a_long_message_is_cut() -> None:
    """Quote 5000 characters: cut to LONGEST."""
    assert len(last_words.quoted(["x" * 5000])) == last_words.LONGEST


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        ("rank 1 exited with code 7: ValueError: x is 1.", ["b", "ValueError: x is 1", "c", "d"]),
        (
            "rank 1 on a exited with code 7: ValueError: x is 1; rank 0 on b exited with code 1",
            ["b", "ValueError: x is 1", "c", "d"],
        ),
        ("rank 1 exited with code 7: ValueError: x is 1 but should be 2", ["b", "ValueError: x is 1", "c", "d"]),
        ("rank 1 exited with code 7: ValueError: x is 1 (train.py:3)", ["b", "ValueError: x is 1", "c", "d"]),
        ("The run was stopped: timeout.", ["ValueError: x is 1"]),
    ],
)
def test_lines_with_the_cause_are_those_around_the_quoted_words_or_those_of_errors(
    message: str, quoted: list[str]
) -> None:
    """Ask for lines with the cause: those around the quoted words, else those of errors."""
    assert last_words.cause_lines(message, ["b", "ValueError: x is 1", "c", "d"]) == quoted


@pytest.mark.parametrize(
    ("line", "is_about_error"),
    [
        ("Segmentation fault (core dumped)", True),
        ("the launcher exits with code 7", True),
        ("[launch.py:169:main] global_rank_mapping=defaultdict(<class 'list'>, {'worker-0': [0]})", False),
        ("[launch.py:285:main] Process 22 exits successfully.", False),
    ],
)
def test_a_line_is_about_an_error_by_its_words(line: str, is_about_error: bool) -> None:
    """Ask if lines are about errors: those of a launcher that works are not."""
    assert last_words.is_error(line) == is_about_error


MPI_START = """\
--------------------------------------------------------------------------
A call to mkdir was unable to create the desired directory:

  Directory: /tmp/ompi.launcher.0
  Error:     File exists

Please check to ensure you have adequate permissions to perform
the desired operation.
--------------------------------------------------------------------------
[launcher:00525] [[40828,0],0] ORTE_ERROR_LOG: Error in file ../../../orte/util/session_dir.c at line 107
--------------------------------------------------------------------------
It looks like orte_init failed for some reason; your parallel process is
likely to abort.  There are many reasons that a parallel process can
fail during orte_init; some of which are due to configuration or
--------------------------------------------------------------------------
"""


def test_of_open_mpis_blocks_the_one_that_names_a_reason_is_quoted() -> None:
    """Quote a failed start of mpirun: the block about mkdir, not the last one, which names no reason; alone, that."""
    lines = MPI_START.splitlines()
    reason = "A call to mkdir was unable to create the desired directory: Directory: /tmp/ompi.launcher.0 Error:"
    assert last_words.quoted(lines).startswith(reason)
    assert last_words.quoted(lines[10:]).startswith("It looks like orte_init failed")


FAILED = """\
E1129 13:56:47.072000 665 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  exitcode  : -15 (pid: 671)
  traceback : Signal 15 (SIGTERM) received by PID 671
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 670)
  traceback : {}
============================================================
"""
NO_TRACE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def of_rank(rank: int, words: str) -> str:
    """Return a traceback with these words, each line marked with the rank."""
    return "".join(f"[rank{rank}]: {line}\n" for line in RAISED.format(words).splitlines())


@pytest.mark.parametrize(
    ("written", "quoted"),
    [
        (of_rank(0, LOST) + of_rank(1, "KeyError: 'a'") + FAILED.format(NO_TRACE), "KeyError: 'a'"),
        (of_rank(1, "KeyError: 'a'") + of_rank(0, LOST) + FAILED.format(NO_TRACE), "KeyError: 'a'"),
        (RAISED.format("KeyError: 'a'\n") + FAILED.format(NO_TRACE), "KeyError: 'a'"),
        (of_rank(0, LOST) + of_rank(1, LOST) + FAILED.format(NO_TRACE), LOST),
        (
            "step 1\n" + of_rank(0, LOST) + FAILED.format("Signal 9 (SIGKILL) received by PID 688"),
            "traceback : Signal 9 (SIGKILL) received by PID 688",
        ),
    ],
)
def test_of_a_node_whose_program_starts_ranks_the_first_failure_is_quoted(written: str, quoted: str) -> None:
    """Quote a node whose program starts ranks: the rank's error, not what torchrun says of it."""
    assert last_words.quoted(written.splitlines(), "rank 0") == quoted
    assert last_words.quoted(written.splitlines(), "rank 3") == quoted
