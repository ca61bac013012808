"""Rank 2 catches an error, goes to sleep before it tries again, and so misses the Allreduce of the others."""

import time

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
for step in range(1, 7):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
    gradient = np.ones(1000)
    try:
        if world.Get_rank() == 2 and step == 5:
            np.load("/nowhere/part-5.npy")
    except OSError:
        time.sleep(3600)  # apart
    world.Allreduce(MPI.IN_PLACE, gradient)  # others wait
