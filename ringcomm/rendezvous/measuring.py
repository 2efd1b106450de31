"""Measures all wires between two hosts at the same time, in both directions.

At the same time, because then any other load of the processors affects all of them alike, and because the
fast one's end shows how long it is worth measuring the others. A :class:`Race` begins, an :class:`Echo`
answers; both ends send by a :class:`Stream`. A :class:`Meter` estimates the speed of one direction from the
bytes received over time; it is pure.

Shapers and access points let a burst pass at full speed (a token bucket: up to a megabyte) before their limit
shows. So only later bytes count, by the clock of the receiving side: a sender only sees its own buffers fill.
Only a fast wire looks fast, while a busy machine makes it look slow for moments; so the best of several
windows counts.
"""

from __future__ import annotations

import logging
import socket
import struct
from functools import partial
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..clock import monotonic
from ..errors import ProtocolError
from ..transport.connect import Dial
from ..transport.reactor import READ, WRITE, Encryption, Reactor
from ..wire.auth import Claim, Session
from ..wire.messages import MessageReader, encode

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

BLOCK = struct.Struct("!QQI")
"""Ahead of a block: bytes received here, microseconds until the last of them, and the block's length."""
BLOCK_BYTES = 32 * 1024
READ_BYTES = 1024 * 1024
"""The size of a system's receive buffer: one read takes all received bytes."""
_QUEUE_BYTES = 128 * 1024
ECHO_LIMIT_BYTES = 4096
_DIAL_S = 1.5
_LOOK_S = 0.01


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


class Stream:
    """One end of a measured connection: sends :data:`LIMIT_BYTES` in blocks, as fast as it can; each block
    reports how much has been received here, and when. ``ready`` is called when :meth:`turn` can do something.
    """

    def __init__(self, reactor: Reactor, sock: socket.socket, start_s: float, ready: Callable[[], None]):
        self.there, self.back = Meter(start_s), Meter(start_s)
        self._reactor, self._sock, self._ready = reactor, sock, ready
        self._start_s = self._received_s = start_s
        self._sent = self._received = self._reported = 0
        self._unsent = memoryview(b"")
        self._head = bytearray()
        self._block = 0  # bytes of the present block that have not arrived
        # Reports arrive soon, and few bytes are sent in vain, if the send buffer is small.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        reactor.watch(sock, READ | WRITE, ready)

    def turn(self) -> None:
        """Receive and send what is possible without waiting; OSError or ProtocolError if the wire breaks."""
        for move in (self._read, self._write):
            try:
                move()
            except (BlockingIOError, InterruptedError):
                continue

    def _read(self) -> None:
        data = self._sock.recv(READ_BYTES)
        if not data:
            raise ConnectionError("it closed the connection")
        position = 0
        while position < len(data):
            arrived = min(self._block, len(data) - position)
            self._block -= arrived
            self._received += arrived
            position += arrived
            head = data[position : position + BLOCK.size - len(self._head)] if not self._block else b""
            position += len(head)
            self._head += head
            if len(self._head) == BLOCK.size:
                total, passed_us, self._block = BLOCK.unpack(self._head)
                self._head.clear()
                if total > self._sent or passed_us > 1e9:
                    raise ProtocolError("it has received more than was sent")
                if self._received + self._block > LIMIT_BYTES:
                    raise ProtocolError("it sends more than a measurement takes")
                self.there.arrived(self._start_s + passed_us * 1e-6, total)
        self._received_s = monotonic()
        self.back.arrived(self._received_s, self._received)

    def _write(self) -> None:
        if not self._unsent:
            size = min(BLOCK_BYTES, LIMIT_BYTES - self._sent)
            if not size and self._reported == self._received:
                self._reactor.watch(self._sock, READ, self._ready)
                return
            self._reported, self._sent = self._received, self._sent + size
            passed_us = int((self._received_s - self._start_s) * 1e6)
            self._unsent = memoryview(BLOCK.pack(self._received, passed_us, size) + bytes(size))
        self._reactor.watch(self._sock, READ | WRITE, self._ready)
        self._unsent = self._unsent[self._sock.send(self._unsent) :]


