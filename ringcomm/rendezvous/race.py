"""Measures all wires between two hosts at the same time, in both directions.

At the same time, because then any other load of the processors affects all of them alike, and because the
fast one's end shows how long it is worth measuring the others. See :mod:`.meter` for the bytes that count.
"""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..clock import monotonic
from ..errors import ProtocolError
from ..transport.connect import Dial
from ..transport.pace import counted
from ..transport.reactor import READ, WRITE, Reactor
from ..transport.secure import Encryption
from ..wire.auth import Claim
from .echo import BLOCK, READ_BYTES, REQUEST, acknowledged, await_echo, keep_queue_short
from .meter import LIMIT_BYTES, MAX_S, MIN_S, Lap, Meter, is_over

logger = logging.getLogger("ringcomm.rendezvous")

_DIAL_S = 1.5
_LOOK_S = 0.01
_FILLER = memoryview(bytes(64 * 1024))


class WireSpeed(NamedTuple):
    """The measured speed of one wire, from and to the rank that dialled, both at the same time."""

    there_mb_per_s: float
    back_mb_per_s: float
    round_trip_ms: Optional[float]  # the shortest before, by the system's count; None without one

    @property
    def mb_per_s(self) -> float:
        """Return the speed of the slower direction."""
        return min(self.there_mb_per_s, self.back_mb_per_s)


class Race:
    """One measurement of several wires to one rank. ``wires``: each with ``address`` and ``port``, link-local
    ones with their ``scope``; ``finished`` is called once, with the speed of each wire, None for one that
    broke; ``one_way``: only the other end sends, and both speeds are of its direction.
    """

    def __init__(
        self,
        reactor: Reactor,
        key: bytes,
        claim: Claim,
        wires: Sequence[Mapping[str, Any]],
        finished: Callable[[List[Optional[WireSpeed]]], None],
        encryption: Optional[Encryption] = None,
        one_way: bool = False,
    ) -> None:
        self._reactor = reactor
        self._finished = finished
        self._over = False
        self._start_s: Optional[float] = None
        self._due_s = 0.0  # when to look next
        self._runners = [_Runner(reactor, claim.target, self._ready, one_way) for _ in wires]
        for runner, wire in zip(self._runners, wires):
            address = (str(wire["address"]), int(wire["port"]))
            Dial(reactor, address, key, claim, runner.proven, _DIAL_S, int(wire["scope"]), encryption)

    def _ready(self) -> None:
        """Start when all runners are ready or have dropped out."""
        if self._over or self._start_s is not None or not all(item.settled for item in self._runners):
            return
        self._start_s = self._due_s = monotonic()
        for runner in self._runners:
            runner.start(self._start_s)
        self._look()

    def _look(self) -> None:
        if self._over:
            return
        assert self._start_s is not None
        now_s = monotonic()
        late = now_s - self._due_s > _LOOK_S
        for runner in self._runners:
            runner.ask_system()
        laps = [runner.lap for runner in self._runners if runner.lap is not None]
        elapsed_s = now_s - self._start_s
        if elapsed_s < MAX_S and (late or not is_over(laps, elapsed_s, now_s)):
            # After a time without a processor, first read and send what could not be meanwhile.
            wait_s = _LOOK_S if elapsed_s < 2 * MIN_S else 2 * _LOOK_S
            self._due_s = now_s + wait_s
            self._reactor.after(wait_s, self._look)
            return
        results = [item.speed(now_s) for item in self._runners]
        self.close()
        told = ", ".join("broken" if found is None else f"{found.mb_per_s:.1f} MB/s" for found in results)
        logger.debug("measured in %.3f s: %s", elapsed_s, told)
        self._finished(results)

    def close(self) -> None:
        """End the measurement; ``finished`` is not called any more."""
        self._over = True
        for runner in self._runners:
            runner.close()


