"""Measures all wires between two hosts at the same time, in both directions.

At the same time, because then any other load of the processors affects all of them alike, and because the
fast one's end shows how long it is worth measuring the others. A :class:`Race` asks, an :class:`Echo` answers
and a :class:`Meter` estimates the speed of one direction from the bytes received over time; it is pure.

Shapers and access points let a burst pass at full speed (a token bucket: up to a megabyte) before their limit
shows. So only later bytes count, by the clock of the receiving side: a sender only sees its own buffers fill.
Only a fast wire looks fast, while a busy machine makes it look slow for moments; so the best of several
windows counts.
"""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..clock import monotonic
from ..errors import ProtocolError
from ..transport.connect import Dial
from ..transport.reactor import READ, WRITE, Encryption, Reactor
from ..wire.auth import Claim
from ..wire.messages import MessageReader, encode
from ..wire.signing import Session

logger = logging.getLogger("ringcomm.rendezvous")

BURST_BYTES = 1088 * 1024
"""Bytes that a bucket of 1 MiB lets pass, and some more: it is refilled meanwhile."""
TAIL_BYTES = 2 * 1024 * 1024
"""After the burst, a fast wire is measured over this many bytes more;"""
TAIL_S = 0.06
"""a slow one is measured for this long."""
LIMIT_BYTES = BURST_BYTES + TAIL_BYTES
"""More is never sent in one measurement, each way."""
OTHERS_S = 0.1
"""When enough is known of one wire, the others are measured for this long at most,"""
MAX_S = 0.7
"""and no measurement takes longer than this: on a busy machine nothing may be known by then."""
_WINDOW_BYTES = 256 * 1024
_WINDOW_S = 0.02
_PACKET_BYTES = 64 * 1024
"""Within a machine, and from a shaper, segments arrive in pieces of this size."""

REQUEST = struct.Struct("!I")
"""The most bytes that each side may send."""
BLOCK = struct.Struct("!QQI")
"""Bytes received here; microseconds until the last of them; and the number of bytes that follow."""
BLOCK_BYTES = 32 * 1024
READ_BYTES = 1024 * 1024
"""The size of a system's receive buffer: one read takes all received bytes."""
_QUEUE_BYTES = 128 * 1024
ECHO_LIMIT_BYTES = 4096
_DIAL_S = 1.5
_LOOK_S = 0.01
_FILLER = memoryview(bytes(64 * 1024))


class Meter:
    """One direction of a wire. Times are seconds of one clock, counts are bytes since the start."""

    def __init__(self, start_s: float) -> None:
        self._points: List[Tuple[float, int]] = [(start_s, 0)]
        self._tail: Optional[int] = None  # index of the first point behind the burst

    def arrived(self, now_s: float, total: int) -> None:
        """Note the bytes received by now; all earlier ones must have been reported before."""
        self._points.append((max(now_s, self._points[-1][0]), total))
        if self._tail is None and total >= BURST_BYTES:
            self._tail = len(self._points) - 1

    def done(self, now_s: float) -> bool:
        """Return whether enough is known."""
        if self._tail is None:
            return False
        since_s, before = self._points[self._tail]
        total = self._points[-1][1]
        return total >= LIMIT_BYTES or total - before >= TAIL_BYTES or now_s - since_s >= TAIL_S

    def rate(self, now_s: float) -> float:
        """Return its sustained speed, in bytes per second, as far as it is known."""
        if self._tail is not None:
            return self._best_window(self._tail, now_s)
        half_s = (self._points[0][0] + now_s) / 2  # what comes until then may be a burst
        from_s, before = max(point for point in self._points if point[0] <= half_s)
        total = self._points[-1][1]
        # If nothing has arrived, one packet may be in flight all the time: a slow wire is not dead.
        return max(total - before, min(total, _PACKET_BYTES)) / max(now_s - from_s, 1e-6)

    def _best_window(self, tail: int, now_s: float) -> float:
        """Return the best rate of the parts behind the burst that are long enough to count."""
        best = 0.0
        from_s, before = self._points[tail]
        for at_s, total in [*self._points[tail + 1 :], (now_s, self._points[-1][1])]:
            if total - before >= _WINDOW_BYTES or at_s - from_s >= _WINDOW_S:
                best = max(best, (total - before) / max(at_s - from_s, 1e-6))
                from_s, before = at_s, total
        return best


