"""Relays links between ranks of which neither can dial the other; a part of the rendezvous, which both reach.

Each of the two dials the rendezvous and asks for their link, with a tag that takes the job's key
(:class:`ringcomm.wire.auth.Admission`). Then what one sends goes to the other, unread: they authenticate each
other and encrypt from end to end, as on a connection of their own. The relay dials nothing. It connects only
ranks for which the rendezvous has no other route, each link once, and holds at most :data:`PIECE_BYTES` for
an end that does not read: meanwhile it does not read from the other one either.
"""

from __future__ import annotations

import logging
import resource
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Callable, Dict

from ..transport.connect import keep_open
from ..transport.reactor import READ, WRITE, Reactor
from ..wire.auth import Claim, Purpose
from .membership import RelayHost

logger = logging.getLogger("ringcomm.rendezvous")

PIECE_BYTES = 256 * 1024
WAIT_S = 10.0  # one end waits for the other as long as ranks try to build their links
SPARE_FILES = 128  # descriptors that the process needs for other things
_LINKS = (Purpose.DIRECT, Purpose.BACKGROUND, Purpose.ENGINE_CONTROL)


def relay_here() -> RelayHost:
    """Return this host as one that relays: two descriptors for each of a pair's links."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors - SPARE_FILES
    return socket.gethostname(), max(0, most // (2 * len(_LINKS)))


class Relay:
    """The relayed links of one job, as far as ``allows`` permits; ``report`` gets a line at their end."""

    def __init__(
        self, reactor: Reactor, allows: Callable[[Claim], bool], report: Callable[[str], None]
    ) -> None:
        self._reactor, self._allows, self._report = reactor, allows, report
        self._waiting: Dict[Claim, socket.socket] = {}  # by the claim of the end that has come
        self._splices: Dict[Claim, Splice] = {}  # by the claim of the lower rank
        self._links = self._bytes = 0  # that have ended

    def take(self, sock: socket.socket, claim: Claim) -> None:
        """Connect one end of a link with the other, as soon as that has come."""
        if claim.purpose not in _LINKS or claim.source == claim.target or not self._allows(claim):
            logger.info("refused to relay between rank %d and rank %d", claim.source, claim.target)
            sock.close()
            return
        mirrored = claim._replace(source=claim.target, target=claim.source)
        link = min(claim, mirrored)
        self._drop(lambda old: old == claim or (old.job == claim.job and old.generation < claim.generation))
        if link in self._splices:
            self._splices[link].close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_open(sock)
        other = self._waiting.pop(mirrored, None)
        if other is None:
            self._waiting[claim] = sock
            self._reactor.after(WAIT_S, partial(self._give_up, claim, sock))
            return
        self._splices[link] = Splice(self._reactor, sock, other, partial(self._ended, link))

    def _give_up(self, claim: Claim, sock: socket.socket) -> None:
        if self._waiting.get(claim) is sock:
            self._waiting.pop(claim).close()

    def _drop(self, outdated: Callable[[Claim], bool]) -> None:
        """Close the links, and the ends that wait, with such claims."""
        for claim in [claim for claim in self._waiting if outdated(claim)]:
            self._waiting.pop(claim).close()
        for claim in [claim for claim in self._splices if outdated(claim)]:
            self._splices[claim].close()

    def _ended(self, link: Claim) -> None:
        self._links += 1
        self._bytes += self._splices.pop(link).bytes
        if not self._splices:
            self._report(f"relayed {self._bytes / 1e6:.1f} MB over {self._links} connections between ranks")

    def close(self) -> None:
        """Close all connections."""
        self._drop(lambda _: True)


@dataclass
class _End:
    sock: socket.socket
    held: memoryview = memoryview(b"")  # from the other end, not sent to this one yet
    sends: bool = True  # more may come from it
    shut: bool = False  # it knows that nothing more will come to it


class Splice:
    """Two connections, of which each one's bytes go to the other. ``ended`` is called once."""

    def __init__(
        self, reactor: Reactor, one: socket.socket, other: socket.socket, ended: Callable[[], None]
    ) -> None:
        self.bytes = 0
        self._reactor, self._ended = reactor, ended
        self._ends = (_End(one), _End(other))
        self._watch()

    def _turn(self) -> None:
        one, other = self._ends
        self._move(one, other)
        self._move(other, one)
        if any(end.sends or end.held for end in self._ends):
            self._watch()
        else:
            self.close()

    def _move(self, source: _End, sink: _End) -> None:
        """Pass on what can be passed on now: at most one piece, so that other connections get their turn."""
        try:
            if source.sends and not sink.held:
                sink.held = memoryview(source.sock.recv(PIECE_BYTES))
                self.bytes += len(sink.held)
                source.sends = bool(sink.held)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            source.sends = False
        try:
            if sink.held:
                sink.held = sink.held[sink.sock.send(sink.held) :]
            if not source.sends and not sink.held and not sink.shut:
                sink.shut = True
                sink.sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # it is gone, so that nothing can be sent to it
            sink.held, source.sends = memoryview(b""), False

    def _watch(self) -> None:
        for end, other in (self._ends, self._ends[::-1]):
            events = (READ if end.sends and not other.held else 0) | (WRITE if end.held else 0)
            self._reactor.watch(end.sock, events, self._turn)

    def close(self) -> None:
        """Close both connections."""
        for end in self._ends:
            self._reactor.forget(end.sock)
            end.sock.close()
        self._ended()