class _Runner:
    """One wire in a race: the asking side of its connection."""

    def __init__(
        self, reactor: Reactor, target: int, settled: Callable[[], None], one_way: bool
    ) -> None:
        self._limit_bytes = 0 if one_way else LIMIT_BYTES
        self.settled = False
        self.lap: Optional[Lap] = None
        self._reactor = reactor
        self._target = target
        self._settled = settled
        self._closed = False
        self._sock: Optional[socket.socket] = None
        self._unsent: List[memoryview] = []
        self._head = bytearray()
        self._filler = self._received = self._sent = 0
        self._start_s = 0.0
        self._round_trip_ms: Optional[float] = None

    def proven(self, dial: Dial) -> None:
        """Take the result of the handshake."""
        if dial.sock is None:
            self._drop_out(dial.reason)
        elif self._closed:
            dial.sock.close()
        else:
            self._sock = dial.sock
            await_echo(
                self._reactor, dial.sock, dial.session, self._target, self._at_start, self._drop_out
            )

    def _at_start(self) -> None:
        self.settled = True
        self._settled()

    def _drop_out(self, why: str) -> None:
        logger.info("a wire to rank %d could not be measured: %s", self._target, why)
        self.close()
        self.lap = None
        self._at_start()

    def start(self, start_s: float) -> None:
        """Start to send, and to count received bytes."""
        if self._sock is None:
            return
        self._start_s = start_s
        seen = counted(self._sock)
        self._round_trip_ms = seen.round_trip_us / 1e3 if seen is not None else None
        back = Meter(start_s)
        self.lap = Lap(Meter(start_s) if self._limit_bytes else back, back)
        self._unsent = [memoryview(REQUEST.pack(LIMIT_BYTES))]
        keep_queue_short(self._sock)
        self._reactor.watch(self._sock, READ | WRITE, self._run)

    def speed(self, now_s: float) -> Optional[WireSpeed]:
        """Return the results so far."""
        if self.lap is None:
            return None
        there, back = (meter.rate(now_s) / 1e6 for meter in self.lap)
        return WireSpeed(there, back, self._round_trip_ms)

    def _run(self) -> None:
        assert self._sock is not None
        try:
            self._read(self._sock)
            self._write(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            self._drop_out(str(problem))

    def _write(self, sock: socket.socket) -> None:
        if not self._unsent:
            size = min(len(_FILLER), self._limit_bytes - self._sent)
            if not size:
                self._reactor.watch(sock, READ, self._run)
                return
            self._sent += size
            self._unsent = [_FILLER[:size]]
        rest = self._unsent[0][sock.send(self._unsent[0]) :]
        self._unsent = [rest] if rest else []

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionError("it closed the connection")
        assert self.lap is not None
        self._received += len(data)
        self.lap.back.arrived(monotonic(), self._received)
        for total, passed_us, acked, active_us, rate, _ in self._heads(data):
            if total > self._sent or passed_us > 1e9:
                raise ProtocolError("it has received more than was sent")
            if self._limit_bytes:
                self.lap.there.arrived(self._start_s + passed_us * 1e-6, total)
            self.lap.back.told(acked, active_us, rate)
        self.ask_system()

    def ask_system(self) -> None:
        """Note the acknowledged bytes: if the other end does not run, its system still acknowledges."""
        if self._sock is not None and self.lap is not None and self._limit_bytes:
            self.lap.there.told(*acknowledged(self._sock))

    def _heads(self, data: bytes) -> List[Tuple[int, ...]]:
        """Return the headers of the blocks that begin in these bytes."""
        found: List[Tuple[int, ...]] = []
        position = 0
        while position < len(data):
            skipped = min(self._filler, len(data) - position)
            self._filler -= skipped
            position += skipped
            head = data[position : position + BLOCK.size - len(self._head)] if not self._filler else b""
            position += len(head)
            self._head += head
            if len(self._head) == BLOCK.size:
                found.append(BLOCK.unpack(self._head))
                self._filler = found[-1][-1]
                self._head.clear()
        return found

    def close(self) -> None:
        """Hang up at once: unsent bytes would only keep a slow wire busy."""
        self._closed = True
        if self._sock is not None:
            self._reactor.forget(self._sock)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._sock.close()
            self._sock = None
