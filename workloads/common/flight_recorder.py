"""Answers of a rank to its node: which collectives it has begun and finished, whom it waits for, and for how long.

torch's flight recorder keeps the collectives of NCCL and Gloo, but neither the ranks of Gloo's groups nor messages
between two ranks; those come from torch's own tables and from the stack. A thread answers while the program waits.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

MOST = 300
"""Collectives to tell of: the last ones."""
LOOK = 0.1, 0.4
"""Least and most seconds between two looks at whether this rank waits. By chance, as steps may take as long."""
OF_NCCL = " of NCCL"
"""Mark of a group's name: a group of two backends counts the collectives of each."""
QUESTION = 5
"""Seconds that a client may take to ask."""
PEERS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
"""Functions of torch that wait for one rank, and the arguments that name it."""

started: list[threading.Thread] = []


def serve() -> None:
    """Listen on this rank's abstract Unix socket, once per process, and answer its user and root in a thread."""
    if started:
        return
    server = socket.socket(socket.AF_UNIX)
    # An abstract name goes with the process. Containers may share the host's network, and with it such names.
    name = "/".join(("labctl", os.environ["LABCTL_RUN_ID"], os.uname().nodename, str(os.getpid())))
    try:
        server.bind(f"\0{name}")
        server.listen()
    except OSError:
        server.close()
        return
    os.register_at_fork(after_in_child=server.close)
    thread = threading.Thread(target=answer_all, args=(server,), name="labctl", daemon=True)
    started.append(thread)
    thread.start()


def answer_all(server: socket.socket) -> None:
    """Answer `stacks` with all that is known of this rank, `waited` with the seconds in which it was in collectives."""
    waited: float | None = None
    interval = random.uniform(*LOOK)  # noqa: S311 - no secret
    due = time.monotonic() + interval
    while True:
        server.settimeout(max(0.001, due - time.monotonic()))
        try:
            client = server.accept()[0]
        except socket.timeout:  # noqa: UP041 - of Python 3.9
            # Not the time that has passed: while C code keeps the interpreter, the rank computes.
            with suppress(Exception):
                waited = (waited or 0) + interval * is_in_collective()
            interval = random.uniform(*LOOK)  # noqa: S311
            due = time.monotonic() + interval
            continue
        except OSError:
            # The program has no descriptor left.
            time.sleep(interval)
            continue
        # A rank goes on whoever asks, and whatever torch's tables have become.
        with client, suppress(Exception):
            client.settimeout(QUESTION)
            if is_of_this_user(client):
                known = {"waited": waited} if client.recv(16) == b"waited" else answer()
                client.sendall(json.dumps(known).encode(), socket.MSG_NOSIGNAL)


def is_of_this_user(client: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (os.getuid(), 0)


def is_in_collective() -> bool:
    """Tell if this rank has begun a collective that is not finished; False before the first one."""
    statuses = [status for _, recorded in dumps(entries=False) for status in recorded.get("pg_status", {}).values()]
    return any(status["last_enqueued_collective"] > status["last_completed_collective"] for status in statuses)


def answer() -> dict[str, object]:
    """Return this rank's number, its groups, its collectives and its partner of a message that it waits for."""
    groups = sys.modules["torch.distributed.distributed_c10d"]
    known = groups.is_initialized()
    begun: list[dict[str, object]] = []
    with suppress(Exception):
        begun = collectives()
    return {
        "rank": groups.get_rank() if known else None,
        "groups": ranks_of_groups(groups),
        "collectives": begun,
        "message": message(groups) if known else None,
    }


def ranks_of_groups(groups: ModuleType) -> dict[str, list[int]]:
    """Return the ranks of each process group, by its name, and by that with NCCL's mark."""
    ranks = {group.group_name: sorted(ranks) for group, ranks in list(groups._world.pg_group_ranks.items())}
    return {**ranks, **{name + OF_NCCL: members for name, members in ranks.items()}}


def collectives() -> list[dict[str, object]]:
    """Return the collectives that this rank has begun, in order: the last ones, and the first not finished."""
    every = [told(entry, mark) for mark, recorded in dumps(entries=True) for entry in recorded.get("entries", [])]
    every.sort(key=lambda entry: entry["began"])
    unfinished = [entry for entry in every[:-MOST] if not entry["done"]]
    return unfinished[:MOST] + every[-MOST:]


def dumps(*, entries: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what torch has recorded of NCCL and of the other backends; without ``entries`` in 0.1 ms, numbers alone."""
    from torch._C import _distributed_c10d as core

    for name, mark in (("_dump_fr_trace", ""), ("_dump_nccl_trace", OF_NCCL)):
        if hasattr(core, name):
            # Without stacks: for those torch imports 800 modules, which takes a second of a core.
            yield mark, pickle.loads(getattr(core, name)(entries, False, False))  # noqa: S301 - of this process


def told(entry: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return the fields of an entry that the agent needs."""
    return {
        "group": entry["process_group"][0] + mark,
        "number": entry["collective_seq_id"],
        "name": entry["profiling_name"].rpartition(":")[2],
        "message": entry["is_p2p"],
        "sizes": entry["input_sizes"],
        "types": entry.get("input_dtypes", []),
        "done": entry["retired"] or entry["state"] == "completed",
        "began": entry["time_created_ns"],
    }


def message(groups: ModuleType) -> dict[str, object] | None:
    """Return the name of torch's send or recv in which the main thread is, and its peer; None if it is in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame:
        code = frame.f_code
        if code.co_name in PEERS and code.co_filename == groups.__file__:
            values = [frame.f_locals.get(name) for name in PEERS[code.co_name]]
            return {"name": code.co_name, "peer": partner(groups, frame.f_locals.get("group"), *values)}
        frame = frame.f_back
    return None


def partner(groups: ModuleType, group: object, rank: int | None, place: int | None) -> int | None:
    """Return the global rank of a peer, given by rank or by its place in the group; None if it is any rank."""
    if rank is not None or place is None:
        return rank
    return int(groups.get_global_rank(group or groups.group.WORLD, place))
