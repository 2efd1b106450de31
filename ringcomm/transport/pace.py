"""Finds links slower than they were chosen for, from the system's counters of their connections.

Two hosts that several networks connect have chosen one of them in a moment. If the link stays far below that
speed, and another network would be faster, the user gets a warning that names the other one. The system
counts the bytes of a connection, the time they took, and whether the other end or this program delayed them,
so nothing has to be measured; a rank that is late makes no link look slow.

Only a link with more to send than it can take shows its speed. Small messages, one after another, are as fast
as both programs answer, and a busy processor makes that slow. So a look counts only if bytes wait that the
system could not send yet, and the bytes sent since the last look went out in full segments.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .base import Fabric
from .routes import OTHER_KIND_RATIO
from .tcp import SocketLink, tcp_info

QUARTER = 0.25
"""A link below this fraction of its expected speed is slow."""
MAX_EXPECTED_MB_PER_S = 200.0
"""Above this, processors decide how fast a link is as often as the network."""
_LOOKS = 3
_MIN_BYTES = 256 * 1024
"""Minimum bytes between two looks that count."""
_MAX_HELD = 0.25
_FULL = 0.5
"""Segments of at least this fraction of the largest size are those of long messages."""
_TCP_INFO = struct.Struct("@7xB8xI100xQ16xII4xIQQQ")
_APP_LIMITED = 1


class Expected(NamedTuple):
    """The MB/s that a link was chosen for, measured at the start, and those of the host's other networks."""

    peer: int
    mb_per_s: float
    iface: str
    others: Tuple[Tuple[str, float], ...]

    @classmethod
    def of(cls, peer: int, route: Mapping[str, Any]) -> Optional[Expected]:
        """Return the expectation from a route of the rendezvous; None if there was no choice."""
        measured = route.get("measured") or {}
        iface = str(route.get("own_iface", ""))
        others = tuple(sorted((name, float(speed)) for name, speed in measured.items() if name != iface))
        return cls(peer, float(measured[iface]), iface, others) if others and iface in measured else None

    def complaint(self, mb_per_s: float, shared: int = 1) -> str:
        """Return the interface to use instead if the link has this speed and ``shared`` streams may share its
        interface; empty if the speed is fine. As in the choice at the start, the other network must be much
        faster than this one is now.
        """
        enough = min(self.mb_per_s, MAX_EXPECTED_MB_PER_S) * QUARTER / shared
        better = [(speed, name) for name, speed in self.others if speed >= OTHER_KIND_RATIO * mb_per_s]
        return max(better)[1] if better and mb_per_s < enough else ""


class Counted(NamedTuple):
    """The system's counters of a connection."""

    acked_bytes: int  # received by the other end
    busy_us: int  # something was in flight
    held_us: int  # of that, the other end took nothing
    rate: int  # bytes per second of the last transmission
    idle: bool  # the program sent less than the connection could take
    unsent_bytes: int = 0
    segments: int = 0  # sent with data in them
    segment_bytes: int = 0  # in the largest
    round_trip_us: int = 0  # the shortest so far


def counted(sock: socket.socket) -> Optional[Counted]:
    """Return the system's counters of a TCP connection; None where there are none (old kernels)."""
    info = () if sock.family == getattr(socket, "AF_UNIX", None) else tcp_info(sock, _TCP_INFO)
    if not info:
        return None
    flags, largest, acked, unsent, trip_us, segments, rate, busy_us, held_us = info
    idle = bool(flags & _APP_LIMITED)
    return Counted(acked, busy_us, held_us, rate, idle, unsent, segments, largest, trip_us)


def delivered(fabric: Fabric) -> Dict[int, Tuple[int, float]]:
    """Return, by peer, the bytes delivered over TCP and the seconds in which some were in flight and the
    other end took them; their ratio is the link's speed if there was enough to send.
    """
    found = {}
    for peer in range(fabric.size):
        link = fabric.link(peer) if peer != fabric.rank else None
        seen = counted(link.sock) if isinstance(link, SocketLink) else None
        if seen is not None:
            found[peer] = seen.acked_bytes, max(0, seen.busy_us - seen.held_us) / 1e6
    return found


class Paces:
    """Looks at links from time to time, and reports each slow one once."""

    def __init__(
        self,
        expected: Sequence[Expected],
        read: Callable[[int], Sequence[Optional[Counted]]],  # connections to a peer, in a fixed order
        describe: Callable[[Expected, float, str], str],  # of the speed in MB/s and the better interface
        shared: int = 1,  # streams that may share an interface
    ) -> None:
        self._expected = {item.peer: item for item in expected}
        self._read = read
        self.describe = describe
        self._shared = shared
        self._last: Dict[int, List[Optional[Counted]]] = {}
        self._slow: Dict[int, int] = {}

    def look(self) -> List[str]:
        """Return a line of text for each link that has just been found slow."""
        said = []
        for peer, expected in list(self._expected.items()):
            now = self._read(peer)
            before = self._last.setdefault(peer, list(now))
            known = []
            for index, (then, seen) in enumerate(zip(list(before), now)):
                if then is None or seen is None or seen.acked_bytes - then.acked_bytes >= _MIN_BYTES:
                    before[index] = seen
                    known += _speed(then, seen)
            if not known:
                continue
            better = expected.complaint(max(known), self._shared)
            self._slow[peer] = self._slow.get(peer, 0) + 1 if better else 0
            if self._slow[peer] >= _LOOKS:
                del self._expected[peer]  # once for each link
                said.append(self.describe(expected, max(known), better))
        return said


def _speed(before: Optional[Counted], now: Optional[Counted]) -> List[float]:
    """Return the MB/s between two looks; empty if they say nothing about the network."""
    if before is None or now is None:
        return []
    moved, busy_us = now.acked_bytes - before.acked_bytes, now.busy_us - before.busy_us
    held_us = now.held_us - before.held_us
    if now.idle or not now.unsent_bytes or held_us > _MAX_HELD * busy_us:
        return []
    if moved < _FULL * now.segment_bytes * (now.segments - before.segments):
        return []
    return [max(now.rate / 1e6, moved / max(busy_us - held_us, 1))]