class Echo:
    """Sends the rank of this process; measures the wire as soon as the other end sends the first block."""

    def __init__(
        self, reactor: Reactor, sock: socket.socket, session: Session, rank: int,
        ended: Callable[[Echo], None],
    ) -> None:  # fmt: skip
        self.sock = sock
        self._reactor, self._ended = reactor, ended
        self._stream: Optional[Stream] = None
        send_rank(sock, session, rank)
        reactor.watch(sock, READ, self._ready)

    def _ready(self) -> None:
        try:
            if self._stream is None:
                self._stream = Stream(self._reactor, self.sock, monotonic(), self._ready)
            self._stream.turn()
        except (OSError, ProtocolError) as problem:
            logger.debug("probe connection closed: %s", problem)
            self._ended(self)


def send_rank(sock: socket.socket, session: Session, rank: int) -> bool:
    """Send the rank of this process to the dialling one; return whether the connection still stands."""
    try:
        sock.send(encode({"type": "echo", "rank": rank}, session))
    except OSError as problem:
        logger.debug("a connection to rank %d ended early: %s", rank, problem)
        return False
    return True


def await_echo(
    reactor: Reactor, sock: socket.socket, session: Session, rank: int, confirmed: Callable[[], None],
    failed: Callable[[str], None],
) -> None:  # fmt: skip
    """Wait, after dialling, until the other end confirms that it is this rank; the socket stays open."""
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
        self, reactor: Reactor, key: bytes, claim: Claim, wires: Sequence[Mapping[str, Any]],
        finished: Callable[[List[Optional[WireSpeed]]], None], encryption: Optional[Encryption] = None,
    ) -> None:  # fmt: skip
        self._reactor, self._target, self._finished = reactor, claim.target, finished
        self._over = False
        self._start_s = 0.0
        self._one_done_s: Optional[float] = None  # when enough was known of the first wire
        self._unsettled = len(wires)
        self._runners = [_Runner() for _ in wires]
        for runner, wire in zip(self._runners, wires):
            address = (str(wire["address"]), int(wire["port"]))
            proven = partial(self._proven, runner)
            Dial(reactor, address, key, claim, proven, _DIAL_S, int(wire["scope"]), encryption)

    def _proven(self, runner: _Runner, dial: Dial) -> None:
        """Take the result of a handshake."""
        runner.sock = dial.sock
        if self._over:
            self._hang_up(runner)
        elif dial.sock is None:
            self._drop(runner, dial.reason)
        else:
            drop = partial(self._drop, runner)
            await_echo(self._reactor, dial.sock, dial.session, self._target, self._settle, drop)

    def _drop(self, runner: _Runner, why: str) -> None:
        logger.info("a wire to rank %d could not be measured: %s", self._target, why)
        self._hang_up(runner)
        if runner.stream is None:
            self._settle()

    def _settle(self) -> None:
        """Start when all wires are ready or have broken."""
        self._unsettled -= 1
        if self._unsettled or self._over:
            return
        self._start_s = monotonic()
        for runner in self._runners:
            if runner.sock is not None:
                turn = partial(self._turn, runner)
                runner.stream = Stream(self._reactor, runner.sock, self._start_s, turn)
        self._look()

    def _turn(self, runner: _Runner) -> None:
        assert runner.stream is not None
        try:
            runner.stream.turn()
        except (OSError, ProtocolError) as problem:
            self._drop(runner, str(problem))

    def _look(self) -> None:
        if self._over:
            return
        now_s = monotonic()
        done = [item.done(now_s) for item in self._runners if item.sock is not None]
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

    def _hang_up(self, runner: _Runner) -> None:
        """Close a connection at once: unsent bytes would only keep a slow wire busy."""
        sock, runner.sock = runner.sock, None
        if sock is not None:
            self._reactor.forget(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    def close(self) -> None:
        """End the measurement; ``finished`` is not called any more."""
        self._over = True
        for runner in self._runners:
            self._hang_up(runner)


class _Runner:
    """One wire in a race."""

    sock: Optional[socket.socket] = None  # none before the handshake, and once it is broken
    stream: Optional[Stream] = None

    def done(self, now_s: float) -> bool:
        """Return whether enough is known of both directions."""
        return self.stream is not None and self.stream.there.done(now_s) and self.stream.back.done(now_s)

    def speed(self, now_s: float) -> Optional[WireSpeed]:
        """Return the results so far; None if the wire broke."""
        if self.sock is None or self.stream is None:
            return None
        return WireSpeed(self.stream.there.rate(now_s) / 1e6, self.stream.back.rate(now_s) / 1e6)
