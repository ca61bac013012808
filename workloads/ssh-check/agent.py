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
    """The lab's interface, as the collective libraries are told it."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or "eth0"


def address(name: str) -> str:
    """The IPv4 address of a network interface. Raises OSError where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])


def listen() -> tuple[str, int]:
    """Address and ephemeral port, on the lab's interface, where whoever connects is told this host's name."""
    server = socket.create_server((address(interface()), 0), backlog=1024)
    threading.Thread(target=greet, args=(server,), daemon=True).start()
    where: tuple[str, int] = server.getsockname()
    return where


def greet(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(socket.gethostname().encode())


def connect(name: str, host: str, port: int, limit: float) -> dict[str, Any]:
    """Milliseconds of the TCP handshake, or the error; whoever answers must be the host of that name."""
    if limit <= 0:
        return {"error": f"not tried: {TOTAL_LIMIT:g} s were up"}
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
