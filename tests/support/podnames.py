"""A DNS server for pods, as CoreDNS is in a cluster. RFC 1035: one question, A records only."""

from __future__ import annotations

import socket
import socketserver
import struct
from collections.abc import Mapping

BRIDGE = ("172.17.0.1", 53)
"""Address of DNS for the node's pods, on Docker's bridge."""


class PodNames(socketserver.UDPServer):
    """A UDP server that resolves the names in ``addresses``; other names are not found."""

    def __init__(self) -> None:
        super().__init__(BRIDGE, _Answer)
        self.addresses: Mapping[str, str] = {}


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """Answer an A query with the name's address, another query without one, an unknown name with NXDOMAIN."""
        assert isinstance(self.server, PodNames)
        (query, reply_socket), labels, at = self.request, [], 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace").lower())
            at += 1 + length
        end = at + 5
        (kind,) = struct.unpack_from("!H", query, at + 1)
        address = self.server.addresses.get(".".join(labels))
        # Flags: authoritative, recursion available; 3 is NXDOMAIN. The TTL is 1 s, as pods may be recreated.
        answers = [socket.inet_aton(address)] if address and kind == 1 else []
        head = struct.pack("!2sHHHHH", query[:2], 0x8580 if address else 0x8583, 1, len(answers), 0, 0)
        records = [struct.pack("!HHHLH4s", 0xC00C, 1, 1, 1, 4, packed) for packed in answers]
        reply_socket.sendto(b"".join([head, query[12:end], *records]), self.client_address)
