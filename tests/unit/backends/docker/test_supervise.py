from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import devices, job, lab, node, observed
from support.fake_backend import Failed, FakeBackend, healthy, silent
from support.harness import wait_until

from labctl.backends.docker import agent, supervise
from labctl.backends.state import ObservedState
from labctl.errors import HostError
from labctl.model import DeviceMapping, Secret
from labctl.records import store
from labctl.records.active import Ended
from labctl.records.lines import Line
from labctl.records.verdict import RunOutcome

LAB = lab()
JOB = job(LAB)
LAUNCH = supervise.launch_of(LAB, JOB)
EVERYWHERE = ["labctl-demo-launcher-1", "labctl-demo-worker-0-1", "labctl-demo-worker-1-1"]
CRASH = "worker-1: \x011!\x02labctl: rank 1 on worker-1 exited with code 9"
FAILED = "worker-1: [2026-01-02 15:04:05] [ERROR] [launch.py:341:sigkill_handler] [] exits with return code = "
LIMIT = 60.0
"""Time limit of a test in seconds."""


def printing(*lines: str, code: int = 0, until: threading.Event | None = None) -> FakeBackend:
    """Return an engine whose launch prints these lines, waits for a stop with ``until``, exits with ``code``."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Answer reach as healthy; yield the lines of a launch, then wait, then raise Failed for a code."""
        if "reap" in argv or "stop" in argv:
            if until:
                until.set()
            return
        if "reach" in argv:
            yield from healthy(container, argv)
            return
        yield from lines
        if until:
            assert until.wait(LIMIT), "nobody ended the run"
        if code:
            raise Failed(code)

    return FakeBackend(answer=answer, seen=observed(LAB))


def as_printed(lines: Sequence[Line]) -> Sequence[Line]:
    return lines


def run(engine: FakeBackend, timeout: float = 60.0) -> tuple[RunOutcome, list[str]]:
    """Supervise a new run of JOB; return its outcome and the lines that were kept."""
    lines: list[str] = []

    def keep(printed: Sequence[Line]) -> Sequence[Line]:
        """Collect the lines; return them as they are."""
        lines.extend(line.text for line in printed)
        return printed

    task = replace(JOB, timeout=timeout)
    return supervise.supervise(LAB, task, engine, keep, supervise.launch_of(LAB, task)), lines


# --- the whole of a run --------------------------------------------------------------------------------------


def test_a_run_that_ends_well_has_no_cause_and_leaves_labctl_nothing_to_do() -> None:
    """A run with code 0 has no cause, and nothing is stopped or reaped."""
    engine = printing("one", "two")
    ended, lines = run(engine)
    assert (ended.exit_code, ended.cause, lines) == (0, None, ["one", "two"])
    assert (engine.stops, engine.reaped()) == ([], [])


def test_the_launch_has_the_limit_the_run_id_and_the_persons_uid() -> None:
    """The launch has timeout's limit of 105 s, directory, nodes and LABCTL_RUN_ID, and is started as root."""
    engine = printing()
    run(engine, timeout=90)
    assert engine.started[0][0] == "labctl-demo-launcher-1"
    assert engine.options[0] == {"user": "0"}
    (launched,) = engine.launched
    assert launched.argv == ("timeout", "--kill-after=5", "105", *JOB.argv)
    assert (launched.directory, launched.nodes) == (JOB.directory, ("worker-0", "worker-1"))
    assert launched.environment == {"LABCTL_RUN_ID": JOB.run_id}


def test_a_launcher_that_fails_by_itself_keeps_its_code() -> None:
    """A launcher that exits with 2 gives code 2 and no cause."""
    ended, _ = run(printing("usage: deepspeed", code=2))
    assert (ended.exit_code, ended.cause) == (2, None)


def test_the_error_of_a_program_that_runs_once_is_quoted() -> None:
    """With launcher script:once the message has the last line of the traceback."""
    once = job(LAB, launcher="script:once")
    engine = printing("Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no data", code=1)
    ended = supervise.supervise(LAB, once, engine, as_printed, LAUNCH)
    assert (ended.exit_code, ended.cause) == (1, None)
    assert ended.message == "the program exited with code 1: ValueError: no data"


