"""Rank 0 sends to rank 1, which waits for a message of rank 2, which waits for one of rank 0."""

import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, activations = world.Get_rank(), np.ones(1_000_000)
for step in range(1, 6):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    world.Allreduce(MPI.IN_PLACE, activations)
if rank == 0:
    world.Send(activations, dest=1)  # others wait
if rank == 1:
    world.Recv(activations, source=2)  # apart
if rank == 2:
    world.Recv(activations, source=0)  # last
