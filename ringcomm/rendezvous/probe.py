"""Probing: which address leads to which rank, and how fast.

A probe dials one address of another host's first rank. Whoever proves to be in the same job and
says that it is that rank has shown that the address really leads there. If several do, each is
measured: blocks of doubling size, every one acknowledged, for some 40 ms (up to 0.4 s on slow wires).
"""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any, Callable, Dict, Optional, Sequence

from ..clock import monotonic
from ..errors import ProtocolError
from ..transport.connect import Dial
from ..transport.nics import Interface, interface_of
from ..transport.reactor import READ, WRITE, Reactor
from ..transport.routes import Attempt, is_virtual
from ..transport.secure import Encryption
from ..wire.auth import Claim, Purpose
from ..wire.messages import Message, MessageReader, encode
from ..wire.signing import Session

logger = logging.getLogger("ringcomm.rendezvous")

PROBE_S = 3.0
"""How long the slowest address may take to answer."""
ECHO_LIMIT_BYTES = 4096
_BLOCK = struct.Struct("!I")
_FIRST_BLOCK_BYTES = 16 * 1024
_LAST_BLOCK_BYTES = 1024 * 1024
_STEADY_BLOCK_BYTES = 128 * 1024
"""Smaller blocks fit into a shaper's burst or a switch's buffer and say nothing about the wire."""
_MEASURE_S = 0.04
_MEASURE_AT_MOST_S = 0.4