class Echo:
    """Sends the rank of this process. On request it then sends blocks of data as fast as it can; each block
    reports how much has been received here, and when.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        session: Session,
        rank: int,
        ended: Callable[[Echo], None],
    ) -> None:
        self.sock = sock
        self._reactor = reactor
        self._ended = ended
        self._head = bytearray()
        self._limit = self._sent = self._received = self._reported = 0
        self._start_s = self._received_s = 0.0
        self._unsent = memoryview(b"")
        send_rank(sock, session, rank)
        reactor.watch(sock, READ, self._ready)

    def _ready(self) -> None:
        try:
            self._read()
            if self._limit:
                self._write()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            logger.debug("probe connection closed: %s", problem)
            self._ended(self)

    def _read(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES if self._limit else REQUEST.size - len(self._head))
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionError("the probe is over")
        if self._limit:
            self._received += len(data)
            self._received_s = monotonic()
            if self._received > self._limit:
                raise ConnectionError("more than was announced")
            return
        self._head += data
        if len(self._head) == REQUEST.size:
            (limit,) = REQUEST.unpack(self._head)
            if not 0 < limit <= LIMIT_BYTES:
                raise ConnectionError("a measurement of impossible size")
            self._limit = limit
            self._start_s = self._received_s = monotonic()
            keep_queue_short(self.sock)

    def _write(self) -> None:
        if not self._unsent:
            size = min(BLOCK_BYTES, self._limit - self._sent)
            if not size and self._reported == self._received:
                self._reactor.watch(self.sock, READ, self._ready)
                return
            self._reported, self._sent = self._received, self._sent + size
            passed_us = int((self._received_s - self._start_s) * 1e6)
            self._unsent = memoryview(BLOCK.pack(self._received, passed_us, size) + bytes(size))
        self._reactor.watch(self.sock, READ | WRITE, self._ready)
        self._unsent = self._unsent[self.sock.send(self._unsent) :]


def keep_queue_short(sock: socket.socket) -> None:
    """Limit the send buffer, so that reports arrive soon, and few bytes are sent in vain."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)


def send_rank(sock: socket.socket, session: Session, rank: int) -> bool:
    """Send the rank of this process to the dialling one; return whether the connection still stands."""
    try:
        sock.send(encode({"type": "echo", "rank": rank}, session))
    except OSError as problem:
        logger.debug("a connection to rank %d ended early: %s", rank, problem)
        return False
    return True


def await_echo(
    reactor: Reactor,
    sock: socket.socket,
    session: Session,
    rank: int,
    confirmed: Callable[[], None],
    failed: Callable[[str], None],
) -> None:
    """Wait, after dialling, until the other end confirms that it is this rank; the socket stays open. Nothing
    can follow the confirmation before this end has sent something.
    """
    reader = MessageReader(ECHO_LIMIT_BYTES, session)

    def readable() -> None:
        try:
            data = sock.recv(ECHO_LIMIT_BYTES)
            if not data:
                raise ConnectionError("it closed the connection")
            for message in reader.feed(data):
                if message["type"] != "echo" or message["rank"] != rank:
                    raise ConnectionError(f"rank {message.get('rank')} answered there, not rank {rank}")
                reactor.forget(sock)
                confirmed()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            reactor.forget(sock)
            failed(str(problem))

    reactor.watch(sock, READ, readable)


class WireSpeed(NamedTuple):
    """The measured speed of one wire, from and to the rank that dialled, both at the same time."""

    there_mb_per_s: float
    back_mb_per_s: float

    @property
    def mb_per_s(self) -> float:
        """Return the speed of the slower direction."""
        return min(self.there_mb_per_s, self.back_mb_per_s)


class Race:
    """One measurement of several wires to one rank. ``wires``: each with ``address`` and ``port``, link-local
    ones with their ``scope``; ``finished`` is called once, with the speed of each wire, None for one that
    broke.
    """

    def __init__(
        self,
        reactor: Reactor,
        key: bytes,
        claim: Claim,
        wires: Sequence[Mapping[str, Any]],
        finished: Callable[[List[Optional[WireSpeed]]], None],
        encryption: Optional[Encryption] = None,
    ) -> None:
        self._reactor = reactor
        self._finished = finished
        self._over = False
        self._start_s = 0.0
        self._one_done_s: Optional[float] = None  # when enough was known of the first wire
        self._runners = [_Runner(reactor, claim.target, self._ready) for _ in wires]
        for runner, wire in zip(self._runners, wires):
            address = (str(wire["address"]), int(wire["port"]))
            Dial(reactor, address, key, claim, runner.proven, _DIAL_S, int(wire["scope"]), encryption)

    def _ready(self) -> None:
        """Start when all runners are ready or have dropped out."""
        if self._over or self._start_s or not all(item.settled for item in self._runners):
            return
        self._start_s = monotonic()
        for runner in self._runners:
            runner.start(self._start_s)
        self._look()

    def _look(self) -> None:
        if self._over:
            return
        now_s = monotonic()
        running = [item for item in self._runners if item.sock is not None]
        done = [item.done(now_s) for item in running]
        if any(done) and self._one_done_s is None:
            self._one_done_s = now_s
        waited_enough = self._one_done_s is not None and now_s - self._one_done_s >= OTHERS_S
        if not all(done) and not waited_enough and now_s - self._start_s < MAX_S:
            self._reactor.after(_LOOK_S, self._look)
            return
        results = [item.speed(now_s) for item in self._runners]
        self.close()
        told = ", ".join("broken" if found is None else f"{found.mb_per_s:.1f} MB/s" for found in results)
        logger.debug("measured in %.3f s: %s", now_s - self._start_s, told)
        self._finished(results)

    def close(self) -> None:
        """End the measurement; ``finished`` is not called any more."""
        self._over = True
        for runner in self._runners:
            runner.close()