def test_processes_that_cannot_be_ended_are_named() -> None:
    """A process that cannot be killed is launcher-failed, and its line is in the message; all nodes are reaped."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Of a reap on worker-1 yield a process and fail."""
        if "reap" in argv and "worker-1" in container:
            yield '{"pid": 7, "command": "python"}'
            raise Failed(1)

    engine = FakeBackend(answer=answer, seen=observed(LAB), end={"left": ["worker-1"]})
    ended, _ = run(engine)
    assert ended.cause == "launcher-failed"
    assert 'could not kill: worker-1: {"pid": 7' in ended.message
    assert engine.reaped() == EVERYWHERE


def test_a_run_whose_agent_is_lost_is_ended_by_docker() -> None:
    """An agent lost with code 137 is interrupted, and all nodes are reaped."""
    engine = printing("one")
    engine.end = {"code": 137, "lost": True}
    ended, _ = run(engine)
    assert (ended.cause, ended.message) == ("interrupted", "the launcher was restarted, or its agent was ended")
    assert engine.reaped() == EVERYWHERE


def test_an_agent_that_does_not_know_a_run_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the agent does not know the run when asked to stop it, it is asked again."""
    monkeypatch.setattr(supervise, "ASK_AGAIN", 0.01)
    requested = threading.Event()
    again = threading.Event()

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Fail the first stop; fail the run with 137 after the second."""
        yield from ()
        if "stop" in argv and not requested.is_set():
            requested.set()
            raise Failed(1, "run r1 is not running")
        if "stop" in argv:
            again.set()
        else:
            assert again.wait(LIMIT)
            raise Failed(137)

    engine = FakeBackend(answer=answer, seen=observed(LAB), fallen=(("worker-1", "node-lost", "container died"),))
    assert run(engine)[0].cause == "node-lost"
    assert len(engine.stops) == 2


def test_a_node_that_dies_stops_the_run_and_is_named_with_its_rank() -> None:
    """A node lost during the run stops it, and is named with its rank."""
    engine = printing("\x010!\x02labctl: rank 0 of 2 on worker-0", code=1, until=threading.Event())
    engine.fallen = (("worker-1", "node-lost", "container died with exit code 137"),)
    ended, _ = run(engine)
    assert (ended.cause, ended.message) == ("node-lost", "worker-1 (rank 1): container died with exit code 137")
    assert (engine.stops, engine.reaped()) == ([("5", "node-lost", ended.message)], [])


def test_a_node_of_another_run_may_die() -> None:
    """The loss of a node that the run does not use has no effect."""
    engine = printing("fine")
    engine.fallen = (("worker-7", "node-lost", "container died with exit code 137"),)
    assert run(engine)[0].cause is None


def test_a_container_without_memory_is_out_of_memory() -> None:
    """A node out of memory gives that cause, and that LAB_MEMORY is not set."""
    engine = printing(code=1, until=threading.Event())
    engine.fallen = (("worker-0", "out-of-memory", "container ran out of memory"),)
    ended, _ = run(engine)
    assert ended.cause == "out-of-memory"
    assert ended.message.endswith(
        "container ran out of memory; LAB_MEMORY is not set: a node has what its host has left"
    )


REASON = "device lost: nvidia-smi says `Unknown Error`; `labctl up` recreates this node"


def test_a_device_that_is_lost_stops_the_run_with_its_own_cause() -> None:
    """A lost device stops the run with cause device-lost."""
    engine = printing(code=1, until=threading.Event())
    engine.fallen = (("worker-1", "device-lost", REASON),)
    ended, _ = run(engine)
    assert (ended.cause, ended.message) == ("device-lost", f"worker-1 (rank 1): {REASON}")
    assert engine.stops == [("5", "device-lost", ended.message)]


def with_devices(reason: str, launch: str = "") -> tuple[RunOutcome, list[str]]:
    """Supervise a failing run, worker-1 unhealthy for ``reason``; return its outcome and the containers checked."""
    mapping = DeviceMapping(devices=devices("0"))
    of = lab((node(0, devices=mapping), node(1, devices=mapping)))

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Fail worker-1's health check for the reason; yield the line of a launch and fail with code 1."""
        if "health" in argv and "worker-1" in container and reason:
            raise Failed(1, reason)
        if not {"health", "reap"} & set(argv):
            yield from filter(None, [launch])
            raise Failed(1)

    engine = FakeBackend(answer=answer, seen=observed(of))
    ended = supervise.supervise(of, job(of), engine, as_printed, supervise.launch_of(of, job(of)))
    return ended, [container for container, argv in engine.started if "health" in argv]


