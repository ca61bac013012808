"""As much of a DeepSpeed-Chat step as its callers see: ranks that meet, and three lines at the end."""

import argparse
import os
import time

import deepspeed
import torch
from torch import distributed


def main() -> None:
    """All-reduce once a step, print seconds and throughput; with 0 steps the last rank fails and the others go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_output_path")
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--per_device_train_batch_size", type=int)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    print(f"rank {rank} local {args.local_rank} run {os.environ['LABCTL_RUN_ID']} port {os.environ['MASTER_PORT']}")
    if args.max_steps < 1 and rank == world - 1:
        raise SystemExit("nothing to do")
    began = time.perf_counter()
    for _ in range(args.max_steps or 1_000_000):
        distributed.all_reduce(torch.ones(1000))
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    if rank == 0:
        print("=====")
        print(f"Execution time: {seconds} seconds for {args.max_steps} steps")
        print(f"Throughput: {args.per_device_train_batch_size * world * args.max_steps / seconds:.4f} samples/sec")


if __name__ == "__main__":
    main()
