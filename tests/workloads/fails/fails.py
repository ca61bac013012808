"""Take three steps; then fail on rank 1 in the requested way, or print bad numbers."""

import os
import sys
import time

how, rank = sys.argv[1], int(os.environ["RANK"])
print("the token is", os.environ["SERVICE_TOKEN"])
for step in range(1, 4):
    if how != "no-metric":
        print(f"step {step}/3 loss {'nan' if how == 'nan' else 4 - step}", flush=True)
if how == "timeout":
    time.sleep(600)
if rank == 1 and how == "host-memory":
    held = [bytearray(1 << 24) for _ in range(1000)]
if rank == 1 and how == "device-memory":
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
if rank == 1 and how == "library-memory":
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
if rank == 1 and how == "exit":
    sys.exit(3)