def test_a_crash_of_a_rank_whose_device_is_lost_has_that_cause() -> None:
    """A crashed rank on a node whose check tells of a lost device is device-lost; both nodes are checked."""
    ended, checked = with_devices(REASON, CRASH)
    assert ended.cause == "device-lost"
    assert ended.message.startswith(f"worker-1 (rank 1): {REASON} (rank ")
    assert sorted(checked) == EVERYWHERE[1:]


@pytest.mark.parametrize("reason", ["", "Traceback: no such thing"])
def test_a_crash_on_devices_that_answer_stays_a_crash(reason: str) -> None:
    """A crashed rank whose devices answer, or whose check itself fails, is rank-crashed."""
    assert with_devices(reason, CRASH)[0].cause == "rank-crashed"
    assert with_devices(reason)[0].cause is None


def test_a_node_that_does_not_answer_about_its_devices_leaves_the_verdict_as_it_is() -> None:
    """A node whose health check times out does not hide the other node's lost device."""
    mapping = DeviceMapping(devices=devices("0"))
    of = lab((node(0, devices=mapping), node(1, devices=mapping)))

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Time out worker-0's health check, fail worker-1's; fail the run with a crash."""
        if "health" in argv and "worker-0" in container:
            raise HostError("docker exec: not done within 20 s")
        if "health" in argv:
            raise Failed(1, REASON)
        if "reap" not in argv:
            yield CRASH
            raise Failed(1)

    ended = supervise.supervise(
        of, job(of), FakeBackend(answer=answer, seen=observed(of)), as_printed, supervise.launch_of(of, job(of))
    )
    assert ended.cause == "device-lost"
    assert ended.message.startswith(f"worker-1 (rank 1): {REASON}")


def test_nodes_without_devices_are_not_asked_for_them() -> None:
    """After a crash on nodes without devices no health check is run."""
    engine = printing(CRASH, code=1)
    run(engine)
    assert not [argv for _, argv in engine.started if "health" in argv]


def test_a_run_past_its_time_says_who_was_silent() -> None:
    """A run past its limit in which no rank printed has that in its message."""
    engine = printing(code=124)
    engine.end = {"cause": "timeout", "message": "timed out after 60 s"}
    ended, _ = run(engine)
    assert (ended.cause, ended.message) == ("timeout", "timed out after 60 s; no rank wrote a line")


@pytest.mark.parametrize("code", [0, 1])
def test_a_line_that_a_program_prints_is_no_report(code: int) -> None:
    """A rank that prints a line like the agent's report of a crash changes neither code nor cause."""
    ended, _ = run(printing("worker-1: \x011\x02labctl: rank 1 on worker-1 exited with code 7", code=code))
    assert (ended.exit_code, ended.cause) == (code, None)


@pytest.mark.parametrize(("code", "cause"), [(0, None), (1, "rank-crashed")])
def test_what_deepspeeds_launcher_prints_under_a_script_explains_a_run_that_failed(
    code: int, cause: str | None
) -> None:
    """deepspeed's line of a failed rank, under launcher script, is rank-crashed if the code is 1, not if 0."""
    engine, task = printing(f"{FAILED}1", code=code), job(LAB, launcher="script")
    ended = supervise.supervise(LAB, task, engine, as_printed, supervise.launch_of(LAB, task))
    assert (ended.cause, engine.stops) == (cause, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_and_the_handlers_come_back(number: signal.Signals) -> None:
    """SIGINT or SIGTERM stops the run as interrupted with 5 s of grace; the old handler is restored."""
    before = signal.getsignal(number)
    engine = printing("started", code=1, until=threading.Event())

    def keep(lines: Sequence[Line]) -> Sequence[Line]:
        """Send the signal to this process; return the lines."""
        os.kill(os.getpid(), number)
        return lines

    ended = supervise.supervise(LAB, JOB, engine, keep, LAUNCH)
    assert (ended.cause, ended.message) == ("interrupted", f"stopped by {number.name}")
    assert (engine.stops, engine.reaped()) == ([("5", "interrupted", ended.message)], [])
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("presses", "graces"), [(1, ["5"]), (2, ["0", "5"])])
def test_a_second_ctrl_c_leaves_processes_no_grace(presses: int, graces: list[str]) -> None:
    """Send SIGINT: the first stops with a grace of 5 s; a second one stops with 0 too."""
    engine = printing("started", code=1)

    def keep(lines: Sequence[Line]) -> Sequence[Line]:
        """Send SIGINT this many times, each time until the agent was asked to stop."""
        for press in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda asked=press + 1: len(engine.stops) == asked, LIMIT, "the agent is asked")  # type: ignore[misc]
        return lines

    supervise.supervise(LAB, JOB, engine, keep, LAUNCH)
    assert sorted(grace for grace, _, _ in engine.stops) == graces


