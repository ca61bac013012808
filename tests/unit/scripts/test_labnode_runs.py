"""The agent's runs, on processes and directories of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.scripts.test_labnode import load

# What has such an id in its environment is ended, whoever runs tests beside these.
RUN, OTHER, THIRD = (f"{name}-{uuid.uuid4().hex}" for name in ("first", "second", "third"))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return labnode with runs below tmp_path and no samplers; `clean` kills the run's processes here."""
    made = load()
    monkeypatch.setattr(made, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(made, "be_user", lambda _: None)
    monkeypatch.setattr(made, "START_SAMPLERS", "")
    monkeypatch.setattr(made, "clean_nodes", made.clean, raising=False)
    monkeypatch.setattr(made, "clean", lambda job, *_, **__: made.signal_all(made.processes(job["id"]), signal.SIGKILL))
    return made


def folder(agent: ModuleType, run_id: str, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """Write the folder and job.json of a run that is about to be supervised; return both."""
    job: dict[str, Any] = {
        "id": run_id,
        "nodes": ["worker-0"],
        "needed": ["worker-0"],
        "elastic": False,
        "argv": ["true"],
        "environment": {"LABCTL_RUN_ID": run_id},
        "directory": "/",
        "launcher": "mpirun",
        "limit": 60.0,
        "patience": 0,
        "port": 29500,
        "ssh_port": 12345,
        "owner": "ann@desk",
        "order": 1.0,
        "wait": False,
        "follow": True,
    }
    path = agent.RUNS / run_id
    path.mkdir(parents=True)
    (path / "output").touch()
    (path / "job.json").write_text(json.dumps({**job, **changes}))
    return path, {**job, **changes}


def shell(text: str) -> list[str]:
    """Return the argument list that runs this text with sh."""
    return ["sh", "-c", text]


def supervised(agent: ModuleType, run_id: str, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Supervise a run; return ended.json and the lines of its output without times."""
    path, job = folder(agent, run_id, **changes)
    agent.supervise(path, job)
    lines = [line.split(" ", 1)[1] for line in (path / "output").read_text().splitlines()]
    return json.loads((path / "ended.json").read_text()), lines


def test_output_and_exit_code_are_kept_each_line_with_its_time(agent: ModuleType) -> None:
    """Run a command that prints and exits with 3: code, lines, and a time before each."""
    began = time.time()
    ended, lines = supervised(agent, RUN, argv=shell("echo one; echo two >&2; printf three; exit 3"))
    assert (ended["code"], "cause" in ended, lines) == (3, False, ["one", "two", "three"])
    first = float((agent.RUNS / f"{RUN}/output").read_text().split()[0])
    assert began - 1 < first <= time.time()


@pytest.mark.parametrize(
    ("printed", "step"),
    [
        (["step 1/50 loss 3.1", "step 2/50 loss 3.0", "saved in 0.1 s"], "step 2/50"),
        (["worker-0: \x010\x02Epoch: [3] Loss 2.0"], "epoch 3"),
        (["{'loss': 2.31, 'epoch': 0.25}"], "epoch 0.25"),
        (["micro_step=24/global_step=12"], "step 12"),
        (["iteration 7 of 9", "footstep 8"], "iteration 7/9"),
        (["nothing"], ""),
        (["step 1", "x" * 70_000], ""),
    ],
)
def test_where_a_run_is_is_what_it_printed_last_of_it(agent: ModuleType, printed: list[str], step: str) -> None:
    """Read the last step of an output: step, epoch or iteration; "" if it is too far back."""
    path, _ = folder(agent, RUN)
    (path / "output").write_text("".join(f"1767000000.123 {line}\n" for line in printed))
    assert agent.last_step(path / "output") == step


def test_a_command_that_is_not_there_ends_the_run(agent: ModuleType) -> None:
    """Run a missing program: code 127, and the output says so."""
    ended, lines = supervised(agent, RUN, argv=["/nowhere/program"])
    assert ended["code"] == 127
    assert "No such file or directory" in lines[0]


# As rank_output.py marks what rank.sh reports, in the words of printf.
CRASH = r"\0011!\002labctl: rank 1 on worker-1 exited with code 7\n"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"limit": -1.0}, "timeout"),
        ({"argv": shell(f"printf '{CRASH}'; sleep 60")}, "rank-crashed"),
        ({"patience": 1}, "interrupted"),
    ],
)
def test_a_run_is_ended_for_its_time_its_ranks_or_its_absent_labctl(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], cause: str
) -> None:
    """Run beyond its limit, with a crashed rank or an absent labctl: code 137 with its cause."""
    monkeypatch.setattr(agent, "CRASH_GRACE", 0.1)
    path, job = folder(agent, RUN, **{"argv": shell("sleep 60"), **changes})
    (path / "watched").touch()
    os.utime(path / "watched", (1, 1))
    agent.supervise(path, job)
    ended = json.loads((path / "ended.json").read_text())
    assert (ended["code"], ended["cause"]) == (137, cause)


@pytest.mark.parametrize("mark", ["", r"\0011\002", r"\0011\0021!\002"])
def test_a_program_that_prints_the_words_of_a_report_goes_on(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    """Print a report without its mark: the run goes on and ends with 0."""
    monkeypatch.setattr(agent, "CRASH_GRACE", 0.1)
    printed = mark + CRASH.partition("002")[2]
    ended, lines = supervised(agent, RUN, argv=shell(f"printf '{printed}'; sleep 0.5; echo done"))
    assert (ended["code"], lines[-1]) == (0, "done")
    assert lines[0].endswith("labctl: rank 1 on worker-1 exited with code 7")


def test_a_script_has_no_reports(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print a report under launcher script: the run goes on, no cause."""
    monkeypatch.setattr(agent, "CRASH_GRACE", 0.1)
    argv = shell(f"printf '{CRASH}'; sleep 0.5; echo done")
    ended, lines = supervised(agent, RUN, argv=argv, launcher="script")
    assert (ended["code"], lines[-1], "cause" in ended) == (0, "done", False)


@pytest.mark.parametrize(
    ("script", "changes", "cause", "message"),
    [
        (f"printf '{CRASH}'; exit 1", {}, "rank-crashed", "rank 1 on worker-1 exited with code 7"),
        (f"printf '{CRASH}'", {}, "rank-crashed", "rank 1 on worker-1 exited with code 7"),
        (f"printf '{CRASH}'; exit 1", {"elastic": True}, None, ""),
        ("exit 1", {}, None, ""),
        ("exit 124", {}, None, ""),
        (f"sleep 0.2; printf '{CRASH}'; exit 124", {"limit": 0.1}, "timeout", "timed out after 0.1 s"),
        ("sleep 0.2; exit 137", {"limit": 0.1}, "timeout", "timed out after 0.1 s"),
    ],
)
def test_why_a_command_that_ended_by_itself_failed(
    agent: ModuleType, script: str, changes: dict[str, Any], cause: str | None, message: str
) -> None:
    """End a command by itself: rank-crashed, timeout or no cause, with its message."""
    ended, _ = supervised(agent, RUN, argv=shell(script), **changes)
    assert (ended.get("cause"), ended.get("message", "")) == (cause, message)


LEAVES = r"\0011!\002labctl: rank 1 on worker-1 left processes behind\n"


@pytest.mark.parametrize(
    ("script", "changes", "cleaned"),
    [
        ("echo done", {}, False),
        (f"printf '{LEAVES}'", {}, True),
        ("exit 1", {}, True),
        ("echo done", {"launcher": "script"}, True),
        ("echo done", {"elastic": True}, True),
    ],
)
def test_nodes_are_looked_at_only_if_something_may_be_left(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, script: str, changes: dict[str, Any], cleaned: bool
) -> None:
    """End runs: nodes are cleaned only if something may be left."""
    requests: list[object] = []
    monkeypatch.setattr(agent, "clean", lambda *_, **given: requests.append(given))
    supervised(agent, RUN, argv=shell(script), **changes)
    assert requests == ([{"last": True}] if cleaned else [])


def test_nodes_on_which_something_stays_are_named(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fail the clean-up of worker-1: ended.json names it as left, both were asked."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(f'#!/bin/sh\necho "$7" >> {tmp_path}/asked\n[ "$7" != worker-1 ]\n')
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(agent, "clean", agent.clean_nodes)
    monkeypatch.setattr(agent, "as_user", lambda _, command: ["true"] if "ssh" not in command else command)
    ended, _ = supervised(agent, RUN, argv=shell("exit 1"), nodes=["worker-0", "worker-1"])
    assert ended["left"] == ["worker-1"]
    assert sorted((tmp_path / "asked").read_text().split()) == ["worker-0", "worker-1"]


STEPS = "for step in 1 2 3 4 5; do echo step $step/{of}; sleep 0.02; done; {then}"


def test_a_run_that_is_silent_for_longer_than_its_steps_take_is_stalled_and_looked_at_before_it_is_ended(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Print steps and fall silent: stalled, the ranks are looked at, and message and output explain it."""
    asked: list[list[str]] = []

    def answer(_: object, __: object, ___: object, command: list[str]) -> dict[str, tuple[int, bytes]]:
        """Record the command; answer for the launcher and fail for worker-0."""
        asked.append(command)
        return {"launcher": (0, b'{"node": "launcher", "processes": []}'), "worker-0": (255, b"")}

    monkeypatch.setattr(agent, "ask_nodes", answer)
    # Of a busy machine the agent reads steps of less time together.
    steps = STEPS.replace("0.02", "0.07").format(of=9, then="sleep 60")
    argv = shell(f"printf '\\0010!\\002labctl: rank 0 of 1 on worker-0\\n'; {steps}")
    ended, lines = supervised(agent, RUN, argv=argv, stall=0.5)
    assert (ended["code"], ended["cause"]) == (137, "stalled")
    stalled = r"no step and no line for \d+ s; steps took [\d.]+ s; the last was step 5/9"
    unreached = "rank 0 (worker-0) is on a node that does not answer: no answer over ssh"
    assert re.fullmatch(f"{stalled}; {re.escape(unreached)}", ended["message"])
    assert re.fullmatch(f"labctl: stalled: {stalled}", lines[-2])
    assert lines[-1] == f"labctl: {unreached}"
    assert {(*command[-3:-1],) for command in asked} == {("stacks", RUN)}


@pytest.mark.parametrize(
    ("argv", "stall"),
    [
        (STEPS.format(of=9, then="sleep 1"), 0),
        (STEPS.format(of=5, then="sleep 1"), 0.5),
        ("echo step 1/9; sleep 1", 0.5),
        ("for step in 1 2 3 4; do echo step $step; sleep 0.2; done; sleep 1", 0.5),
    ],
    ids=["never", "had its last step", "has no usual step", "had slow steps"],
)
def test_a_run_is_not_stalled_that(agent: ModuleType, argv: str, stall: float) -> None:
    """Run with slow, finished or unknown steps, or no limit: not stalled, code 0."""
    assert supervised(agent, RUN, argv=shell(argv), stall=stall)[0]["code"] == 0


@pytest.fixture
def now(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the agent's clock; return the list whose first item is its time."""
    time = [100.0]
    monkeypatch.setattr(agent.time, "monotonic", lambda: time[0])
    return time


def test_a_rank_that_prints_what_others_have_printed_makes_no_step_shorter(agent: ModuleType, now: list[float]) -> None:
    """Print each step by four ranks: the usual step stays 2 s, stalled after 20 of them."""
    steps = agent.Steps()
    for step in range(6):
        for rank in range(4):
            steps.add(b"\x01%d\x02step %d/9 loss 2.1\n" % (rank, step))
        now[0] += 2
    now[0] += 36
    assert steps.stalled(30) == ""
    now[0] += 4
    assert steps.stalled(30) == "no step and no line for 42 s; steps took 2 s; the last was step 5/9"


def test_a_run_that_prints_other_lines_for_long_is_not_stalled(agent: ModuleType, now: list[float]) -> None:
    """Print steps of 1 s, then a line each 25 s, as an evaluation does: not stalled until 30 s without one."""
    steps = agent.Steps()
    for step in range(6):
        steps.add(b"step %d/9\n" % step)
        now[0] += 1
    for _ in range(10):
        now[0] += 25
        assert steps.stalled(30) == ""
        steps.add(b"evaluating\n")
    now[0] += 31
    assert steps.stalled(30)


def test_long_steps_are_told_in_whole_seconds(agent: ModuleType, now: list[float]) -> None:
    """Print steps of 123.4 s: the message has 123 s."""
    steps = agent.Steps()
    for step in range(6):
        steps.add(b"step %d/9\n" % step)
        now[0] += 123.4
    now[0] += 20 * 123.4
    assert "; steps took 123 s; " in steps.stalled(30)


def test_a_run_is_looked_at_after_a_few_times_what_its_steps_or_those_of_an_earlier_run_took(
    agent: ModuleType, now: list[float]
) -> None:
    """Be silent before the first step, then after steps of 2 s: quiet from 4 times an earlier first, longest step."""
    steps = agent.Steps(first_step=15, longest_step=8)
    now[0] += 59
    assert steps.quiet_since(600) is None
    now[0] += 2
    assert steps.quiet_since(600) == 100
    for step in range(6):
        steps.add(b"step %d/9\n" % step)
        now[0] += 2
    now[0] += 29
    # A checkpoint may take 8 s.
    assert steps.quiet_since(600) is None
    now[0] += 2
    assert steps.quiet_since(600) is not None
    assert steps.stalled(600) == ""


def test_pieces_of_long_lines_are_joined_though_ranks_print_between_them(agent: ModuleType) -> None:
    """Join pieces of long lines of two ranks: whole lines come out, the rest is unfinished."""
    pieces = agent.Pieces()
    assert pieces.join(b"mpirun: no mark\n[1,0]:\x010\x02whole\n") == b"mpirun: no mark\n[1,0]:\x010\x02whole\n"
    assert pieces.join(b"[1,0]:\x010+\x02be\n[1,1]:\x011+\x02be\n[1,0]:\x010!\x02labctl: report\n") == (
        b"[1,0]:\x010!\x02labctl: report\n"
    )
    assert pieces.join(b"[1,0]:\x010+\x02gun\n") == b""
    assert pieces.join(b"[1,0]:\x010\x02 and ended\nno mark\n") == b"[1,0]:\x010\x02begun and ended\nno mark\n"
    assert pieces.unfinished() == b"[1,1]:\x011\x02be\n"


def test_a_step_before_many_other_lines_that_came_with_it_is_heard(agent: ModuleType, now: list[float]) -> None:
    """Print steps between many lines: all are heard, and after the last one nothing is stalled."""
    state = agent.RunState()
    for step in range(1, 10):
        state.add(b"\x010\x02step %d/9\n" % step + b"saving\n" * 200)
        now[0] += 2
    now[0] += 700
    assert state.steps.stalled(30) == "", "what comes after the last step may take as long as it likes"


@pytest.mark.parametrize(
    ("killed", "crashed", "cause"),
    [
        (10.0, None, "launcher-failed"),
        (None, 10.0, "rank-crashed"),
        # A launcher's end is reported late; ranks that it leaves may fail before.
        (12.0, 10.0, "launcher-failed"),
        (18.0, 10.0, "rank-crashed"),
    ],
)
def test_the_first_failure_of_a_rank_or_a_launcher_is_the_cause(
    agent: ModuleType, killed: float | None, crashed: float | None, cause: str
) -> None:
    """Kill a launcher and crash a rank: the first is the cause, within the launcher's delay."""
    state = agent.RunState()
    state.killed, state.crashed, state.kill, state.crash = killed, crashed, "torchrun was killed", "rank 1 failed"
    job = {"limit": 60.0}
    assert agent.judge(job, state, 1, 0.0, 20.0)["cause"] == cause
    assert agent.failed(job, state, 30.0)["cause"] == cause


def test_answers_that_are_not_understood_keep_no_run_from_its_end(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer the look at ranks with invalid data: the run ends with its own cause and message."""
    answer = b'{"node": "worker-0", "processes": [{"rank": 0, "recorder": {"rank": 0}}]}'
    monkeypatch.setattr(agent, "ask_nodes", lambda *_: {"worker-0": (0, answer)})
    argv = shell(r"printf '\0010!\002labctl: rank 0 of 1 on worker-0\n'; sleep 60")
    ended, lines = supervised(agent, RUN, argv=argv, limit=0.3)
    assert (ended["cause"], ended["message"]) == ("timeout", "timed out after 0.3 s")
    assert len(lines) == 1


@pytest.mark.parametrize(("seconds", "lines"), [(0.4, 0), (60.0, 1)])
def test_ranks_that_have_only_just_begun_to_wait_are_not_said_to_wait(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float, lines: int
) -> None:
    """Find a rank that waits for 0.4 s or 60 s: said only for the longer."""
    found = {"kind": "missing-rank", "sentence": "rank 1 has not joined", "lines": [], "collective": "all_reduce #7"}
    monkeypatch.setattr(agent, "look_at_ranks", lambda *_: {**found, "seconds": seconds})
    assert len(supervised(agent, RUN, argv=shell("sleep 1"), stall=0.2)[1]) == lines


COMMON = Path(__file__).resolve().parents[3] / "workloads/common"


def test_the_stacks_of_a_run_are_those_of_its_processes_and_of_no_other(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Look at a rank and its child: stacks/ and JSON have both, no sampler, and the rank goes on."""
    program = tmp_path / "train.py"
    program.write_text(
        """
import os, socket
def wait_for_peer():
  a, b = socket.socketpair()
  os.write(1, b"here\\n")
  a.recv(1)
if not os.fork():
    wait_for_peer()
wait_for_peer()
"""
    )
    variables = {**os.environ, "LABCTL_RUN_ID": RUN, "PYTHONPATH": str(COMMON), "RANK": "3"}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
    sampler = [sys.executable, "-c", "input()", str(agent.SAMPLER)]
    with (
        subprocess.Popen(sampler, env=variables, **pipe) as sampling,
        subprocess.Popen([sys.executable, program], env=variables, **pipe) as rank,
    ):
        try:
            assert rank.stdout
            assert [rank.stdout.readline() for _ in range(2)] == 2 * [b"here\n"]
            with subprocess.Popen(["true"]) as gone:
                pass
            original = agent.processes
            monkeypatch.setattr(agent, "processes", lambda run_id: {gone.pid: "0", **original(run_id)})
            agent.stacks(RUN, str(tmp_path))
            assert rank.poll() is None
        finally:
            agent.signal_all(agent.processes(RUN), signal.SIGKILL)
            rank.kill()
            sampling.kill()
    (written,) = (tmp_path / "stacks").iterdir()
    text = written.read_text()
    assert written.name == f"{os.uname().nodename}.txt"
    assert re.search(rf"^process {rank.pid}: .*\n  S \(sleeping\), 0 % of a core, 1 threads", text)
    assert text.count("process ") == 2
    looked, child = json.loads(capsys.readouterr().out)["processes"]
    assert (looked["pid"], looked["rank"], looked["recorder"]) == (rank.pid, 3, None)
    inner = looked["stacks"][-1][0]
    assert (inner["file"], inner["line"], inner["function"], inner["text"]) == (
        str(program), 6, "wait_for_peer", "a.recv(1)",
    )  # fmt: skip
    assert [frames[-1]["line"] for process in (looked, child) for frames in process["stacks"]] == [9, 8]


def in_place_of_ssh(agent: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put this script on PATH as ssh, and let samplers start at once."""
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(agent, "START_SAMPLERS", load().START_SAMPLERS.replace("-rt 3", "-rt 0.01"))


def test_each_node_of_a_run_is_sampled_while_its_command_runs_and_no_longer(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run on two nodes: a sampler on each while the command runs, gone afterwards."""
    in_place_of_ssh(agent, monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/$6; cat; rm {tmp_path}/$6')
    monkeypatch.setattr(agent, "clean", lambda *_, **__: None)
    began = time.time()
    argv = shell(f"cd {tmp_path}; until [ -s worker-0 ] && [ -s worker-1 ]; do sleep 0.02; done; cat worker-*")
    ended, lines = supervised(agent, RUN, argv=argv, nodes=["worker-0", "worker-1"])
    assert (ended["code"], len(lines)) == (0, 2)
    for node, line in zip(("worker-0", "worker-1"), lines, strict=True):
        command, when, name = line.partition(f"-- {node} ")[2].rsplit(" ", 2)
        assert command == agent.START_SAMPLER.format(f"LABCTL_RUN_ID={RUN}", f"{agent.SAMPLER} /")
        assert began - 1 < float(when) < time.time()
        assert name == node
    assert agent.wait_until_gone(RUN, {}, 60, float("inf")) == {}
    assert list(tmp_path.glob("worker-*")) == []


def test_a_run_that_ends_between_two_looks_is_not_lost(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a run between two looks of state_of: "ended", not "lost"."""
    of_run, _ = folder(agent, RUN)
    lock = agent.lock

    def lock_after_the_end(path: Path) -> int:
        """Write the end, then lock as before."""
        agent.finish(of_run, {"code": 0})
        return int(lock(path))

    monkeypatch.setattr(agent, "lock", lock_after_the_end)
    assert agent.state_of(of_run) == "ended"


def test_a_pod_is_sampled_under_its_name_in_the_lab(agent: ModuleType) -> None:
    """Ask for a pod's sampler commands: each with the worker's name in the lab."""
    pods = ["demo-worker-0.demo.ns.svc", "demo-worker-1.demo.ns.svc"]
    commands = agent.sampler_commands({"id": RUN, "nodes": pods, "directory": "/run of it", "in_pod": True})
    assert [(node, command.split()[-1]) for node, command in commands] == [(pods[0], "worker-0"), (pods[1], "worker-1")]


@pytest.mark.parametrize("ssh", ["exit 255", "echo not found >&2; exit 127", "exec sleep 60"])
def test_a_node_that_cannot_be_sampled_is_no_matter_of_the_run(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ssh: str
) -> None:
    """Fail the sampler by ssh: the run ends well."""
    in_place_of_ssh(agent, monkeypatch, tmp_path, f"touch {tmp_path}/tried; {ssh}")
    ended, lines = supervised(agent, RUN, argv=shell(f"until [ -e {tmp_path}/tried ]; do sleep 0.02; done; echo done"))
    assert (ended["code"], lines) == (0, ["done"])
    assert ended["seconds"] < 20


def test_the_first_who_stops_a_run_gives_the_reason(agent: ModuleType) -> None:
    """Stop a run twice: the first message is kept; stop of an ended run is SystemExit."""
    path, job = folder(agent, RUN, argv=shell("sleep 60"))
    alive = agent.lock(path / "alive")
    agent.stop(RUN, "2", "interrupted", "stopped by ann")
    agent.stop(RUN, "0", "interrupted", "stopped by bob")
    agent.supervise(path, job)
    os.close(alive)
    ended = json.loads((path / "ended.json").read_text())
    assert (ended["cause"], ended["message"]) == ("interrupted", "stopped by ann")
    with pytest.raises(SystemExit, match=f"run {RUN} is not running"):
        agent.stop(RUN, "0", "interrupted", "late")


def test_a_run_that_is_stopped_as_stalled_is_not_looked_at(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a run as stalled: its message stays, and no node is asked."""
    monkeypatch.setattr(agent, "run_on_nodes", lambda *_: pytest.fail("its nodes are asked"))
    path, job = folder(agent, RUN, argv=shell("sleep 60"))
    alive = agent.lock(path / "alive")
    agent.stop(RUN, "0", "stalled", "worker-1 is paused")
    agent.supervise(path, job)
    os.close(alive)
    assert json.loads((path / "ended.json").read_text())["message"] == "worker-1 is paused"
    assert (path / "output").read_text() == ""


def test_a_second_stop_with_no_grace_ends_at_once_what_is_being_ended(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop with grace 60 and then 0: the second ends it at once, the first message stays."""
    path, job = folder(agent, RUN, argv=shell("sleep 60"))
    alive = agent.lock(path / "alive")
    graces: list[float] = []

    def clean(job: dict[str, Any], _: object, grace: float, *__: object, **___: object) -> None:
        """Record the grace; stop again with none the first time, kill without grace."""
        graces.append(grace)
        if len(graces) == 1:
            agent.stop(RUN, "0", "interrupted", "at once")
        if not grace:
            agent.signal_all(agent.processes(job["id"]), signal.SIGKILL)

    monkeypatch.setattr(agent, "clean", clean)
    agent.stop(RUN, "60", "interrupted", "stopped by ann")
    agent.supervise(path, job)
    os.close(alive)
    assert graces[:2] == [60, 0]
    assert json.loads((path / "ended.json").read_text())["message"] == "stopped by ann"


def test_a_node_that_is_gone_ends_a_run_that_nobody_follows(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose a node's name: the run ends as node-lost."""
    monkeypatch.setattr(agent, "NODE_POLL", 0.05)
    monkeypatch.setattr(agent, "connect_error", lambda *_: agent.GONE[0])
    ended, _ = supervised(agent, RUN, argv=shell("sleep 60"))
    assert (ended["cause"], ended["message"]) == ("node-lost", "worker-0: its host name no longer resolves")


def test_a_pod_whose_name_the_clusters_dns_forgets_is_not_lost(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose a pod's DNS name while its address answers: the run ends well."""
    monkeypatch.setattr(agent, "NODE_POLL", 0.05)
    monkeypatch.setattr(agent, "address_of", lambda node: {"worker-0": "10.0.0.7"}[node])
    monkeypatch.setattr(agent, "connect_error", lambda node, _: "" if node == "10.0.0.7" else agent.GONE[0])
    ended, lines = supervised(agent, RUN, argv=shell("sleep 0.5; echo done"), in_pod=True)
    assert (ended["code"], lines) == (0, ["done"])


def test_a_node_that_is_slow_to_answer_is_not_lost_at_once(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node not answer for a short time: the run ends with code 0 and all of its output."""
    monkeypatch.setattr(agent, "NODE_POLL", 0.05)
    monkeypatch.setattr(agent, "UNANSWERED", 1000)
    monkeypatch.setattr(agent, "connect_error", lambda *_: "it does not answer")
    ended, lines = supervised(agent, RUN, argv=shell("sleep 0.5; echo done"))
    assert (ended["code"], lines) == (0, ["done"])


def followed(agent: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str) -> str:
    """Return what `follow` prints from this place."""
    monkeypatch.setattr(agent, "watch_follower", lambda _: None)
    agent.follow(RUN, place)
    sys.stdout.flush()
    return capfd.readouterr().out


def test_a_run_is_followed_from_any_place_to_how_it_ended(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Follow from the start and from a place: the lines after it and the end."""
    supervised(agent, RUN, argv=shell("echo one; echo two"))
    first, second, end = followed(agent, monkeypatch, capfd, "0").splitlines()
    place, _, text = first.split(" ", 2)
    assert text == "one"
    assert json.loads(end.removeprefix("end "))["code"] == 0
    assert followed(agent, monkeypatch, capfd, place).splitlines() == [second, end]


def test_a_line_is_followed_once_it_is_whole(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Follow half a line: printed once it is whole."""
    path, _ = folder(agent, RUN)
    (path / "output").write_bytes(b"1.0 whole\n2.0 ha")
    alive = agent.lock(path / "alive")

    def complete() -> None:
        """Complete the line and end the run."""
        with (path / "output").open("ab") as output:
            output.write(b"lf\n")
        (path / "ended").write_text('{"code": 0}')
        (path / "ended").rename(path / "ended.json")

    threading.Timer(0.3, complete).start()
    assert followed(agent, monkeypatch, capfd, "0").splitlines() == ["10 1.0 whole", "19 2.0 half", 'end {"code": 0}']
    os.close(alive)


def test_a_run_whose_supervisor_was_killed_is_lost(agent: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """List a run without supervisor: "lost"; after forget nothing."""
    folder(agent, RUN)
    agent.list_runs()
    assert json.loads(capfd.readouterr().out)["state"] == "lost"
    agent.forget(RUN)
    agent.list_runs()
    assert capfd.readouterr().out == ""


def test_nodes_of_another_run_are_refused_with_its_id(agent: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """Launch on a node of a running run: exit code IN_USE, its id on stdout, no folder."""
    path, job = folder(agent, RUN, nodes=["worker-0", "worker-1"])
    alive = agent.lock(path / "alive")
    with pytest.raises(SystemExit) as refused:
        agent.launch({**job, "id": OTHER, "nodes": ["worker-1"]})
    assert refused.value.code == agent.IN_USE
    kind, _, other = capfd.readouterr().out.partition(" ")
    assert (kind, json.loads(other)["id"]) == ("busy", RUN)
    assert not (agent.RUNS / OTHER).exists()
    os.close(alive)


def test_the_run_that_the_input_names_is_launched_and_followed_and_then_forgotten(agent: ModuleType) -> None:
    """Launch by stdin: output and end are followed, and "forget" removes the run."""
    _, job = folder(agent, OTHER, argv=shell("echo mine"))
    job = {**job, "id": RUN}
    program = (
        "import sys, pathlib, importlib.util as util\n"
        "spec = util.spec_from_file_location('labnode', sys.argv[1])\n"
        "agent = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(agent)\n"
        "agent.RUNS, agent.be_user, agent.START_SAMPLERS = pathlib.Path(sys.argv[2]), lambda _: None, ''\n"
        "agent.clean = lambda *_, **__: None\n"
        "agent.launch_from_stdin()\n"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, str(agent.__file__), str(agent.RUNS)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(f"\n\n{json.dumps(job)}\n")
        lines = (line for line in child.stdout if line != "beat\n")
        assert next(lines).endswith(" mine\n")
        assert json.loads(next(lines).removeprefix("end "))["code"] == 0
        assert (agent.RUNS / RUN).is_dir()
        child.stdin.write("forget\n")
        assert child.wait(60) == 0
    assert not (agent.RUNS / RUN).exists()


def test_an_input_that_closes_before_it_names_a_run_ends_the_agent(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close stdin before a run is named: the agent ends, no run is made."""
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        agent.launch_from_stdin()
    assert not agent.RUNS.exists()


def test_a_run_waits_for_those_before_it_that_have_its_nodes(agent: ModuleType) -> None:
    """Supervise a run whose node an earlier one has: it starts only once that has ended."""
    first, _ = folder(agent, RUN, order=1.0)
    folder(agent, THIRD, order=3.0)
    alive = agent.lock(first / "alive")
    second, job = folder(agent, OTHER, order=2.0, argv=shell("echo mine"))
    waiting = threading.Thread(target=agent.supervise, args=(second, job))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert not (second / "started").exists()
    os.close(alive)
    waiting.join(60)
    assert json.loads((second / "ended.json").read_text())["code"] == 0


@pytest.mark.parametrize(
    ("told_after", "later", "is_dropped"),
    [(b"step 1/9\n", b"step 2/9\n", True), (b"step 1/9\n", b"a warning\n", False), (b"begins\n", b"goes on\n", True)],
    ids=["another step", "no other step", "output of a run without steps"],
)
def test_a_hang_that_a_run_got_over_is_dropped(
    agent: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    now: list[float],
    tmp_path: Path,
    told_after: bytes,
    later: bytes,
    is_dropped: bool,
) -> None:
    """Tell of a silence, then print a line and end: hang.json is removed if the run got on, else it stays."""
    (tmp_path / "stacks").mkdir()
    kept = tmp_path / "stacks/hang.json"
    monkeypatch.setattr(agent, "as_user", lambda directory, command: ["env", "-C", directory, *command])
    state = agent.RunState()
    state.add(told_after)
    looker = agent.Looker(tmp_path, {"directory": str(tmp_path)}, state, lambda _: None)
    looker._print("rank 1 has not joined", {"sentence": "rank 1 has not joined", "lines": []})
    assert kept.exists()
    now[0] += 5
    state.add(later)
    looker.drop_what_is_over()
    assert kept.exists() is not is_dropped


def test_a_call_without_a_time_is_a_hang_only_when_it_is_seen_twice(agent: ModuleType, tmp_path: Path) -> None:
    """Look at ranks in calls of MPI: new at the first sight of each sentence, not at the second; never with times."""
    looker = agent.Looker(tmp_path, {}, agent.RunState(), lambda _: None)
    findings = [
        {"sentence": "rank 1 in MPI Recv", "collective": "MPI Recv", "seconds": None},
        {"sentence": "rank 1 in MPI Recv", "collective": "MPI Recv", "seconds": None},
        {"sentence": "rank 2 in MPI Recv", "collective": "MPI Recv", "seconds": None},
        {"sentence": "rank 3 in all_reduce", "collective": "all_reduce #6", "seconds": 17.0},
    ]
    assert [looker._is_new(finding) for finding in findings] == [True, False, True, False]
