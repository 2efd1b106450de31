"""Finds the address of an invitation in the same network, by a question to a multicast group.

The launcher answers only while an invitation is open, and says the public number of its code and a port. A
forged answer only suggests an address: the proof of the code decides. Answers are shorter than questions, go
to the network of an own interface with a time to live of 1, and are at most one per second.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import sys
from typing import Iterator, List, Optional, Sequence, Tuple

from ringcomm.clock import monotonic
from ringcomm.transport.nics import Interface, own_addresses

GROUP, PORT = "239.255.43.117", 43117
ANSWER_EVERY_S = 1.0
MAX_ADDRESSES = 8
"""So many different answers are tried."""
_QUESTION = struct.Struct("!9s16s39x")
_ANSWER = struct.Struct("!9s16sHH")
_ASKED, _ANSWERED = b"ringjoin?", b"ringjoin!"
_ALL_GROUPS = 49
"""Linux's IP_MULTICAST_ALL, which Python does not name: whether groups of other sockets count, too."""


class Answerer:
    """Answers questions on these interfaces."""

    def __init__(self, interfaces: Sequence[Interface], label: int, port: int) -> None:
        usable = [item for item in interfaces if ":" not in item.address]
        self._networks = [ipaddress.ip_network(f"{i.address}/{i.prefix_bits}", strict=False) for i in usable]
        self._said, self._next_s = struct.pack("!HH", label, port), 0.0
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
            if not sum(self._take_part(item.address) for item in usable):
                raise OSError("no interface has multicast")
        except OSError:
            self.sock.close()
            raise

    def _take_part(self, address: str) -> bool:
        member = socket.inet_aton(GROUP) + socket.inet_aton(address)
        try:
            self.sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        except OSError:
            return False
        return True

    def answer(self) -> None:
        """Take one datagram; answer it if it is a question of a machine in a network of this one."""
        try:
            data, origin = self.sock.recvfrom(_QUESTION.size + 1)
        except OSError:
            return
        reply = answer_to(data, self._said)
        near = any(ipaddress.ip_address(origin[0]) in network for network in self._networks)
        if reply and near and monotonic() >= self._next_s:
            self._next_s = monotonic() + ANSWER_EVERY_S
            with contextlib.suppress(OSError):
                self.sock.sendto(reply, origin)


def answer_to(data: bytes, said: bytes) -> bytes:
    """The answer to a datagram; b"" if it is no question."""
    if len(data) != _QUESTION.size or not data.startswith(_ASKED):
        return b""
    return _ANSWERED + bytes(_QUESTION.unpack(data)[1]) + said


def said_in(data: bytes, nonce: bytes, label: int) -> Optional[int]:
    """The port in an answer to the question with this nonce, if it is about this label."""
    if len(data) != _ANSWER.size:
        return None
    magic, echoed, found, port = _ANSWER.unpack(data)
    return port if (magic, echoed, found) == (_ANSWERED, nonce, label) and port else None


def find(label: int, limit_s: float) -> Iterator[Tuple[str, int]]:
    """The addresses of invitations with this number, in the order in which they answer."""
    nonce = os.urandom(16)
    seen: List[Tuple[str, int]] = []
    with contextlib.ExitStack() as stack:
        socks: List[socket.socket] = []
        for item in own_addresses():
            if ":" not in item.address:
                sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                with contextlib.suppress(OSError):
                    sock.bind((item.address, 0))
                    own = socket.inet_aton(item.address)
                    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
                    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
                    sock.setblocking(False)
                    socks.append(sock)
        until_s, next_s = monotonic() + limit_s, 0.0
        while socks and monotonic() < until_s and len(seen) < MAX_ADDRESSES:
            if monotonic() >= next_s:
                next_s = monotonic() + 0.7 * ANSWER_EVERY_S
                for sock in socks:
                    with contextlib.suppress(OSError):
                        sock.sendto(_QUESTION.pack(_ASKED, nonce), (GROUP, PORT))
            ready, _, _ = select.select(socks, [], [], 0.1)
            for sock in ready:
                with contextlib.suppress(OSError):
                    data, origin = sock.recvfrom(_ANSWER.size + 1)
                    port = said_in(data, nonce, label)
                    found = (str(origin[0]), port or 0)
                    if port and found not in seen:
                        seen.append(found)
                        yield found
