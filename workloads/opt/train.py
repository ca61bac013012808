"""An OPT model under DeepSpeed, started on every rank: fine-tuned, made a reward model, or reinforced by one."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import arguments
import configuration
from shapes import InputError

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""The environment of a process that no launcher started."""


def main() -> int:
    """Parse, check, train; 2 and one line for what cannot be done as asked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    args = arguments.parse()
    try:
        shapes = arguments.check(args)
        ds = configuration.read(args.deepspeed_config, int(os.environ["WORLD_SIZE"]))
        # Everything heavy is imported below here, after what can be refused at once.
        import torch
        from setting import prepare

        import_module(args.mode).run(prepare(args, ds, *shapes))
        torch.distributed.destroy_process_group()
    except InputError as error:
        print(f"train.py: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may still hold tensors here; freeing them while Python shuts down aborts one run in thirty.
    os._exit(status)
