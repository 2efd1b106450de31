"""Whether links keep up with what they were chosen for, from what the system counts of their connections.

Two hosts that several networks connect have chosen one of them in a moment. If the link stays far below
that, and another network would be faster, the user gets a warning that names the other one. The system
counts what a connection has sent, for how long, and whether the other end or this program held it up, so
nothing has to be measured; a rank that is late makes no link look slow.

Only a link that has more to send than it can take shows its speed. Small messages, one after another, are as
fast as both programs answer, and a busy processor makes that slow. So a look counts only if bytes
wait that the system could not send yet, and what was sent since the last one went out in full segments.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .base import Fabric
from .routes import OTHER_KIND_RATIO
from .tcp import SocketLink, tcp_info

QUARTER = 0.25
"""A link below this part of what it was chosen for is slow."""
MAX_EXPECTED_MB_PER_S = 200.0
"""Above this, processors decide how fast a link is as often as the network."""
_LOOKS = 3
_MIN_BYTES = 256 * 1024
"""Between two looks that count."""
_MAX_HELD = 0.25
_FULL = 0.5
"""Segments of at least this part of the largest size are those of long messages."""
_TCP_INFO = struct.Struct("@7xB8xI100xQ16xII4xIQQQ")
_APP_LIMITED = 1


class Expected(NamedTuple):
    """What a link was chosen for.

    Attributes:
        peer: the rank at the other end.
        mb_per_s: as measured when the job started.
        iface: this end's interface.
        others: this end's other interfaces that lead to the peer's host, and what they measured.
    """

    peer: int
    mb_per_s: float
    iface: str
    others: Tuple[Tuple[str, float], ...]

    @classmethod
    def of(cls, peer: int, route: Mapping[str, Any]) -> Optional[Expected]:
        """From a route as the rendezvous sends it; None if there was no choice."""
        measured = route.get("measured") or {}
        iface = str(route.get("own_iface", ""))
        others = tuple(sorted((name, float(speed)) for name, speed in measured.items() if name != iface))
        return cls(peer, float(measured[iface]), iface, others) if others and iface in measured else None

    def complaint(self, mb_per_s: float, shared: int = 1) -> str:
        """Return what is wrong if the link has this speed: what to use instead; empty if nothing is.

        As in the choice when the job started, the other network must be much faster than this one is now.

        Args:
            mb_per_s: what the link carries.
            shared: how many streams may share the interface at the same time.
        """
        enough = min(self.mb_per_s, MAX_EXPECTED_MB_PER_S) * QUARTER / shared
        better = [(speed, name) for name, speed in self.others if speed >= OTHER_KIND_RATIO * mb_per_s]
        return max(better)[1] if better and mb_per_s < enough else ""


class Counted(NamedTuple):
    """What the system says of a connection.

    Attributes:
        acked_bytes: have arrived at the other end.
        busy_us: for how long something was on its way.
        held_us: for how long of that the other end took nothing.
        rate: bytes per second, of what was sent last.
        idle: whether the program sent less than the connection could take then.
        unsent_bytes: wait to be sent.
        segments: sent with data in them.
        segment_bytes: in the largest.
        round_trip_us: the shortest one so far.
    """

    acked_bytes: int
    busy_us: int
    held_us: int
    rate: int
    idle: bool
    unsent_bytes: int = 0
    segments: int = 0
    segment_bytes: int = 0
    round_trip_us: int = 0


def counted(sock: socket.socket) -> Optional[Counted]:
    """The system's counters of a TCP connection; None where it has none (other systems, old kernels)."""
    info = () if sock.family == getattr(socket, "AF_UNIX", None) else tcp_info(sock, _TCP_INFO)
    if not info:
        return None
    flags, largest, acked, unsent, trip_us, segments, rate, busy_us, held_us = info
    idle = bool(flags & _APP_LIMITED)
    return Counted(acked, busy_us, held_us, rate, idle, unsent, segments, largest, trip_us)


def delivered(fabric: Fabric) -> Dict[int, Tuple[int, float]]:
    """Return what the TCP connections of a fabric have delivered, as the system counts it.

    Returns:
        by peer, the bytes that have arrived there, and for how many seconds some were on their way while the
        other end took them. Their ratio is the speed of the link, if there was enough to send.
    """
    found = {}
    for peer in range(fabric.size):
        link = fabric.link(peer) if peer != fabric.rank else None
        seen = counted(link.sock) if isinstance(link, SocketLink) else None
        if seen is not None:
            found[peer] = seen.acked_bytes, max(0, seen.busy_us - seen.held_us) / 1e6
    return found


class Paces:
    """Looks at links from time to time, and says once of each that it is slow.

    Args:
        expected: the links between whose networks there was a choice.
        read: what the system says of the connections to a peer, always in the same order.
        describe: says that a link is slow: what was expected, its speed in MB/s, the better interface.
        shared: how many streams may share an interface at the same time.
    """

    def __init__(
        self,
        expected: Sequence[Expected],
        read: Callable[[int], Sequence[Optional[Counted]]],
        describe: Callable[[Expected, float, str], str],
        shared: int = 1,
    ) -> None:
        self._expected = {item.peer: item for item in expected}
        self._read = read
        self.describe = describe
        self._shared = shared
        self._last: Dict[int, List[Optional[Counted]]] = {}
        self._slow: Dict[int, int] = {}

    def look(self) -> List[str]:
        """Return what there is to say, a line for each link."""
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
    """MB/s between two looks; empty if they say nothing about the network."""
    if before is None or now is None:
        return []
    moved, busy_us = now.acked_bytes - before.acked_bytes, now.busy_us - before.busy_us
    held_us = now.held_us - before.held_us
    if now.idle or not now.unsent_bytes or held_us > _MAX_HELD * busy_us:
        return []
    if moved < _FULL * now.segment_bytes * (now.segments - before.segments):
        return []
    return [max(now.rate / 1e6, moved / max(busy_us - held_us, 1))]