class Echo:
    """The answering side of a probe: says which rank this is, then acknowledges blocks."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        session: Session,
        rank: int,
        ended: Callable[[Echo], None],
    ) -> None:
        self.sock = sock
        self._ended = ended
        self._head = bytearray()
        self._left = 0
        try:
            sock.send(encode({"type": "echo", "rank": rank}, session))
        except OSError as problem:
            logger.debug("a probe ended early: %s", problem)
        reactor.watch(sock, READ, self._readable)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(262144)
            if not data:
                raise ConnectionError("the probe is over")
            self._count(data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            logger.debug("probe connection closed: %s", problem)
            self._ended(self)

    def _count(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            if self._left == 0:
                take = _BLOCK.size - len(self._head)
                self._head += data[position : position + take]
                position += take
                if len(self._head) < _BLOCK.size:
                    return
                (self._left,) = _BLOCK.unpack(self._head)
                self._head.clear()
                if not 0 < self._left <= _LAST_BLOCK_BYTES:
                    raise ConnectionError("a block of impossible size")
            taken = min(self._left, len(data) - position)
            self._left -= taken
            position += taken
            if self._left == 0:
                self.sock.send(b"\x06")


class Probe:
    """The asking side of a probe: dials one address and sees who is there.

    Args:
        claim: who asks, and which rank it looks for.
        offer: the address, as that rank offered it.
        scope: by which interface to go, for link-local addresses.
        interfaces: this machine's addresses that may be used.
        settled: called when it is known what became of the attempt.
        encryption: see :class:`~ringcomm.transport.connect.Dial`.
    """

    def __init__(
        self,
        reactor: Reactor,
        key: bytes,
        claim: Claim,
        offer: Dict[str, Any],
        scope: int,
        interfaces: Sequence[Interface],
        settled: Callable[[], None],
        encryption: Optional[Encryption] = None,
    ) -> None:
        self.target = claim.target
        self.why: Optional[str] = None
        self._reactor = reactor
        self._source = claim.source
        self._offer = offer
        self._interfaces = interfaces
        self._settled = settled
        self._measured: Callable[[Probe], None] = lambda probe: None
        self._local = ""
        self._mb_per_s: Optional[float] = None
        self._reader: Optional[MessageReader] = None
        self._block = _FIRST_BLOCK_BYTES
        self._unsent = memoryview(b"")
        self._sent_at_s = self._since_s = 0.0
        address = (str(offer["address"]), int(offer["port"]))
        self._dial = Dial(
            reactor,
            address,
            key,
            claim._replace(purpose=Purpose.PROBE),
            self._proven,
            PROBE_S,
            scope,
            encryption,
        )

    @property
    def _sock(self) -> socket.socket:
        assert self._dial.sock is not None
        return self._dial.sock

    def _proven(self, dial: Dial) -> None:
        if dial.sock is None:
            self._settle(dial.reason)
        else:
            self._reader = MessageReader(ECHO_LIMIT_BYTES, dial.session)
            self._reactor.watch(dial.sock, READ, self._readable)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(ECHO_LIMIT_BYTES)
            if not data:
                raise ConnectionError("it closed the connection")
            assert self._reader is not None
            for message in self._reader.feed(data):
                check_echo(message, self.target)
                self._local = str(self._sock.getsockname()[0]).split("%")[0]
                iface = interface_of(self._local, self._interfaces)
                self._settle("" if iface != "?" else f"it goes out by {self._local}, which --iface excludes")
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            self._settle(str(problem))

    def _settle(self, why: str) -> None:
        if self.why is not None:
            return
        self.why = why
        if self._dial.sock is not None:
            self._reactor.forget(self._sock)
        self._settled()

    def give_up(self, why: str) -> None:
        """Stop waiting for an answer."""
        self._dial.give_up(why)
        self._settle(why)

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._dial.give_up("the probe is over")
        if self._dial.sock is not None:
            self._reactor.forget(self._sock)
            self._sock.close()

    def attempt(self) -> Attempt:
        """What became of it."""
        local = next((item for item in self._interfaces if item.address == self._local), None)
        return Attempt(
            source=self._source,
            target=self.target,
            address=str(self._offer["address"]),
            port=int(self._offer["port"]),
            local=self._local,
            local_iface=local.name if local else "?",
            remote_iface=str(self._offer.get("iface", "?")),
            virtual=is_virtual(local.kind if local else "", str(self._offer.get("kind", ""))),
            why=self.why or "",
            mb_per_s=self._mb_per_s,
        )

    def measure(self, measured: Callable[[Probe], None]) -> None:
        """Find out how fast the address is; ``measured`` is called when that is known."""
        self._measured = measured
        self._since_s = monotonic()
        self._send_block()

    def _send_block(self) -> None:
        self._sent_at_s = monotonic()
        self._unsent = memoryview(_BLOCK.pack(self._block) + bytes(self._block))
        self._reactor.watch(self._sock, READ | WRITE, self._measuring)

    def _measuring(self) -> None:
        try:
            if self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
                if not self._unsent:
                    self._reactor.watch(self._sock, READ, self._measuring)
                return
            if not self._sock.recv(1):
                raise ConnectionError("it closed the connection")
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            self.why = f"it broke while its speed was measured: {problem}"
            self._end_measuring()
            return
        now = monotonic()
        elapsed_s = now - self._since_s
        speed = self._block / max(now - self._sent_at_s, 1e-6) / 1e6
        steady = self._block >= _STEADY_BLOCK_BYTES
        # The best steady block: a busy machine makes some slow, nothing makes one fast.
        self._mb_per_s = max(speed, self._mb_per_s or 0.0) if self._block > _STEADY_BLOCK_BYTES else speed
        enough = elapsed_s >= _MEASURE_S and steady
        if enough or elapsed_s >= _MEASURE_AT_MOST_S or self._block >= _LAST_BLOCK_BYTES:
            self._end_measuring()
        else:
            self._block *= 2
            self._send_block()

    def _end_measuring(self) -> None:
        self._reactor.forget(self._sock)
        self._measured(self)


def check_echo(message: Message, rank: int) -> None:
    """Raise ConnectionError unless the message says that this very rank is there."""
    if message["type"] != "echo" or message["rank"] != rank:
        raise ConnectionError(f"rank {message.get('rank')} answered there, not rank {rank}")
