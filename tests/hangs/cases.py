"""Programs that hang, how each is run, and what labctl must say of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
# Runs that end by their time limit: their programs print no steps, so they never count as stalled.
LIMITED = ("--timeout", "45s")
# The seconds between two starts of the ranks are no stall.
RESTARTING = ("--timeout", "60s", "-s", "LAB_STALL_SECONDS=40")


@dataclass(frozen=True)
class Case:
    """A program with a known answer.

    A word may list alternatives, ``a|b``, and ``*`` is any text without a rank. ``{waits}`` and ``{apart}`` stand for
    the lines of the program that end with the comments ``# others wait`` and ``# apart``, as ``program.py:12``.
    """

    name: str
    program: str
    launcher: str
    slots: tuple[int, int]
    """Ranks on worker-0 and on worker-1."""
    kinds: tuple[str, ...] = ()
    """Right kinds of hang; none where there is no hang, or where the message is judged."""
    causes: tuple[str, ...] = ("stalled",)
    """Right causes; none for a run that passes."""
    accused: tuple[int, ...] | None = None
    """Ranks that the hang names; None where both sides are at fault."""
    words: tuple[str, ...] = ()
    """Words of the sentence."""
    below: tuple[str, ...] = ()
    """Words of the sentence or of the lines below it."""
    never: tuple[str, ...] = ()
    """Words that neither has."""
    message: tuple[str, ...] = ()
    """What the result's message says, where that is judged in place of a hang."""
    action: str = ""
    """What is done to worker-1 after the tenth step."""
    flags: tuple[str, ...] = ()
    in_ci: bool = False

    def expected(self, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the alternatives of each word, with `{waits}` and `{apart}` replaced by the program's places."""
        places = {"waits": self._place("# others wait"), "apart": self._place("# apart")}
        return [tuple(word.format(**places).split("|")) for word in words]

    def _place(self, comment: str) -> str:
        """Return `FILE:LINE` of the first line that ends with a comment; empty if the program has none."""
        lines = (PROGRAMS / f"{self.program}.py").read_text(encoding="utf-8").splitlines()
        numbers = [number for number, line in enumerate(lines, 1) if line.endswith(comment)]
        return f"{self.program}.py:{numbers[0]}" if numbers else ""


CASES = (
    # Ranks that are in different collectives, or in collectives that do not fit.
    Case(
        "skipped collective", "skipped_collective", "torchrun", (2, 2),
        kinds=("different-collective",), accused=(3,),
        words=("ranks 0, 1, 2*all_reduce #7*{waits}", "rank 3 (worker-1)*barrier #7*{apart}"),
        in_ci=True,
    ),
    Case(
        "one more collective", "one_more", "deepspeed", (2, 2),
        kinds=("different-collective",), accused=(0,),
        words=("ranks 1, 2, 3*all_gather #6*{waits}", "rank 0 (worker-0)*all_reduce #6*{apart}"),
        in_ci=True,
    ),
    Case(
        "other size", "other_size", "torchrun", (2, 2),
        kinds=("different-size",), accused=(1,),
        words=("rank 1 (worker-0)", "all_reduce #6", "{waits}"), below=("size|shape|elements",),
    ),
    Case(
        "other operation", "other_operation", "deepspeed", (2, 2),
        kinds=("different-collective",), accused=(1,),
        words=("ranks 0, 2, 3*all_reduce #6*{waits}", "rank 1 (worker-0)*broadcast #6*{apart}"),
    ),
    Case(
        "other group", "other_group", "torchrun", (2, 2),
        kinds=("crossed-groups",),
        words=("ranks 0, 1*{waits}", "ranks 2, 3*{apart}", "group"),
    ),
    Case(
        "subgroup", "subgroup", "torchrun", (2, 2),
        kinds=("missing-rank",), accused=(2,),
        words=("rank 2 (worker-1) has not joined all_reduce #6*{waits}", "ranks 0, 1 wait|ranks 0, 1 have waited"),
        below=("{apart}",),
        never=("rank 3 (worker-1) has not", "ranks 2, 3", "ranks 0, 1, 2 "),
    ),
    Case(
        "branch of ZeRO-3", "zero3", "deepspeed", (1, 1),
        kinds=("different-collective",),
        words=("rank 0*{waits}", "rank 1*all_gather*{apart}|rank 1*allgather*{apart}"),
    ),
    Case(
        "send without receive", "send_without_receive", "mpirun", (2, 1),
        kinds=("crossed-groups", "different-collective"),
        words=("rank 0*Send*{waits}|rank 0*send*{waits}", "rank 1*Recv*{apart}|rank 1*recv*{apart}"),
    ),
    # Ranks that do not come to a collective.
    Case(
        "barrier", "barrier", "deepspeed", (2, 1),
        kinds=("missing-rank",), accused=(2,),
        words=("rank 2 (worker-1) has not joined barrier #6*{waits}", "ranks 0, 1 wait|ranks 0, 1 have waited"),
        below=("{apart}",),
    ),
    Case(
        "data loader that sleeps", "slow_loader", "torchrun", (1, 1),
        kinds=("missing-rank",), accused=(1,),
        words=("rank 1 (worker-1) has not joined all_reduce #7*{waits}", "rank 0 waits|rank 0 has waited"),
        below=("{apart}",),
        in_ci=True,
    ),
    Case(
        "lock", "lock", "mpirun", (1, 1),
        kinds=("missing-rank",), accused=(1,),
        words=("rank 1 (worker-1) has not joined all_reduce #5*{waits}", "rank 0 waits|rank 0 has waited"),
        below=("{apart}",),
        in_ci=True,
    ),
    Case(
        "skipped under MPI", "skipped_by_mpi", "mpirun", (2, 2),
        kinds=("missing-rank",), accused=(2,),
        words=(
            "rank 2 (worker-1) has not joined*{waits}", "Allreduce|allreduce|all_reduce",
            "ranks 0, 1, 3 wait|ranks 0, 1, 3 have waited",
        ),
        below=("{apart}",),
    ),
    Case(
        "no data for any rank", "starved", "torchrun", (1, 1),
        kinds=("all-outside",),
        words=("{apart}",), never=("has not joined",),
    ),
    # Ranks that cannot go on.
    Case(
        "SIGSTOP", "stopped", "deepspeed", (2, 2),
        kinds=("rank-stopped",), accused=(1,),
        words=("rank 1 (worker-0)*stopped|rank 1 (worker-0)*SIGSTOP",), below=("{waits}",),
        in_ci=True,
    ),
    Case(
        "state D", "uninterruptible", "torchrun", (1, 1),
        kinds=("uninterruptible",), accused=(1,),
        words=("rank 1 (worker-1)", "uninterruptible|state D|D state"), below=("{waits}",),
    ),
    Case(
        "ended with 0", "ends_early", "mpirun", (1, 1),
        kinds=("rank-ended",), causes=("timeout",), accused=(1,),
        words=("rank 1 (worker-1)*ended*code 0",), below=("{waits}",),
        flags=LIMITED,
    ),
    Case(
        "network cut", "trains", "torchrun", (1, 1),
        kinds=("node-unreached",), causes=("stalled", "node-lost"),
        words=("worker-1", "does not answer|cannot be reached|unreachable|not reached"), never=("has not joined",),
        action="cut the network",
    ),
    Case(
        "network cut between the workers", "trains", "torchrun", (1, 1),
        kinds=("all-inside",),
        words=("all_reduce", "{waits}"), below=("network|worker-0",), never=("has not joined",),
        action="cut the way to worker-0",
    ),
    # Ranks and launchers that die: the cause says it.
    Case(
        "dead under torchrun", "dies", "torchrun", (1, 1),
        causes=("rank-crashed",), message=("rank 1 on worker-1 exited with code 137 (SIGKILL)",),
        never=("code 1; rank 1",),
    ),
    Case(
        "dead under deepspeed", "dies", "deepspeed", (1, 1),
        causes=("rank-crashed",), message=("rank 1 on worker-1 exited with code 137 (SIGKILL)",),
        never=("code 1; rank 1",),
    ),
    Case(
        "dead under mpirun", "dies", "mpirun", (1, 1),
        causes=("rank-crashed",), message=("rank 1 on worker-1 exited with code 137 (SIGKILL)",),
        never=("code 1; rank 1",),
    ),
    Case(
        "torchrun killed", "trains", "torchrun", (1, 1),
        causes=("launcher-failed", "timeout"), message=("torchrun on worker-1", "killed|gone"),
        action="kill bin/torchrun", flags=LIMITED,
    ),
    Case(
        "deepspeed killed", "trains", "deepspeed", (1, 1),
        causes=("launcher-failed", "timeout"), message=("deepspeed|launch.py", "on worker-1", "killed|gone"),
        action="kill deepspeed.launcher.launch", flags=LIMITED,
    ),
    Case(
        "orted killed", "trains", "mpirun", (1, 1),
        causes=("launcher-failed",), message=("orted on worker-1", "killed|gone"),
        action="kill orted", flags=LIMITED,
    ),
    Case(
        "restarts without end", "restarts", "torchrun:elastic", (1, 1),
        causes=("timeout", "rank-crashed"), message=("rank 1", "worker-1", "code 7", "again|restart"),
        flags=("--launcher-arg=--max-restarts", "--launcher-arg=1000", *RESTARTING),
    ),
    # No hang.
    Case(
        "evaluation on rank 0 alone", "evaluation", "torchrun", (1, 1),
        kinds=("missing-rank",), causes=(), accused=(0,),
        words=("rank 0 (worker-0)", "busy", "barrier*{waits}"), never=("rank 1 (worker-1) has not",),
        flags=LIMITED,
    ),
    Case(
        "slow but going", "slow", "torchrun", (1, 1),
        causes=(), never=("has not joined",),
        flags=LIMITED, in_ci=True,
    ),
)  # fmt: skip
