"""Links and encrypted connections whose two ends are in this process."""

from __future__ import annotations

import os
import socket
from typing import Any, List, Sequence, Type

from ringcomm.transport.local import ReadingLink
from ringcomm.transport.reactor import SecureSocket
from ringcomm.transport.shm import Ring, SharedLink
from ringcomm.transport.tls import Tls


def linked(kind: Type[SharedLink], *sizes: int, sockets: Any = None) -> List[Any]:
    """Return both ends of a link; ``sizes``: of the rings of rank 0 and (if it is another) of rank 1."""
    ends = socket.socketpair() if sockets is None else sockets
    made = [Ring.make(size) for size in (sizes * 2)[:2]]
    rings = [(made[rank], Ring(os.dup(made[1 - rank].descriptor))) for rank in range(2)]
    pid = (os.getpid(),) if issubclass(kind, ReadingLink) else ()
    return [kind(1 - rank, ends[rank], *pid, *rings[rank]) for rank in range(2)]


def secured(sockets: Sequence[socket.socket], tls: Tls) -> List[SecureSocket]:
    """Return both ends of a connection, encrypted, after the handshake."""
    for sock in sockets:
        sock.setblocking(False)
    ends = [tls.wrap(sock, accepted=bool(number)) for number, sock in enumerate(sockets)]
    while not (ends[0].handshake() & ends[1].handshake()):
        pass
    return ends
