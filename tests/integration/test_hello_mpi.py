"""hello-mpi: compiled in the lab; all slots answer, and a missing one is detected."""

from __future__ import annotations

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

# Two ranks in the launcher: the program, with a short limit, and a Python that joins but never answers.
SILENT_RANK = """
mpicc -O2 -Wall -Werror -DLIMIT=1.0 -o /tmp/hello_mpi workloads/hello-mpi/hello_mpi.c
mpirun --allow-run-as-root --oversubscribe -np 1 /tmp/hello_mpi \
    : -np 1 python -c 'from mpi4py import MPI; MPI.COMM_WORLD.Barrier()'
echo "code $?"
"""
FOREIGN_MPI = """
mpicc -o /tmp/hello_mpi workloads/hello-mpi/hello_mpi.c
WORLD_SIZE=5 mpirun --allow-run-as-root --oversubscribe -np 2 /tmp/hello_mpi
echo "code $?"
"""


def test_every_slot_answers(lab: Lab) -> None:
    """hello-mpi under mpirun prints a greeting and an answer of both ranks, with the name of each node."""
    first = lab.call("run", "hello-mpi", "--json").expect(0)
    assert first.json["launcher"] == "mpirun"
    assert first.json["metrics"]["answers"]["value"] == first.json["world_size"] == 2
    for rank in (0, 1):
        assert f"hello from rank {rank} of 2 on worker-{rank}" in first.err
        assert f"answer from rank {rank} on worker-{rank}" in first.err


def test_a_rank_that_does_not_answer_is_named(lab: Lab) -> None:
    """Rank 1 joins and never answers: rank 0 names it after 1 s, and the exit code is 3."""
    output = lab.inside("launcher", "bash", "-c", SILENT_RANK)
    assert "no answer from rank 1 within 1 s" in output
    assert "ranks answered: 1 of 2" in output
    assert output.endswith("code 3\n")


def test_a_library_that_does_not_see_the_ranks_that_were_started_is_said(lab: Lab) -> None:
    """WORLD_SIZE 5 with two MPI ranks: the program says so and exits with code 4."""
    output = lab.inside("launcher", "bash", "-c", FOREIGN_MPI)
    assert "5 ranks were started, MPI sees 2" in output
    assert "code 4" in output.splitlines()
