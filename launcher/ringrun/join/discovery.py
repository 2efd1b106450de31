"""Finds the address of an invitation in the same network, by a question to a multicast group.

A question names the public number of a code, or of a known machine's key. A launcher answers only while it
waits for that, with the number and a port. A forged answer only suggests an address: the proof decides.
Answers are shorter than questions, go to the network of an own interface with a time to live of 1, and are at
most one per second.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import sys
from typing import Iterator, Sequence, Set, Tuple

from ringcomm.clock import monotonic
from ringcomm.transport.nics import Interface, own_addresses

GROUP, PORT = "239.255.43.117", 43117
ANSWER_EVERY_S = 1.0
MAX_ADDRESSES = 8  # so many different answers are tried
_QUESTION = struct.Struct("!9s16sH37x")
_ANSWER = struct.Struct("!9s16sHH")
_ASKED, _ANSWERED = b"ringjoin?", b"ringjoin!"
_ALL_GROUPS = 49  # Linux's IP_MULTICAST_ALL: whether groups of other sockets count, too


class Answerer:
    """Answers questions about these numbers on these interfaces."""

    def __init__(self, interfaces: Sequence[Interface], labels: Sequence[int], port: int) -> None:
        usable = [item for item in interfaces if ":" not in item.address]
        self._networks = [ipaddress.ip_network(f"{i.address}/{i.prefix_bits}", strict=False) for i in usable]
        self._labels, self._port, self._next_s = labels, port, 0.0
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "darwin":
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if sys.platform.startswith("linux"):
                self.sock.setsockopt(socket.IPPROTO_IP, _ALL_GROUPS, 0)
            self.sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
            self.sock.bind((GROUP, PORT))
            self.sock.setblocking(False)
            for item in usable:
                member = socket.inet_aton(GROUP) + socket.inet_aton(item.address)
                with contextlib.suppress(OSError):  # it has no multicast
                    self.sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        except OSError:
            self.sock.close()
            raise

    def answer(self) -> None:
        """Take one datagram; answer it if it is a question of a machine in a network of this one."""
        try:
            data, origin = self.sock.recvfrom(_QUESTION.size + 1)
        except OSError:
            return
        reply = answer_to(data, self._labels, self._port)
        near = any(ipaddress.ip_address(origin[0]) in network for network in self._networks)
        if reply and near and monotonic() >= self._next_s:
            self._next_s = monotonic() + ANSWER_EVERY_S
            with contextlib.suppress(OSError):
                self.sock.sendto(reply, origin)


def answer_to(data: bytes, labels: Sequence[int], port: int) -> bytes:
    """The answer to a datagram; b"" if it is no question about one of these numbers."""
    if len(data) != _QUESTION.size:
        return b""
    magic, nonce, label = _QUESTION.unpack(data)
    return _ANSWER.pack(_ANSWERED, nonce, label, port) if magic == _ASKED and label in labels else b""


def said_in(data: bytes, nonce: bytes, label: int) -> int:
    """The port in an answer to the question with this nonce, if it is about this label, else 0."""
    if len(data) != _ANSWER.size:
        return 0
    *said, port = _ANSWER.unpack(data)
    return int(port) if said == [_ANSWERED, nonce, label] else 0


def find(label: int, limit_s: float) -> Iterator[Tuple[str, int]]:
    """The addresses of invitations with this number, in the order in which they answer."""
    nonce = os.urandom(16)
    seen: Set[Tuple[str, int]] = set()
    own = [socket.inet_aton(item.address) for item in own_addresses() if ":" not in item.address]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        sock.setblocking(False)
        until_s, next_s = monotonic() + limit_s, 0.0
        while monotonic() < until_s and len(seen) < MAX_ADDRESSES:
            if monotonic() >= next_s:
                next_s = monotonic() + 0.7 * ANSWER_EVERY_S
                for address in own:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, address)
                        sock.sendto(_QUESTION.pack(_ASKED, nonce, label), (GROUP, PORT))
            with contextlib.suppress(OSError):
                if select.select([sock], [], [], 0.1)[0]:
                    data, origin = sock.recvfrom(_ANSWER.size + 1)
                    found = str(origin[0]), said_in(data, nonce, label)
                    if found[1] and found not in seen:
                        seen.add(found)
                        yield found
