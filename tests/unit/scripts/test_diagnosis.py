"""What is said of ranks that wait, from what the nodes saw of their processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORK = "/workspace/outputs/20261129-run/work/"


def load() -> ModuleType:
    """Import docker/diagnosis.py from its file; return the module."""
    path = Path(__file__).resolve().parents[3] / "docker/diagnosis.py"
    spec = importlib.util.spec_from_file_location("diagnosis", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["diagnosis"] = module
    spec.loader.exec_module(module)
    return module


diagnosis = load()


def frame(file: str, line: int, function: str = "main", text: str = "") -> dict[str, Any]:
    """Return a stack frame; a relative file is below the run's work folder."""
    return {"file": file if file.startswith("/") else WORK + file, "line": line, "function": function, "text": text}


def collective(number: int, name: str = "all_reduce", *, done: bool = False, **changes: Any) -> dict[str, Any]:
    """Return an entry of the flight recorder with this number; ``changes`` replace fields."""
    return {
        "group": "0",
        "number": number,
        "name": name,
        "message": False,
        "sizes": [[4]],
        "types": ["Float"],
        "done": done,
        "age": 17.2,
        **changes,
    }


def seen(rank: int, *entries: dict[str, Any], at: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return what is seen of a rank's process, which has begun these collectives of torch."""
    recorder = {"rank": rank, "groups": {"0": [0, 1, 2, 3]}, "collectives": list(entries), "message": None}
    return {
        "pid": 100 + rank,
        "parent": 1,
        "program": "python3.11",
        "command": "python -u train.py",
        "rank": rank,
        "state": "S (sleeping)",
        "stays": True,
        "waits_in": "",
        "cores": 0.0,
        "threads": 1,
        "libraries": [],
        "stacks": [[at or frame("train.py", 13, "train")]],
        "recorder": recorder,
        **changes,
    }


def explained(*ranks: dict[str, Any] | None, codes: dict[int, int] | None = None, **nodes: Any) -> dict[str, Any]:
    """Explain a run with two ranks on each node; those that are None have no process."""
    processes: dict[str, Any] = {}
    for number, rank in enumerate(ranks):
        processes.setdefault(f"worker-{number // 2}", {"processes": []})["processes"] += [rank] if rank else []
    places = {number: f"worker-{number // 2}" for number in range(len(ranks))}
    found: dict[str, Any] = diagnosis.explain({**processes, **nodes}, places, codes or {})
    return found


def test_a_rank_that_has_not_joined_a_collective_is_named_with_what_it_does() -> None:
    """Leave rank 1 out of an all_reduce: missing-rank with sentence, place, seconds and what it does."""
    elsewhere = seen(1, collective(5, done=True), at=frame("data.py", 41, "read"), waits_in="nfs_wait")
    found = explained(seen(0, collective(6)), elsewhere, seen(2, collective(6)), seen(3, collective(6)))
    assert found == {
        "kind": "missing-rank",
        "sentence": "rank 1 (worker-0) has not joined all_reduce #6 (train.py:13), "
        "where ranks 0, 2, 3 have waited for 17 s",
        "lines": ["rank 1 is at data.py:41 in read, 0 % of a core, in nfs_wait"],
        "ranks": [1],
        "nodes": ["worker-0"],
        "collective": "all_reduce #6",
        "place": "train.py:13",
        "seconds": 17.2,
    }


def test_a_rank_that_works_while_others_wait_is_said_to_be_busy() -> None:
    """Let rank 0 use 97 % of a core while rank 1 waits: the sentence says it is busy."""
    busy = seen(0, at=frame("eval.py", 7, "evaluate"), cores=0.97)
    assert explained(busy, seen(1, collective(1)))["sentence"].endswith("has waited for 17 s; rank 0 is busy")


def test_one_rank_that_is_in_a_collective_of_its_own_is_the_one_that_is_named() -> None:
    """Put one rank alone into a collective: it is named, not the others."""
    others = [seen(rank, collective(6, done=True), at=frame("train.py", 20)) for rank in (0, 2, 3)]
    found = explained(others[0], seen(1, collective(7)), *others[1:])
    assert found["ranks"] == [1]
    assert found["sentence"] == (
        "rank 1 (worker-0) has waited for 17 s in all_reduce #7 (train.py:13), which ranks 0, 2, 3 have not joined"
    )


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        (
            collective(6, "all_gather"),
            "different-collective",
            "ranks 0, 2, 3 are in all_reduce #6 (train.py:13), rank 1 (worker-0) is in all_gather #6 (train.py:13)",
        ),
        (
            collective(6, sizes=[[8]]),
            "different-size",
            "ranks 0, 2, 3 are in all_reduce #6 of [4] Float (train.py:13), "
            "rank 1 (worker-0) is in all_reduce #6 of [8] Float (train.py:13)",
        ),
    ],
)
def test_a_minority_with_another_operation_or_size_is_named(odd: dict[str, Any], kind: str, words: str) -> None:
    """Give one rank another operation or size: different-collective or different-size names it."""
    found = explained(seen(0, collective(6)), seen(1, odd), seen(2, collective(6)), seen(3, collective(6)))
    assert (found["kind"], found["sentence"], found["ranks"]) == (kind, words, [1])


