"""Check a node and its links to its peers, for `labctl doctor`, which passes this text to the container's Python.

Standard library only, Python >= 3.8:

    look PORT                   print one JSON line: clock, addresses of interfaces, variables that select interfaces,
                                the process that listens on the port, space in /dev/shm
    links SECONDS BYTES RATE NODE...
                                log in to every node over ssh and send it that many bytes, with a timeout; print one
                                JSON line per node
    collect ADDRESS PEERS BYTES SECONDS
                                listen on the address and print the port; once every peer has sent its bytes, print one
                                JSON line with the traffic of each interface
    hand ADDRESS PORT BYTES SECONDS
                                send the bytes, on the route that the kernel chooses, as for collectives; print one JSON
                                line as `collect` does
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# linux/sockios.h
SIOCGIFADDR = 0x8915
# The state of a listening socket in /proc/net/tcp; proc(5).
LISTENING = "0A"
# Suffixes of variables that select an interface: of collective libraries, of libfabric and of Open MPI.
CHOOSING = ("_SOCKET_IFNAME", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")


def look(port: str) -> None:
    """Print one JSON line: clock, IPv4 addresses, variables that choose interfaces, port's listener, /dev/shm."""
    report = {
        "time": time.time(),
        "addresses": addresses(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if value and name.endswith(CHOOSING)},
        "listener": listener(int(port)),
        "shared_memory": shared_memory(),
    }
    print(json.dumps(report))


def addresses() -> dict[str, str]:
    """Return interface -> IPv4 address, of the interfaces that have one."""
    by_interface = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                by_interface[name] = socket.inet_ntoa(answer[20:24])
    return by_interface


def shared_memory() -> tuple[int, int]:
    """Return the free and all bytes of /dev/shm."""
    state = os.statvfs("/dev/shm")
    return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize


def listener(port: int) -> dict[str, object] | None:
    """Return uid, pid, command and run of the process that listens on a TCP port; None if nothing listens."""
    inodes = set()
    uid = ""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(f":{port:04X}") and fields[3] == LISTENING:
                    inodes.add(f"socket:[{fields[9]}]")
                    uid = fields[7]
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if inodes & {os.readlink(str(link)) for link in (entry / "fd").iterdir()}:  # noqa: PTH115 - Python 3.8
                    return {"pid": int(entry.name), "uid": uid, **process(entry)}
    return {"pid": None, "uid": uid, "command": "", "run": ""}


def process(entry: Path) -> dict[str, object]:
    """Return the command of a process (120 characters at most) and the id of its run, empty if it has none."""
    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    variables = (entry / "environ").read_bytes().split(b"\0")
    run_ids = (line.partition(b"=")[2].decode() for line in variables if line.startswith(b"LABCTL_RUN_ID="))
    return {"command": command[:120], "run": next(run_ids, "")}


def links(seconds: str, size: str, least: str, *nodes: str) -> None:
    """Print one JSON line per node: the link to it, measured again if it has less than ``least`` bytes per second."""
    # Nodes may have been added since this launcher started.
    for name in ("config", "known_hosts"):
        with contextlib.suppress(OSError):
            shutil.copyfile(f"/etc/lab/ssh/{name}", Path.home() / ".ssh" / name)
    with ThreadPoolExecutor(min(len(nodes), 32)) as pool:
        answers = list(pool.map(lambda node: link(node, float(seconds), int(size)), nodes))
        # A busy machine slows many logins at once; a slow link is slow the second time too.
        slow = [answer for answer in answers if answer["name"] and (answer["rate"] or 0) < float(least)]
        again = pool.map(lambda answer: link(answer["node"], float(seconds), int(size)), slow)
        better = {answer["node"]: answer for answer in again if answer["rate"]}
    for answer in answers:
        print(json.dumps(better.get(answer["node"], answer)))


def link(node: str, seconds: float, size: int) -> dict[str, Any]:
    """Log in over ssh, send ``size`` bytes; return the node's hostname, login seconds, bytes per second, stderr."""
    began = time.monotonic()
    limit = str(max(1, int(seconds)))
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={limit}", "--", node, "uname -n; exec wc -c"]
    child = subprocess.Popen(
        ["timeout", "--signal=KILL", limit, *ssh], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    name = child.stdout.readline().decode().strip()
    reached = time.monotonic()
    with contextlib.suppress(BrokenPipeError):
        if name:
            child.stdin.write(bytes(size))
            child.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    counted = child.stdout.read().strip()
    ended = time.monotonic()
    errors = child.stderr.read().decode(errors="replace").strip()
    rate = size / (ended - reached) if counted == str(size).encode() else None
    child.wait()
    return {"node": node, "name": name, "seconds": round(reached - began, 3), "rate": rate, "said": errors}


def collect(address: str, peers: str, size: str, seconds: str) -> None:
    """Listen, print the port, receive ``size`` bytes from each peer until the deadline, and print the traffic."""
    deadline = time.monotonic() + float(seconds)
    with socket.create_server((address, 0), backlog=int(peers)) as server:
        print(server.getsockname()[1], flush=True)
        before = counters()
        with contextlib.suppress(OSError):
            for _ in range(int(peers)):
                server.settimeout(max(0.1, deadline - time.monotonic()))
                with server.accept()[0] as peer:
                    receive(peer, int(size), deadline)
    print(json.dumps({"said": "", **traffic(before, counters())}), flush=True)


def receive(peer: socket.socket, size: int, deadline: float) -> None:
    """Read ``size`` bytes from a peer and acknowledge them with one byte; no acknowledgement if it hangs up first."""
    received = 0
    while received < size:
        peer.settimeout(max(0.1, deadline - time.monotonic()))
        part = peer.recv(1 << 16)
        if not part:
            return
        received += len(part)
    peer.sendall(b"!")


def hand(address: str, port: str, size: str, seconds: str) -> None:
    """Send bytes to a peer; print one JSON line: the error or an empty text, and the traffic of each interface."""
    before, failure = counters(), ""
    try:
        with socket.create_connection((address, int(port)), float(seconds)) as peer:
            peer.sendall(bytes(int(size)))
            failure = "" if peer.recv(1) == b"!" else "it closed the connection"
    except OSError as error:
        failure = str(error)
    print(json.dumps({"said": failure, **traffic(before, counters())}))


def counters() -> dict[str, tuple[int, int]]:
    """Return interface -> bytes received and sent since it came up.

    Source: Documentation/ABI/testing/sysfs-class-net-statistics.
    """
    by_interface = {}
    for path in Path("/sys/class/net").iterdir():
        with contextlib.suppress(OSError):
            numbers = [int((path / f"statistics/{name}_bytes").read_text()) for name in ("rx", "tx")]
            by_interface[path.name] = (numbers[0], numbers[1])
    return by_interface


def traffic(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return bytes received and sent by each interface, and the names of its lower and upper ones, as of a bond."""
    through = {}
    kin = {}
    for name in before:
        if name in after:
            through[name] = [after[name][way] - before[name][way] for way in (0, 1)]
            kin[name] = [path.name.split("_", 1)[1] for path in Path("/sys/class/net", name).glob("[lu]*er_*")]
    return {"through": through, "kin": kin}


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"look": look, "links": links, "collect": collect, "hand": hand}
    commands[sys.argv[1]](*sys.argv[2:])