def fill_disk(path: Path) -> None:
    """Let this process's open file at the path write to a full disk (/dev/full)."""
    links = ((link, link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    (number,) = (int(link.name) for link, target in links if target == path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, number)
    os.close(full)


def test_a_record_that_cannot_be_written_leaves_no_process_behind(tmp_path: Path) -> None:
    """A full disk of the record is disk-full and stops the run, whose end is followed; the log keeps its line."""
    of = lab(directory=tmp_path)
    path = store.create(of, "r1", ())
    log = store.RunLog(path, of, JOB.workload)

    def keep(lines: Sequence[Line]) -> Sequence[Line]:
        """Fill the disk at line `two`; write the lines to the record's log."""
        if "two" in [line.text for line in lines]:
            fill_disk(path / "output.log")
        return log.keep(lines)

    engine = printing("one", "two", "three")
    ended = supervise.supervise(of, JOB, engine, keep, LAUNCH)
    assert ended.cause == "disk-full"
    assert re.fullmatch(rf"cannot write {path}/output\.log: No space left on device; .* free at /.*", ended.message)
    assert engine.stops == [("1", "disk-full", ended.message)]
    assert "follow" in {argv[len(agent.AGENT)] for _, argv in engine.started if argv[: len(agent.AGENT)] == agent.AGENT}
    log.close()
    log.close()
    assert (path / "output.log").read_text() == "one\n"


def test_output_that_cannot_be_written_for_another_reason_is_an_error(tmp_path: Path) -> None:
    """A record that fails for another reason raises HostError with exit code 3 and stops the run."""

    def keep(_: Sequence[Line]) -> Sequence[Line]:
        """Raise RecordError."""
        raise store.RecordError("cannot write output.log: Input/output error")

    engine = printing("one", "two")
    with pytest.raises(HostError, match="Input/output error") as caught:
        supervise.supervise(lab(directory=tmp_path), JOB, engine, keep, LAUNCH)
    assert caught.value.exit_code == 3
    assert engine.stops == [("1", "interrupted", "its output cannot be written")]


DF = """\
Filesystem     1024-blocks     Used Available Capacity Mounted on
tmpfs               163840   163840         0     100% /workspace/outputs
overlay          264212084 66036740  40354172      63% /
shm                8388608  8380000      8608     100% /dev/shm
"""


def test_a_rank_that_found_no_room_has_the_file_systems_that_are_full_in_its_message() -> None:
    """A rank's `No space left on device` is disk-full, with the nodes' full file systems from df."""
    engine = printing("worker-1: OSError: [Errno 28] No space left on device", CRASH, code=1)
    answer_of_run = engine.answer

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Answer df with the planted table, others as the run."""
        return iter(DF.splitlines()) if argv[0] == "df" else answer_of_run(container, argv)

    engine.answer = answer
    ended, _ = run(engine)
    assert ended.cause == "disk-full"
    assert ended.message == (
        "rank 1 on worker-1 exited with code 9: OSError: [Errno 28] No space left on device; "
        "worker-0 has 0 B of 160 MiB free at /workspace/outputs; worker-0 has 8.406 MiB of 8 GiB free at /dev/shm"
    )


TOKEN = "hf_CANARYCANARY"  # noqa: S105
HIDING = replace(LAB, hidden=(Secret(TOKEN),))


def test_a_secret_among_a_crashed_ranks_last_words_is_not_in_the_verdict(tmp_path: Path) -> None:
    """A secret in a crashed rank's last line is redacted in message, screen and output.log."""
    of = replace(HIDING, directory=tmp_path)
    log = store.RunLog(store.create(of, "r1", ()), of, JOB.workload)
    shown: list[str] = []

    def keep(lines: Sequence[Line]) -> Sequence[Line]:
        """Write the lines to the log; record and return what it keeps."""
        kept = log.keep(lines)
        shown.extend(line.text for line in kept)
        return kept

    engine = printing(f"worker-1: KeyError: {TOKEN}", CRASH, code=1)
    ended = supervise.supervise(of, JOB, engine, keep, LAUNCH)
    log.close()
    assert ended.cause == "rank-crashed"
    assert ended.message.endswith("exited with code 9: KeyError: [REDACTED]")
    assert TOKEN not in "".join((*shown, (tmp_path / "runs/r1/output.log").read_text()))


def test_a_secret_that_is_cut_in_a_ranks_last_words_is_not_in_the_verdict() -> None:
    """A secret at the place where the rank's last line is cut is not in the message, not even its beginning."""
    text = f"ValueError: {'x' * 980} {TOKEN}"
    engine = printing(f"worker-1: \x011\x02{text}", CRASH, code=1)
    ended = supervise.supervise(HIDING, JOB, engine, lambda lines: store.redact_lines(lines, HIDING.hidden), LAUNCH)
    assert "ValueError: xxx" in ended.message
    assert TOKEN[:6] not in ended.message


def test_a_secret_in_why_the_launcher_failed_or_a_process_stayed_is_not_in_the_verdict() -> None:
    """A secret in docker's error, or in a process that stayed, is redacted in the message."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Of a reap yield a process with the token and fail; else raise HostError with the token."""
        if "reap" in argv:
            yield f"python --token {TOKEN}"
            raise Failed(1)
        raise HostError(f"docker exec: no such option --token={TOKEN}")

    ended = supervise.supervise(HIDING, JOB, FakeBackend(answer=answer, seen=observed(LAB)), as_printed, LAUNCH)
    assert ended.cause == "launcher-failed"
    assert "no such option --token=[REDACTED]; could not kill: " in ended.message
    assert TOKEN not in ended.message


# --- what is left of a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launcher", "where"), [("deepspeed", EVERYWHERE[1:]), ("script", EVERYWHERE)])
def test_what_left_the_run_is_ended_where_the_workload_runs(launcher: str, where: list[str]) -> None:
    """After a lost agent, processes of the last seconds are reaped: in workers, for launcher script everywhere."""
    engine, task = printing(), job(LAB, launcher=launcher)
    engine.end = {"lost": True}
    supervise.supervise(LAB, task, engine, as_printed, supervise.launch_of(LAB, task))
    argv_by_container = {container: argv for container, argv in engine.started if argv[0] == "env" and "reap" in argv}
    assert sorted(argv_by_container) == where
    assert all(re.fullmatch(r"LABCTL_RUN_SECONDS=\d\.\d+", argv[1]) for argv in argv_by_container.values())
    assert engine.reaped() == EVERYWHERE


def test_a_container_that_is_gone_holds_nothing() -> None:
    """A node that has exited and cannot be entered is not a process left: no cause."""
    engine = printing()
    engine.end, engine.seen = {"left": ["worker-1"]}, observed(LAB, worker_1={"state": "exited"})
    engine.dead = ("labctl-demo-worker-1-1",)
    assert run(engine)[0].cause is None
    assert engine.reaped() == EVERYWHERE


# --- a rank that fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("node", "needed"), [("worker-1", False), ("worker-0", True)])
def test_an_elastic_launcher_goes_on_without_a_node_that_it_can_do_without(node: str, needed: bool) -> None:
    """An elastic run goes on without worker-1, with a notice; without the first node it is node-lost."""
    received: list[str] = []
    reported = threading.Event()

    def notice(text: str) -> None:
        """Record the notice, and let the run end."""
        received.append(text)
        reported.set()

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield a crash of rank 1, then wait until the loss is noticed or the run stopped."""
        if "stop" in argv:
            reported.set()
        if {"stop", "reap"} & {*argv}:
            return
        yield "worker-1: \x011!\x02labctl: rank 1 on worker-1 exited with code 1"
        assert reported.wait(LIMIT)

    elastic = job(LAB, launcher="torchrun:elastic")
    engine = FakeBackend(answer=answer, seen=observed(LAB), fallen=((node, "node-lost", "container died"),))
    engine.end = {"left": [node]}
    launch = supervise.launch_of(LAB, elastic)
    ended = supervise.supervise(LAB, elastic, engine, as_printed, launch, notice=notice)
    assert (launch.elastic, launch.needed) == (True, ("worker-0",))
    if needed:
        assert (ended.cause, received) == ("node-lost", [])
    else:
        assert (ended.cause, ended.gone) == (None, ("worker-1: container died",))
        assert received == ["worker-1: container died; torchrun goes on without it"]
        assert "labctl-demo-worker-1-1" in [container for container, argv in engine.started if "reap" in argv]


def test_a_container_that_stays_and_cannot_be_entered_is_not_taken_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """reap() lists all nodes as left if their running containers cannot be entered."""
    monkeypatch.setattr(agent, "DYING", 0.01)

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Fail with exit code 126."""
        yield from ()
        raise Failed(126)

    remaining = agent.reap(LAB, FakeBackend(answer=answer, seen=observed(LAB)), "r1", 0)
    assert [text.split(":")[0] for text in remaining] == ["launcher", "worker-0", "worker-1"]


def test_a_host_that_does_not_answer_is_not_taken_for_one_without_containers() -> None:
    """reap() lists all nodes as left if their host does not answer."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Fail with exit code 126."""
        yield from ()
        raise Failed(126)

    unreached = ObservedState(silent=((LAB.hosts[0].name, HostError("timed out")),))
    remaining = agent.reap(LAB, FakeBackend(answer=answer, seen=unreached), "r1", 0)
    assert [text.split(":")[0] for text in remaining] == ["launcher", "worker-0", "worker-1"]


def test_what_a_script_started_over_ssh_is_ended_after_the_script() -> None:
    """reap() for launcher script reaps the launcher's container first."""
    engine = FakeBackend(answer=silent, seen=observed(LAB))
    agent.reap(LAB, engine, "r1", 0, lasted=5, launcher="script")
    assert engine.started[0][0].endswith("-launcher-1")


# --- why it failed -------------------------------------------------------------------------------------------


def test_a_container_that_does_not_run_explains_a_failure() -> None:
    """explain() is node-lost for a node that has exited, or has no container."""
    engine = FakeBackend(seen=observed(LAB, worker_1={"state": "exited"}))
    assert supervise.explain(Ended(code=255, seconds=1), LAB, JOB, engine, silent=False) == (
        "node-lost",
        "worker-1 (rank 1): container exited",
    )
    gone = FakeBackend(seen=observed(lab(1)))
    assert supervise.explain(Ended(code=255, seconds=1), LAB, JOB, gone, silent=False) == (
        "node-lost",
        "worker-1 (rank 1): container gone",
    )


@pytest.mark.parametrize(("silent", "cause"), [(True, "node-lost"), (False, None)])
def test_a_node_that_lets_nobody_in_explains_a_run_of_which_no_rank_began(silent: bool, cause: str | None) -> None:
    """If no rank printed, a worker that refuses ssh is node-lost; if one did, workers are not asked."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Answer that worker-0 is reached and worker-1 denies permission; fail if a rank had printed."""
        assert silent, "a login takes a while"
        yield '{"node": "worker-0", "ok": true, "seconds": 0.2}'
        yield '{"node": "worker-1", "ok": false, "seconds": 5, "error": "lab@worker-1: Permission denied (publickey)."}'

    engine = FakeBackend(answer=answer, seen=observed(LAB))
    explained, message = supervise.explain(Ended(code=255, seconds=1), LAB, JOB, engine, silent=silent)
    assert explained == cause
    assert message.startswith("the launcher does not reach every worker over ssh: worker-1: " if silent else "")


def test_a_node_is_described_with_its_ranks() -> None:
    """describe_node() names a node with its rank or ranks, the launcher without."""
    of = job(lab((node(0, slots=2), node(1, slots=1), node(2, slots=3))))
    assert [supervise.describe_node(name, of) for name in ("worker-0", "worker-1", "worker-2", "launcher")] == [
        "worker-0 (ranks 0 to 1)",
        "worker-1 (rank 2)",
        "worker-2 (ranks 3 to 5)",
        "launcher",
    ]
