"""Time a collective operation over a range of sizes, with values checked and bandwidths as in nccl-tests.

Under labctl, and by hand wherever torchrun works:

    torchrun --nproc-per-node 2 allreduce.py --operation all_gather --max-bytes 64M
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import backend
import collectives
import sizes
import torch
import torch.distributed as dist


def main() -> int:
    """Run the measurement on this rank; return 0, or 2 if the backend cannot be used."""
    args = parse()
    try:
        library, device = backend.choose(args.backend)
    except (ImportError, RuntimeError) as error:
        print(f"allreduce.py: --backend {args.backend}: {error}", file=sys.stderr, flush=True)
        return 2
    # NCCL wants to know the device before its first barrier.
    dist.init_process_group(library, **({"device_id": device} if library == "nccl" else {}))
    try:
        measure(args, library, device)
    finally:
        dist.destroy_process_group()
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line; exit with an error if the sizes, factor or iterations contradict each other."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--operation", default="all_reduce", choices=sizes.OPERATIONS)
    add("--min-bytes", default="8", type=size, help="smallest size; K, M and G are powers of 1024")
    add("--max-bytes", default="1G", type=size, help="largest size, always measured")
    add("--factor", default=2, type=int, help="from one size to the next")
    add("--iterations", default=20, type=int, help="timed calls of small sizes; large ones are called less often")
    add("--backend", default="auto", choices=backend.BACKENDS)
    args = parser.parse_args()
    if args.factor < 2 or args.iterations < 1 or args.min_bytes > args.max_bytes:
        parser.error("needs --factor of at least 2, --iterations of at least 1, and --min-bytes below --max-bytes")
    return args


def size(text: str) -> int:
    """Parse a size such as ``64M`` for argparse. ArgumentTypeError if it is none."""
    try:
        return sizes.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Row:
    """A row of the table: bytes, values, timed calls, microseconds per call (mean over ranks), GB/s, wrong values."""

    size: int
    count: int
    iterations: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int


def measure(args: argparse.Namespace, library: str, device: torch.device) -> None:
    """Measure all sizes that fit; rank 0 prints the table and writes the document."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    wanted = sizes.series(args.min_bytes, args.max_bytes, args.factor, args.operation, world)
    skipped = too_large(args.operation, wanted, library, device)
    if first:
        print(*heading(args.operation, library, device, world), sep="\n", flush=True)
    rows = []
    for bytes_ in wanted:
        if bytes_ in skipped:
            continue
        rows.append(measure_one(args, bytes_, device))
        if first:
            print(line(rows[-1], args.operation), flush=True)
    if first:
        finish(args, library, device, world, rows, skipped)


def measure_one(args: argparse.Namespace, bytes_: int, device: torch.device) -> Row:
    """Warm up, time the calls, then check the values of one more call; return the mean over ranks as a Row."""
    operation, rank, world = args.operation, dist.get_rank(), dist.get_world_size()
    case = collectives.build(operation, bytes_ // sizes.ITEM, rank, world, device)
    warm_up, timed = sizes.iterations(bytes_, args.iterations, backend.BUDGET.get(device.type, backend.DEFAULT_BUDGET))
    case.fill()
    calls(case, warm_up, device)
    dist.barrier()
    seconds = calls(case, timed, device) / timed
    case.fill()
    calls(case, 1, device)
    found = case.wrong()
    if found:
        print(f"# rank {rank} on {socket.gethostname()}: {found} wrong values at {bytes_} B", flush=True)
    answers = gather((seconds, found))
    mean = sum(answer[0] for answer in answers) / world
    algbw, busbw = sizes.bandwidths(operation, world, bytes_, mean)
    return Row(
        size=bytes_,
        count=sizes.count(operation, world, bytes_),
        iterations=timed,
        time_us=1e6 * mean,
        algbw=algbw,
        busbw=busbw,
        wrong=sum(answer[1] for answer in answers),
    )


def calls(case: collectives.Collective, times: int, device: torch.device) -> float:
    """Run the operation so many times; return the seconds, device synchronised before and after."""
    backend.synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        case.run()
    backend.synchronize(device)
    return time.perf_counter() - began


def too_large(operation: str, wanted: list[int], library: str, device: torch.device) -> dict[int, str]:
    """Return the sizes that do not fit in the ranks' memory, with the reason; the same on every rank."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    rooms = gather(
        sizes.Room(
            machine=machine,
            container=f"{machine} {socket.gethostname()}",
            free_on_machine=sizes.free_on_machine(),
            free_in_container=sizes.free_in_container(),
            free_on_device=backend.free_memory(device),
        )
    )
    scratch = backend.scratch(library, operation)
    reasons = {bytes_: sizes.obstacle(rooms, sizes.need(operation, len(rooms), bytes_, scratch)) for bytes_ in wanted}
    return {bytes_: reason for bytes_, reason in reasons.items() if reason}


def gather(own: object) -> list:
    """Gather an object from all ranks; return the list of all, by rank, on each."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


# --- what rank 0 says ----------------------------------------------------------------------------------------


def heading(operation: str, library: str, device: torch.device, world: int) -> list[str]:
    """Return the table's title line and its two heading lines, in nccl-tests' columns."""
    columns = (
        f"#{'size':>12}",
        f"{'count':>12}",
        "    type",
        " redop",
        " root",
        f"{'time':>10}",
        "   algbw",
        "   busbw",
    )
    units = (f"#{'(B)':>12}", f"{'(elements)':>12}", " " * 8, " " * 6, " " * 5, f"{'(us)':>10}", "  (GB/s)", "  (GB/s)")
    return [
        f"# {operation} over {library}, {world} ranks, device {device.type}, torch {torch.__version__}",
        f"{' '.join(columns)} #wrong",
        " ".join(units),
    ]


def line(row: Row, operation: str) -> str:
    """Return a table line of a measured size, in nccl-tests' columns."""
    redop = "sum" if "reduce" in operation else "none"
    root = 0 if operation == "broadcast" else -1
    return (
        f" {row.size:>12} {row.count:>12} {'float':>8} {redop:>6} {root:>5} {row.time_us:>10.2f}"
        f" {row.algbw:>8.3f} {row.busbw:>8.3f} {row.wrong:>6}"
    )


def finish(
    args: argparse.Namespace,
    library: str,
    device: torch.device,
    world: int,
    rows: list[Row],
    skipped: dict[int, str],
) -> None:
    """Print skipped sizes, latency, algbw, busbw and wrong values; write allreduce.json to LABCTL_RUN_DIR, if set."""
    for bytes_, reason in skipped.items():
        print(f"# skipped: {bytes_} B: {reason}")
    wrong = sum(row.wrong for row in rows)
    if rows:
        # Not that of the smallest size: the first calls of all also make connections and start threads.
        fastest = min(rows, key=lambda row: row.time_us)
        print(f"latency: {fastest.time_us:.2f} us at {fastest.size} B")
        print(f"algbw: {rows[-1].algbw:.6f} GB/s at {rows[-1].size} B")
        print(f"busbw: {rows[-1].busbw:.6f} GB/s at {rows[-1].size} B")
        print(f"wrong: {wrong}")
        print(f"skipped: {len(skipped)} sizes", flush=True)
    if directory := os.environ.get("LABCTL_RUN_DIR"):
        document = {
            "schema": 1,
            "operation": args.operation,
            "backend": library,
            "device": device.type,
            "world_size": world,
            "type": "float",
            "rows": [asdict(row) for row in rows],
            "skipped": [{"size": bytes_, "reason": reason} for bytes_, reason in skipped.items()],
            "wrong": wrong,
        }
        Path(directory, "allreduce.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
