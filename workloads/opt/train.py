"""An OPT model under DeepSpeed, started on every rank: fine-tuned, made a reward model, or reinforced by one."""

from __future__ import annotations

import os
from importlib import import_module

import arguments
import configuration
from script_exit import run_and_exit

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""The environment of a process that no launcher started."""


def main() -> None:
    """Parse and check the arguments, then train in the given mode; without a launcher as the only rank."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    args = arguments.parse()
    shapes = arguments.check(args)
    ds = configuration.read(args.deepspeed_config, int(os.environ["WORLD_SIZE"]))
    # Everything heavy is imported below here, after what can be refused at once.
    import torch
    from setting import prepare

    import_module(args.mode).run(prepare(args, ds, *shapes))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_exit(main)