def test_at_two_against_two_nobody_is_named() -> None:
    """Put two ranks into one operation and two into another: no rank is named."""
    gather = collective(6, "all_gather")
    found = explained(seen(0, collective(6)), seen(1, gather), seen(2, gather), seen(3, collective(6)))
    assert (found["kind"], found["ranks"]) == ("different-collective", [])


def test_a_rank_that_waits_in_another_group_is_not_blamed_but_the_one_that_it_waits_for() -> None:
    """Let rank 0 wait in a smaller group for rank 1: rank 1 is named."""
    groups = {"0": [0, 1, 2, 3], "1": [0, 1]}
    waits = seen(0, collective(2, group="1"))
    elsewhere = seen(1, collective(1, group="1", done=True), at=frame("data.py", 3))
    for rank in (waits, elsewhere):
        rank["recorder"]["groups"] = groups
    found = explained(waits, elsewhere, seen(2, collective(6)), seen(3, collective(6)))
    assert found["ranks"] == [1]
    assert found["kind"] == "missing-rank"


def test_ranks_that_wait_for_each_other_are_all_told_and_none_is_named() -> None:
    """Let two ranks wait in each other's groups: crossed-groups, no rank is named."""
    first, second = seen(0, collective(1, group="1")), seen(1, collective(1, group="2"))
    for rank in (first, second):
        rank["recorder"]["groups"] = {"1": [0, 1], "2": [0, 1]}
    found = explained(first, second)
    assert (found["kind"], found["ranks"]) == ("crossed-groups", [])
    assert "rank 0 is in all_reduce #1" in found["sentence"]


def test_ranks_that_are_all_in_the_same_collective_point_to_the_network() -> None:
    found = explained(*(seen(rank, collective(6)) for rank in range(4)))
    assert (found["kind"], found["ranks"]) == ("all-inside", [])
    assert found["sentence"] == (
        "all of its 4 ranks are in all_reduce #6 (train.py:13): the network or a device, not the program"
    )


def test_a_collective_of_nccl_in_which_all_are_may_be_the_programs_own_kernel() -> None:
    """All ranks are in a collective of NCCL: the network or a device, but the program is not cleared."""
    found = explained(*(seen(rank, collective(6, group="0 of NCCL")) for rank in range(4)))
    assert found["sentence"].endswith("all_reduce #6 (train.py:13): the network or a device")


def test_ranks_of_a_script_that_starts_them_itself_are_known_by_their_groups() -> None:
    """Explain processes of ranks that nothing reported: they are named by what they joined."""
    ranks = {f"worker-{rank}": {"processes": [seen(rank, collective(6 - rank, done=rank == 1))]} for rank in range(2)}
    assert diagnosis.explain(ranks, {}, {})["sentence"].startswith("rank 1 (worker-1) has not joined all_reduce #6")


def test_ranks_of_which_some_have_not_begun_accuse_no_network() -> None:
    found = explained(seen(0, collective(6)), seen(1, collective(6)))
    assert (found["kind"], found["sentence"]) == (
        "unknown",
        "ranks 0, 1 are in all_reduce #6 (train.py:13); whether the others have joined is not known",
    )