class _Runner:
    """One wire in a race: the asking side of its connection."""

    def __init__(self, reactor: Reactor, target: int, settled: Callable[[], None]) -> None:
        self.settled = False  # it is ready to start, or has dropped out
        self.sock: Optional[socket.socket] = None
        self._there: Optional[Meter] = None
        self._back: Optional[Meter] = None
        self._reactor = reactor
        self._target = target
        self._settled = settled
        self._closed = False
        self._unsent = memoryview(b"")
        self._head = bytearray()
        self._filler = self._received = self._sent = 0
        self._start_s = 0.0

    def proven(self, dial: Dial) -> None:
        """Take the result of the handshake."""
        if dial.sock is None:
            self._drop_out(dial.reason)
        elif self._closed:
            dial.sock.close()
        else:
            self.sock = dial.sock
            await_echo(self._reactor, dial.sock, dial.session, self._target, self._at_start, self._drop_out)

    def _at_start(self) -> None:
        self.settled = True
        self._settled()

    def _drop_out(self, why: str) -> None:
        logger.info("a wire to rank %d could not be measured: %s", self._target, why)
        self.close()
        self._at_start()

    def start(self, start_s: float) -> None:
        """Start to send, and to count received bytes."""
        if self.sock is None:
            return
        self._start_s = start_s
        self._there, self._back = Meter(start_s), Meter(start_s)
        self._unsent = memoryview(REQUEST.pack(LIMIT_BYTES))
        keep_queue_short(self.sock)
        self._reactor.watch(self.sock, READ | WRITE, self._run)

    def done(self, now_s: float) -> bool:
        """Return whether enough is known of both directions."""
        return all(meter is not None and meter.done(now_s) for meter in (self._there, self._back))

    def speed(self, now_s: float) -> Optional[WireSpeed]:
        """Return the results so far; None if the wire broke."""
        if self.sock is None or self._there is None or self._back is None:
            return None
        return WireSpeed(self._there.rate(now_s) / 1e6, self._back.rate(now_s) / 1e6)

    def _run(self) -> None:
        assert self.sock is not None
        try:
            self._read(self.sock)
            self._write(self.sock)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            self._drop_out(str(problem))

    def _write(self, sock: socket.socket) -> None:
        if not self._unsent:
            size = min(len(_FILLER), LIMIT_BYTES - self._sent)
            if not size:
                self._reactor.watch(sock, READ, self._run)
                return
            self._sent += size
            self._unsent = _FILLER[:size]
        self._unsent = self._unsent[sock.send(self._unsent) :]

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionError("it closed the connection")
        assert self._there is not None and self._back is not None
        self._received += len(data)
        self._back.arrived(monotonic(), self._received)
        for total, passed_us in self._heads(data):
            if total > self._sent or passed_us > 1e9:
                raise ProtocolError("it has received more than was sent")
            self._there.arrived(self._start_s + passed_us * 1e-6, total)

    def _heads(self, data: bytes) -> List[Tuple[int, int]]:
        """Return the headers of the blocks that begin in these bytes."""
        found: List[Tuple[int, int]] = []
        position = 0
        while position < len(data):
            skipped = min(self._filler, len(data) - position)
            self._filler -= skipped
            position += skipped
            head = data[position : position + BLOCK.size - len(self._head)] if not self._filler else b""
            position += len(head)
            self._head += head
            if len(self._head) == BLOCK.size:
                total, passed_us, self._filler = BLOCK.unpack(self._head)
                found.append((total, passed_us))
                self._head.clear()
        return found

    def close(self) -> None:
        """Hang up at once: unsent bytes would only keep a slow wire busy."""
        self._closed = True
        if self.sock is not None:
            self._reactor.forget(self.sock)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()
            self.sock = None
