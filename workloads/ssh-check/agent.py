"""Worker's part of the check; ssh_check.py sends this text to the worker's own Python 3 over ssh.

Speaks JSON lines: says where it listens, is told its peers, says what came of connecting to each, and ends when its
input does. Standard library only, and nothing of it is installed on the worker.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

CONNECT_LIMIT, TOTAL_LIMIT = 3.0, 40.0
"""Seconds for one connection, as a network that drops packets says nothing sooner, and for all of a worker's."""
SIOCGIFADDR = 0x8915
"""Request number of an interface's IPv4 address, from linux/sockios.h."""


def interface() -> str:
    """Return the lab's network interface: GLOO_SOCKET_IFNAME, else eth0."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or "eth0"


def address(name: str) -> str:
    """Return the IPv4 address of a network interface. OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])


def listen() -> tuple[str, int]:
    """Listen on the lab's interface, telling clients this host's name in a thread; return address and port."""
    server = socket.create_server((address(interface()), 0), backlog=1024)
    threading.Thread(target=greet, args=(server,), daemon=True).start()
    where: tuple[str, int] = server.getsockname()
    return where


def greet(server: socket.socket) -> None:
    """Accept connections for ever and send each this host's name."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(socket.gethostname().encode())


def connect(name: str, host: str, port: int, limit: float) -> dict[str, Any]:
    """Connect by TCP; return ``milliseconds``, or ``error`` if it fails or another host than ``name`` answers."""
    if limit <= 0:
        return {"error": f"not tried: the limit of {TOTAL_LIMIT:g} s was reached"}
    try:
        where = socket.gethostbyname(host)
        began = time.perf_counter()
        with socket.create_connection((where, port), limit) as connection:
            milliseconds = 1000 * (time.perf_counter() - began)
            said = connection.recv(256).decode(errors="replace")
    except OSError as error:
        return {"error": f"{host} port {port}: {error}"}
    return {"milliseconds": milliseconds} if said == name else {"error": f"{where} port {port} is `{said}`"}


def main() -> None:
    """Print the port that it listens on, read peers as JSON, print the results, and wait until the input closes."""
    try:
        _, port = listen()
    except OSError as error:
        sys.exit(f"cannot listen on {interface()}: {error}")
    print(json.dumps({"port": port}), flush=True)
    peers = json.loads(sys.stdin.readline() or "[]")
    deadline = time.monotonic() + TOTAL_LIMIT
    found = [connect(*peer, limit=min(CONNECT_LIMIT, deadline - time.monotonic())) for peer in peers]
    print(json.dumps(found), flush=True)
    # Others may still connect here.
    sys.stdin.read()


if __name__ == "__main__":
    main()