def test_a_wait_that_has_only_begun_and_ranks_of_other_shapes_but_as_many_values_are_no_hang() -> None:
    short = (seen(rank, collective(6, age=0.3), at=frame("data.py", 41, "read")) for rank in range(2))
    assert explained(*short)["kind"] == "all-outside"
    shapes = explained(*(seen(rank, collective(6, sizes=[[4] if rank else [2, 2]])) for rank in range(4)))
    assert shapes["kind"] == "all-inside"


def test_a_rank_of_a_node_that_answers_but_cannot_be_looked_at_is_accused_of_nothing() -> None:
    waiting = [seen(rank, collective(6)) for rank in (0, 1)]
    unseen: dict[str, Any] = {"worker-1": {"error": "it could not be inspected"}}
    assert explained(*waiting, None, None, **unseen)["kind"] == "unknown"


def test_a_program_of_bash_that_others_wait_for_has_not_ended() -> None:
    wrapper = seen(1, program="bash", command="bash rank.sh", recorder=None, stacks=[])
    found = explained(seen(0, collective(6)), wrapper, seen(2, collective(6)), seen(3, collective(6)))
    assert found["sentence"].startswith("rank 1 (worker-0) has not joined all_reduce #6")
    assert found["lines"] == ["rank 1 runs bash rank.sh, 0 % of a core"]


def test_a_rank_in_state_d_for_a_moment_is_not_accused() -> None:
    """Rank 2 computes and is in D as it is looked at, rank 1 reads: rank 1, which the others wait for, is named."""
    reads = seen(1, collective(5, done=True), at=frame("data.py", 41, "read"))
    for stays, cores in ((False, 0.0), (True, 0.6)):
        waiting = seen(2, collective(6), state="D (disk sleep)", stays=stays, cores=cores)
        found = explained(seen(0, collective(6)), reads, waiting, seen(3, collective(6)))
        assert (found["kind"], found["ranks"]) == ("missing-rank", [1])


def test_messages_of_a_batch_that_are_never_marked_as_finished_are_no_hang() -> None:
    """Leave a send unfinished before a finished collective of its group: the rank waits for nobody."""
    sent = collective(1, "send 0->1", message=True, age=3600.0)
    found = explained(*(seen(rank, sent, collective(5, done=True)) for rank in range(4)))
    assert found["kind"] == "all-outside"


def test_horovods_elastic_wrapper_is_no_call_that_ranks_wait_in() -> None:
    """Put all ranks below elastic.py, rank 1 in its data, the others in allreduce: rank 1 has not joined."""
    wrapper = frame("/usr/lib/python3/site-packages/horovod/common/elastic.py", 180, "wrapper")
    call = frame("/usr/lib/python3/site-packages/horovod/torch/mpi_ops.py", 900, "allreduce")
    own = frame("train.py", 13, "train")
    inside = [seen(rank, recorder=None, stacks=[[call, own, wrapper]]) for rank in (0, 2, 3)]
    reads = seen(1, recorder=None, stacks=[[frame("data.py", 41, "read"), own, wrapper]])
    found = explained(inside[0], reads, *inside[1:])
    assert found["sentence"].startswith("rank 1 (worker-0) has not joined allreduce")


def test_a_message_of_nccl_waits_for_its_partner_alone() -> None:
    receive = collective(1, "recv 0<-2", message=True)
    found = explained(seen(0, receive), *(seen(rank, collective(5, done=True)) for rank in (1, 2, 3)))
    assert found["sentence"] == (
        "rank 2 (worker-1) has not sent what rank 0 has waited for in recv (train.py:13) for 17 s"
    )


def test_ranks_that_wait_for_nobody_are_where_they_are() -> None:
    """Put no rank into a collective: all-outside with their place."""
    found = explained(*(seen(rank, collective(5, done=True), at=frame("data.py", 41, "read")) for rank in range(2)))
    assert (found["kind"], found["ranks"]) == ("all-outside", [])
    assert found["sentence"] == "no rank waits for another: ranks 0, 1 are at data.py:41"


