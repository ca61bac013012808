"""What a node sees of itself and of its peers, for `labctl doctor`, which hands this text to the container's Python.

Standard library only, Python >= 3.8:

    look PORT                   one JSON line: clock, addresses of interfaces, variables that choose among them, who
                                listens on the port
    links SECONDS BYTES RATE NODE...
                                one JSON line per node: log in over ssh, hand so many bytes over, in so many seconds
    collect ADDRESS PEERS BYTES SECONDS
                                a line with a port of the address; then, once so many peers have handed over so many
                                bytes each, a JSON line: what went through each interface meanwhile
    hand ADDRESS PORT BYTES SECONDS
                                hand bytes over, leaving the way to the kernel as collectives do; a JSON line as above
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
# How variables that choose an interface end: those of collective libraries, of libfabric and of Open MPI.
CHOOSING = ("_SOCKET_IFNAME", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")


def look(port: str) -> None:
    seen = {
        "time": time.time(),
        "addresses": addresses(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if value and name.endswith(CHOOSING)},
        "listener": listener(int(port)),
    }
    print(json.dumps(seen))


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def listener(port: int) -> dict[str, object] | None:
    """Who listens on a port: pid, command, user and run, as far as this user may see; None where nobody does."""
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
    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    variables = (entry / "environ").read_bytes().split(b"\0")
    run = next((word.partition(b"=")[2].decode() for word in variables if word.startswith(b"LABCTL_RUN_ID=")), "")
    return {"command": command[:120], "run": run}


def links(seconds: str, size: str, least: str, *nodes: str) -> None:
    """Log in to every node at once, and a second time to those that take less than so many bytes per second."""
    # Nodes may have come since this launcher started.
    for name in ("config", "known_hosts"):
        with contextlib.suppress(OSError):
            shutil.copyfile(f"/etc/lab/ssh/{name}", Path.home() / ".ssh" / name)
    with ThreadPoolExecutor(min(len(nodes), 32)) as pool:
        answers = list(pool.map(lambda node: link(node, float(seconds), int(size)), nodes))
        # On a busy machine many logins at once are slow; a slow link is so without them too.
        slow = [answer for answer in answers if answer["name"] and (answer["rate"] or 0) < float(least)]
        again = pool.map(lambda answer: link(answer["node"], float(seconds), int(size)), slow)
        better = {answer["node"]: answer for answer in again if answer["rate"]}
    for answer in answers:
        print(json.dumps(better.get(answer["node"], answer)))


def link(node: str, seconds: float, size: int) -> dict[str, Any]:
    """The node's own name as it tells it, seconds until then, and bytes per second of what was sent next."""
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
    said = child.stderr.read().decode(errors="replace").strip()
    rate = size / (ended - reached) if counted == str(size).encode() else None
    child.wait()
    return {"node": node, "name": name, "seconds": round(reached - began, 3), "rate": rate, "said": said}


def collect(address: str, peers: str, size: str, seconds: str) -> None:
    deadline = time.monotonic() + float(seconds)
    with socket.create_server((address, 0), backlog=int(peers)) as server:
        print(server.getsockname()[1], flush=True)
        before = counters()
        with contextlib.suppress(OSError):
            for _ in range(int(peers)):
                server.settimeout(max(0.1, deadline - time.monotonic()))
                with server.accept()[0] as peer:
                    take(peer, int(size), deadline)
    print(json.dumps({"said": "", **grown(before, counters())}), flush=True)


def take(peer: socket.socket, size: int, deadline: float) -> None:
    """Read so many bytes and say so."""
    got = 0
    while got < size:
        peer.settimeout(max(0.1, deadline - time.monotonic()))
        part = peer.recv(1 << 16)
        if not part:
            return
        got += len(part)
    peer.sendall(b"!")


def hand(address: str, port: str, size: str, seconds: str) -> None:
    before, said = counters(), ""
    try:
        with socket.create_connection((address, int(port)), float(seconds)) as peer:
            peer.sendall(bytes(int(size)))
            said = "" if peer.recv(1) == b"!" else "it hung up"
    except OSError as error:
        said = str(error)
    print(json.dumps({"said": said, **grown(before, counters())}))


def counters() -> dict[str, tuple[int, int]]:
    """Bytes received and sent by each interface. Source: Documentation/ABI/testing/sysfs-class-net-statistics."""
    found = {}
    for path in Path("/sys/class/net").iterdir():
        with contextlib.suppress(OSError):
            numbers = [int((path / f"statistics/{name}_bytes").read_text()) for name in ("rx", "tx")]
            found[path.name] = (numbers[0], numbers[1])
    return found


def grown(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """What each interface received and sent between, and for each the ones that it is made of or part of."""
    through = {name: [after[name][way] - before[name][way] for way in (0, 1)] for name in before if name in after}
    kin = {
        name: [path.name.split("_", 1)[1] for path in Path("/sys/class/net", name).glob("[lu]*er_*")]
        for name in through
    }
    return {"through": through, "kin": kin}


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"look": look, "links": links, "collect": collect, "hand": hand}
    commands[sys.argv[1]](*sys.argv[2:])
