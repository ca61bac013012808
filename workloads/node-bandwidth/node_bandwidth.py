"""Bandwidth of every node's memory, disk or device copies, all nodes at the same time; rank 0 says what each reaches.

Memory and disk are the node's, so that its first rank measures them; copies are each rank's with its own device.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import figures
from copies import PinnedCopies
from disk import SequentialRead
from memory import Stream, array_size, free_memory, last_level_caches
from rank_group import RANK, WORLD
from script_exit import exit_code

NODE = os.uname().nodename
FIRST_OF_NODE = os.environ.get("LOCAL_RANK", "0") == "0"


def main() -> None:
    """Measure on this rank, rank 0 prints the figures of all; exit with an error if values are wrong."""
    args = parse()
    import torch.distributed as dist

    # Gloo, as only figures are exchanged: a device or its network that is broken is another test's to find.
    dist.init_process_group("gloo")
    measurement = prepare(args)
    dist.barrier()
    mine = []
    if measurement:
        times = figures.repeat(measurement.round, args.rounds, args.seconds)
        if wrong := measurement.wrong():
            sys.exit(f"rank {RANK} on {NODE}: {wrong}")
        mine = figures.of_rank(measurement, times, NODE)
    everyones = gather(mine)
    if RANK == 0:
        print(*figures.lines([figure for some in everyones for figure in some]), sep="\n", flush=True)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Parse the command line; exit with an error for ``--rounds`` or ``--seconds`` out of range."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--measure", required=True, choices=["memory", "disk", "copy"])
    add("--size", type=size, help="of an array (if not given, 4 x the caches), the file (512M), or a copy (256M)")
    add("--rounds", type=int, default=10, help="timed rounds, after one that is not")
    add("--seconds", type=float, default=3, help="seconds after which no more rounds begin; at least two run")
    add("--path", type=Path, help="disk: file to read, or directory for one; if not given, the run's directory")
    add("--host-copy", action="store_true", help="copy: within host memory where there is no accelerator")
    args = parser.parse_args()
    # STREAM's values grow fifteenfold with each round.
    if not 1 <= args.rounds <= 200 or args.seconds <= 0:
        parser.error("--rounds is 1 to 200, --seconds is above 0")
    return args


def size(text: str) -> int:
    """Parse a size such as ``64M`` for argparse. ArgumentTypeError if it is none."""
    try:
        return figures.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def prepare(args: argparse.Namespace) -> figures.Measurement | None:
    """Return this rank's measurement; None for ranks but the first of a node, except for copies."""
    if args.measure == "copy":
        return PinnedCopies(args.size, NODE, host_copy=args.host_copy)
    if args.measure == "disk":
        directory = Path(os.environ.get("LABCTL_RUN_DIR", "."))
        return SequentialRead(args.path or directory, args.size) if FIRST_OF_NODE else None
    # The nodes of one machine share its memory.
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    together = gather((machine, free_memory()) if FIRST_OF_NODE else None)
    if not FIRST_OF_NODE:
        return None
    free = min(other[1] for other in together if other and other[0] == machine)
    nodes = sum(bool(other) and other[0] == machine for other in together)
    caches = last_level_caches(os.sched_getaffinity(0))
    return Stream(array_size(args.size, caches, free // nodes), caches)


def gather(own: object) -> list:
    """Gather an object from all ranks; return the list of all, by rank, on each."""
    import torch.distributed as dist

    found = [None] * WORLD
    dist.all_gather_object(found, own)
    return found


if __name__ == "__main__":
    sys.exit(exit_code(main))
