"""Answers of a rank to its node's agent: which collectives it has begun and finished, and whom it waits for.

torch's flight recorder keeps the collectives of NCCL and Gloo, but neither the ranks of Gloo's groups nor messages
between two ranks; those come from torch's own tables and from the stack. A thread answers while the program waits.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import sys
import threading
from types import ModuleType
from typing import Any

MOST = 300
"""Collectives to tell of: the last ones."""
PEERS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
"""Functions of torch that wait for one rank, and the arguments that name it."""

started: list[threading.Thread] = []


def serve() -> None:
    """Answer each process of the same user that connects to this rank's socket; once per process."""
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
    while True:
        with server.accept()[0] as client:
            client.settimeout(5)
            _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid in (os.getuid(), 0):
                try:
                    client.sendall(json.dumps(answer()).encode())
                except OSError:
                    pass  # It waits no more.
                except Exception as error:  # noqa: BLE001 - a rank goes on, whatever torch's tables have become
                    sys.stderr.write(f"labctl: flight recorder: {error!r}\n")


def answer() -> dict[str, object]:
    """Return this rank's number, its groups, its collectives and its partner of a message that it waits for."""
    groups = sys.modules["torch.distributed.distributed_c10d"]
    known = groups.is_initialized()
    return {
        "rank": groups.get_rank() if known else None,
        "groups": ranks_of_groups(groups),
        "collectives": collectives(),
        "message": message(groups) if known else None,
    }


def ranks_of_groups(groups: ModuleType) -> dict[str, list[int]]:
    """Return the ranks of each process group, by its name."""
    return {group.group_name: sorted(ranks) for group, ranks in list(groups._world.pg_group_ranks.items())}


def collectives() -> list[dict[str, object]]:
    """Return the last collectives of each group that this rank has begun, in order."""
    from torch._C import _distributed_c10d as core

    dump = getattr(core, "_dump_fr_trace", None) or core._dump_nccl_trace
    # Without stacks: for those torch imports 800 modules, which takes a second of a core.
    entries = pickle.loads(dump(True, False, False))["entries"]  # noqa: S301 - of this process
    return [told(entry) for entry in entries[-MOST:]]


def told(entry: dict[str, Any]) -> dict[str, object]:
    """Return what the agent needs of an entry."""
    return {
        "group": entry["process_group"][0],
        "number": entry["collective_seq_id"],
        "name": entry["profiling_name"].rpartition(":")[2],
        "message": entry["is_p2p"],
        "sizes": entry["input_sizes"],
        "types": entry.get("input_dtypes", []),
        "done": entry["retired"] or entry["state"] == "completed",
        "began": entry["time_created_ns"],
    }


def message(groups: ModuleType) -> dict[str, object] | None:
    """Return the function in which the main thread waits for a message, and its partner; None if it does not."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame:
        code = frame.f_code
        if code.co_name in PEERS and code.co_filename == groups.__file__:
            values = [frame.f_locals.get(name) for name in PEERS[code.co_name]]
            return {"name": code.co_name, "peer": partner(groups, frame.f_locals.get("group"), *values)}
        frame = frame.f_back
    return None


def partner(groups: ModuleType, group: object, rank: int | None, place: int | None) -> int | None:
    """Return the rank of a partner that is named by rank or by its place in the group; None if any will do."""
    if rank is not None or place is None:
        return rank
    return int(groups.get_global_rank(group or groups.group.WORLD, place))