@pytest.mark.parametrize(
    ("absent", "codes", "kind", "words"),
    [
        (None, {}, "rank-ended", "rank 1 (worker-0) has ended with code 0"),
        (None, {1: 7}, "rank-ended", "rank 1 (worker-0) has ended with code 7"),
        (seen(1, state="T (stopped)"), {}, "rank-stopped", "rank 1 (worker-0) is stopped (SIGSTOP)"),
        (
            seen(1, state="D (disk sleep)", waits_in="nfs_wait"),
            {},
            "uninterruptible",
            "rank 1 (worker-0) is in uninterruptible sleep (D), in nfs_wait of the kernel",
        ),
    ],
)
def test_a_rank_that_cannot_join_is_named_with_the_reason(
    absent: dict[str, Any] | None, codes: dict[int, int], kind: str, words: str
) -> None:
    """End, stop or block the rank that is waited for: kind and sentence name it and the reason."""
    found = explained(seen(0, collective(6)), absent, codes=codes)
    assert (found["kind"], found["ranks"]) == (kind, [1])
    assert found["sentence"] == f"{words}; rank 0 waits for it in all_reduce #6 (train.py:13)"


def test_a_node_that_does_not_answer_explains_ranks_that_wait_for_its_ranks() -> None:
    """Let a node not answer: node-unreached names its ranks and the node."""
    waiting = [seen(rank, collective(6)) for rank in (0, 1)]
    silent: dict[str, Any] = {"worker-1": {"unreached": "no answer over ssh"}}
    found = explained(*waiting, None, None, **silent)
    assert (found["kind"], found["ranks"], found["nodes"]) == ("node-unreached", [2, 3], ["worker-1"])


def test_a_message_that_is_not_sent_is_waited_for_by_its_receiver() -> None:
    """Let a rank wait in recv: its sender is named."""
    receiver = seen(0)
    receiver["recorder"]["message"] = {"name": "recv", "peer": 1}
    found = explained(receiver, seen(1, at=frame("train.py", 30)))
    assert found["ranks"] == [1]
    assert found["sentence"] == "rank 1 (worker-0) has not sent what rank 0 waits for in recv (train.py:13)"


def test_calls_of_mpi_are_read_from_the_line_of_the_program() -> None:
    """Read MPI calls from source lines: missing-rank without seconds."""
    inside = [
        seen(rank, at=frame("mpi.py", 4, text="comm.Allreduce(a, b)"), libraries=["MPI"], recorder=None)
        for rank in (0, 1)
    ]
    outside = seen(2, at=frame("mpi.py", 9, text="time.sleep(60)"), libraries=["MPI"], recorder=None)
    found = explained(*inside, outside)
    assert (found["kind"], found["ranks"], found["seconds"]) == ("missing-rank", [2], None)
    assert found["sentence"] == "rank 2 (worker-1) has not joined MPI Allreduce (mpi.py:4), where ranks 0, 1 wait"


def test_the_network_is_not_blamed_where_it_is_not_known_that_all_are_in_the_same_call() -> None:
    """See all ranks in all_reduce without a recorder: unknown."""
    inside = frame("/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
    ranks = [seen(rank, recorder=None, stacks=[[inside, frame("train.py", 13)]]) for rank in (0, 1)]
    found = explained(*ranks)
    assert (found["kind"], found["collective"]) == ("unknown", "all_reduce")
    assert found["sentence"] == (
        "all of its 2 ranks are in all_reduce (train.py:13); whether in the same call and group is not known"
    )


def test_without_ranks_nothing_is_known() -> None:
    """Explain no ranks: unknown."""
    assert explained()["kind"] == "unknown"


def test_a_rank_that_waits_for_those_that_wait_is_not_said_to_wait_for_the_first() -> None:
    """Let rank 3 wait for ranks that wait for rank 2: only rank 2 is named, with the inner group's ranks."""
    groups = {"0": [0, 1, 2, 3], "1": [0, 1, 2]}
    inside = [seen(rank, collective(6, group="1")) for rank in (0, 1)]
    ranks = [*inside, seen(2, collective(5, group="1", done=True), at=frame("data.py", 3)), seen(3, collective(1))]
    for rank in ranks:
        rank["recorder"]["groups"] = groups
    assert explained(*ranks)["sentence"] == (
        "rank 2 (worker-1) has not joined all_reduce #6 (train.py:13) of ranks 0, 1, 2, "
        "where ranks 0, 1 have waited for 17 s"
    )
