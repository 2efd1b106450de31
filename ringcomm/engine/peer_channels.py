"""A rank's channels to the other ranks: control messages, heartbeats, and the timeline's events.

An engine uses them besides its work. A process group of ``torch.distributed`` has nothing to match by name,
and so no engine, but its ranks freeze and lose their cables like others: it has a :class:`HeartbeatThread`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Set, Tuple

from ..clock import Clock, Deadline, monotonic
from ..collective.observe import Progress
from ..errors import BrokenInvariantError, ProtocolError, RingcommError
from ..group.failures import FailureReporter
from ..transport.base import Fabric, Link, LinkClosed, StoppableWatch, Stopped
from ..wire.messages import MAX_RESPONSES_BYTES, Message, MessageReader, body_of, framed, repeat_framed
from .failure_detector import CALLS, ENGINE, FailureDetector, ProgressReports, SilenceLimits
from .mismatch import whereabouts
from .observer import Observer, Sink, Tracing
from .stacks import main_stack

logger = logging.getLogger("ringcomm.engine")

Lost = Callable[[int, str, str], BaseException]
"""(peer, why, kind): makes the error to raise for a peer that is gone."""

_READ_BYTES = 64 * 1024
_LOOK_S = 0.002
"""How often to look whether all has been sent, at the end."""
LOOK_AGAIN_S = 0.5
"""How long after a look that has found this rank in a new direct call it looks again, in seconds."""


class ControlMessages:
    """Queues of outgoing control messages, and readers of arriving ones. No method waits.

    ``nearest`` are the peers of the negotiation: all others for rank 0, rank 0 for any other. ``gone`` has
    those whose link has ended, with the reason.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.gone: Dict[int, str] = {}
        self.nearest = frozenset(range(1, fabric.size) if fabric.rank == 0 else [0])
        self._links: Dict[int, Link] = {
            peer: fabric.link(peer) for peer in range(fabric.size) if peer != fabric.rank
        }
        self._end_found: Set[int] = set()
        self._readers = {
            peer: MessageReader(MAX_RESPONSES_BYTES, link.session, repeats=True)
            for peer, link in self._links.items()
        }
        self._unsent: Dict[int, bytearray] = {peer: bytearray() for peer in self._links}
        # Bytes that a link was given and has not accepted yet. The peer may read them in place, so they
        # must not move.
        self._given: Dict[int, memoryview] = {peer: memoryview(b"") for peer in self._links}
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def send(self, message: Message, to: Optional[int] = None) -> None:
        """Send to one peer, or to the nearest ones as far as they are still there."""
        self._send_to(message, self.nearest if to is None else (to,))

    def send_all(self, message: Message) -> None:
        """Send to every peer that is still there."""
        self._send_to(message, tuple(self._links))

    def send_repeat(self, message: Message, elements: memoryview) -> None:
        """Send a message of the kind ``repeat`` and its elements to every peer that is still there."""
        for peer, link in self._links.items():
            if peer not in self._end_found:
                self._unsent[peer] += repeat_framed(message, link.session)
                self._unsent[peer] += elements
        self.flush()

    def _send_to(self, message: Message, peers: Collection[int]) -> None:
        body = body_of(message)
        for peer in peers:
            if peer in self._links and peer not in self._end_found:
                self._unsent[peer] += framed(body, self._links[peer].session)
        self.flush()

    def flush(self) -> None:
        """Give the links as many bytes as they accept now."""
        for peer, unsent in self._unsent.items():
            while unsent or self._given[peer]:
                if not self._given[peer]:
                    self._given[peer] = memoryview(bytes(unsent))
                    unsent.clear()
                try:
                    taken = self._links[peer].send([self._given[peer]])
                except LinkClosed:
                    # Receiving finds the end too, after the peer's last messages.
                    self._end_found.add(peer)
                    self._forget(peer)
                    break
                if not taken:
                    break
                self._given[peer] = self._given[peer][taken:]

    def _forget(self, peer: int) -> None:
        """Drop what is queued for the peer."""
        self._unsent[peer].clear()
        self._given[peer] = memoryview(b"")

    def has_unsent(self) -> bool:
        """Return whether the links have not taken all that was sent."""
        return any(self._unsent.values()) or any(self._given.values())

    def receive(self, all_peers: bool = True) -> List[Tuple[int, Message]]:
        """Return all messages that have arrived, each with its sender.

        ``all_peers``: read from every peer, not only from the nearest; that costs a system call per peer.
        """
        messages: List[Tuple[int, Message]] = []
        for peer, link in list(self._links.items()):
            if not all_peers and peer not in self.nearest:
                continue
            try:
                while True:
                    got = link.recv([self._buffer])
                    if not got:
                        break
                    messages += [(peer, item) for item in self._readers[peer].feed(bytes(self._buffer[:got]))]
                    if got < _READ_BYTES:
                        break
            except LinkClosed as closed:
                self.gone[peer] = closed.reason
                del self._links[peer]
                self._forget(peer)
        return messages

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """The links to wait for: (readable, writable)."""
        reading = list(self._links.values())
        unsent = [link for peer, link in self._links.items() if self._unsent[peer] or self._given[peer]]
        return reading, unsent


class PeerChannels:
    """Channels to every other rank, used by the thread that does the engine's work.

    ``waits_in``: how far this rank is in a direct call in which the last two looks have found it.
    """

    def __init__(
        self,
        fabric: Fabric,
        hosts: Sequence[str],
        limits: SilenceLimits,
        lost: Lost,
        progress: Callable[[], Tuple[Progress, Progress]],
        clock: Clock,
    ) -> None:
        self.messages = ControlMessages(fabric)
        self.tracing = Tracing(self.messages.send, fabric.rank)
        self.interval_s = limits.interval_s
        self.progress_reports = ProgressReports(fabric.rank, hosts, limits)
        self.said_goodbye: Set[int] = set()
        self._noted: Set[int] = set()
        self.lost = lost
        peers = [peer for peer in range(fabric.size) if peer != fabric.rank]
        self._rank = fabric.rank
        self._hosts = hosts
        self._detector = FailureDetector(peers, limits.dead_after_s, self.interval_s, clock())
        self._progress = progress
        self._clock = clock
        self._received: List[Tuple[int, Message]] = []
        self._awake = False
        self._next_look_s = 0.0
        self._in_call, self._looks_again = -1, False
        self.waits_in: Optional[Progress] = None

    def awake(self) -> None:
        """Messages may have arrived: the next :meth:`pulse` reads from all peers."""
        self._awake = True

    def pulse(self) -> None:
        """Exchange heartbeats and messages; also in the middle of a long transfer.

        A peer without a heartbeat for too long, or a transfer that stands still, raises.
        """
        now_s = self._clock()
        look = now_s >= self._next_look_s
        all_peers = look or self._awake
        self._awake = False
        for peer, message in self.messages.receive(all_peers):
            self._detector.received(peer, now_s)
            self._receive(peer, message, now_s)
        if look:
            self._look(now_s)

    def _receive(self, peer: int, message: Message, now_s: float) -> None:
        if message["type"] == "beat":
            self.progress_reports.report(peer, CALLS, Progress.from_json(message["calls"]), now_s)
            self.progress_reports.report(peer, ENGINE, Progress.from_json(message["engine"]), now_s)
        elif message["type"] == "bye":
            self.said_goodbye.add(peer)
        elif not self.tracing.take(peer, message):
            self._received.append((peer, message))

    def _look(self, now_s: float) -> None:
        for peer in self.messages.gone:
            self._detector.left(peer)
        calls, engine = self._progress()
        self.progress_reports.report(self._rank, CALLS, calls, now_s)
        self.progress_reports.report(self._rank, ENGINE, engine, now_s)
        if self._detector.due(now_s):
            self.messages.send_all({"type": "beat", "calls": calls.to_json(), "engine": engine.to_json()})
        self._next_look_s = now_s + min(self._detector.alarm_s(now_s), self.interval_s / 2)
        before, self._in_call = self._in_call, calls.sequence if calls.doing else -1
        self._looks_again = self._in_call not in (-1, before)
        self.waits_in = calls if self._in_call == before != -1 else None
        if self._looks_again:  # whether it waits in that call is worth a second look
            self._next_look_s = min(self._next_look_s, now_s + LOOK_AGAIN_S)
        silent = self._detector.silent(now_s)
        if silent is not None:
            raise self._silent(*silent)
        stuck = self.progress_reports.stuck(now_s)
        if stuck is not None:
            raise self.lost(stuck[0], stuck[1], "still")

    def doing(self) -> str:
        """The operation that this rank executes now, not at its last heartbeat; empty if none."""
        calls, engine = self._progress()
        if calls.doing or not engine.doing:
            return calls.describe()
        return f"{engine.doing}, {engine.moved_bytes} bytes into it"

    def _silent(self, peer: int, silent_s: float) -> BaseException:
        heard, silent = self._detector.divided(self._clock())
        kind, whose = "silent", "no heartbeat"
        why = "its process is stopped, swapped out or cut off, or a C call keeps the interpreter lock"
        if not heard and len(silent) > 1:
            kind, whose = "cut off", "no heartbeat from any rank"
            why = f"its host, {self._hosts[self._rank]}, is cut off"
        text = f"{whose} for {silent_s:.0f} s: {why} (RINGCOMM_DEAD_AFTER sets the limit)"
        return self.lost(peer, text, kind)

    def divided(self) -> Tuple[List[int], List[int]]:
        """(peers with a recent heartbeat, peers without one or with a link that ended without a goodbye)."""
        heard, silent = self._detector.divided(self._clock())
        gone: Dict[int, str] = dict(self.messages.gone)
        return heard, sorted({*silent, *(peer for peer in gone if peer not in self.said_goodbye)})

    def close(self) -> None:
        """Send a goodbye, so that no peer takes the end of the links for a failure."""
        self.messages.send_all({"type": "bye"})
        # These refer to the engine's thread and a runner, and would keep both.
        self._progress = _nowhere
        self.lost = _ended

    def settle(
        self, limit_s: float, waiting: Callable[[], Sequence[Message]], over: Callable[[], Any]
    ) -> None:
        """Wait until what this rank has to say is on its way; on rank 0, until all others have left.

        No other rank has to do anything for it, so none is held up. At most so long, and not if the thread
        that sends is over. For any thread.
        """
        deadline = Deadline(limit_s)
        while not (deadline.expired() or over() or self.settled(waiting())):
            time.sleep(_LOOK_S)

    def settled(self, waiting: Sequence[Message]) -> bool:
        """Return whether there is nothing left for which :meth:`settle` waits."""
        if self._rank == 0:
            return len(self.said_goodbye | set(self.messages.gone)) == len(self._hosts) - 1
        return not waiting and not self.messages.has_unsent()

    def note_closed(self, reporter: FailureReporter) -> None:
        """Report the links that have ended without a goodbye, each of them once."""
        for peer in set(self.messages.gone) - self.said_goodbye - self._noted:
            self._noted.add(peer)
            reporter.note_closed(peer, self.messages.gone[peer])

    def take_received(self) -> Sequence[Tuple[int, Message]]:
        """Return what has arrived for the engine itself."""
        received, self._received = self._received, []
        return received

    def alarm_s(self) -> float:
        """In how many seconds :meth:`pulse` or the timeline has something to do."""
        now_s = self._clock()
        trace_s = self.tracing.alarm_s(now_s)
        alarm_s = self._detector.alarm_s(now_s)
        if self._looks_again:
            alarm_s = min(alarm_s, max(0.0, self._next_look_s - now_s))
        return alarm_s if trace_s is None else min(alarm_s, trace_s)


def _ended(peer: int, why: str, kind: str) -> BaseException:
    return Stopped()


def _nowhere() -> Tuple[Progress, Progress]:
    return Progress(), Progress()


logger = logging.getLogger("ringcomm.engine")


class HeartbeatThread:
    """A thread that sends and receives heartbeats on links that only it uses. It sleeps nearly always.

    ``failed`` is called in the thread, as the last thing that it does, when the group has come to its end;
    ``elsewhere`` returns what this process waits for while it does not come to a call here, or "".
    """

    def __init__(
        self,
        fabric: Fabric,
        hosts: Sequence[str],
        limits: SilenceLimits,
        reporter: Any,
        progress: Callable[[], Progress],
        failed: Callable[[RingcommError], None],
        name: str,
        elsewhere: Callable[[], str] = str,
        clock: Clock = monotonic,
    ) -> None:
        self.rank = fabric.rank
        self._fabric = fabric
        self._hosts = hosts
        self._name = name
        self._elsewhere = elsewhere
        self._clock = clock
        self._reporter = reporter
        self._failed = failed
        self._lock = threading.Lock()
        self._outbox: List[Message] = []
        self._ended = False
        self._watch = fabric.watch = StoppableWatch(reporter)

        def lost(peer: int, why: str, kind: str) -> BaseException:
            error: BaseException = reporter.report_lost(peer, self._peers.doing(), why, kind)
            return error

        self._peers = PeerChannels(fabric, hosts, limits, lost, lambda: (progress(), Progress()), clock)
        reporter.heard_and_silent = self._peers.divided
        fabric.make_wakeable()
        self._thread = threading.Thread(target=self._main, name=f"ringcomm-heartbeat ({name})", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------

    @property
    def observer(self) -> Optional[Observer]:
        """The observer that receives this rank's events, if there is one."""
        return self._peers.tracing.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Bring what an observer collects to rank 0's ``sink``; None: send what the last one has."""
        with self._lock:
            self._outbox += self._peers.tracing.attach(observer, sink)
        self._fabric.wake()

    def settle(self, limit_s: float) -> None:
        """Wait for what is on its way at the end; see :meth:`.PeerChannels.settle`."""
        self._peers.settle(limit_s, lambda: self._outbox, lambda: self._ended)

    def stop(self) -> None:
        """End the thread, and send the other ranks a goodbye."""
        self._watch.stopping = True
        self._fabric.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reporter.heard_and_silent = None
        self._peers.close()

    # ---- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while True:
                self._turn()
                reading, writing = self._peers.messages.waiting_for()
                self._fabric.wait(reading, writing, 0.0 if self._outbox else self._peers.alarm_s())
        except Stopped:
            pass  # as it was told to
        except RingcommError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - without this thread no failure is detected
            logger.exception("the watch over %s failed on rank %d", self._name, self.rank)
            self._end(BrokenInvariantError(f"watch over {self._name}: {type(error).__name__}: {error}"))
        finally:
            self._ended = True

    def _end(self, error: RingcommError) -> None:
        self._ended = True
        self._failed(error)

    def _turn(self) -> None:
        peers, now_s = self._peers, self._clock()
        with self._lock:
            outbox, self._outbox = self._outbox, []
        for message in outbox:
            peers.tracing.deliver(message)
        peers.messages.flush()
        self._watch.check()
        peers.awake()
        peers.pulse()
        for peer, message in peers.take_received():
            self._take(peer, message)
        peers.note_closed(self._reporter)
        if self.rank == 0:
            self._look_for_late()
        peers.tracing.flush(now_s)

    def _take(self, peer: int, message: Message) -> None:
        if message["type"] == "explain":
            self._peers.messages.send({"type": "stack", "text": self._where()})
        elif message["type"] == "stack" and self.rank == 0:
            self._send_where(peer, str(message["text"]))
        else:
            raise ProtocolError(f"rank {peer} may not send {message['type']!r} to rank {self.rank}")

    def _look_for_late(self) -> None:
        """Report which ranks have not entered a call, and where they are. The call's own limit ends it."""
        late = self._peers.progress_reports.late((), self._clock())
        if late is None:
            return
        logger.warning("%s: %s.", self._name[:1].upper() + self._name[1:], late.text)
        for rank in late.ranks:
            if rank == self.rank:
                self._send_where(rank, self._where())
            else:
                self._peers.messages.send({"type": "explain"}, rank)

    def _where(self) -> str:
        """Return where this rank is instead. If it waits itself, what it waits for says more than a stack."""
        elsewhere = self._elsewhere()
        return f"  {elsewhere}\n" if elsewhere else main_stack()

    def _send_where(self, rank: int, stack: str) -> None:
        logger.warning("%s", whereabouts(rank, self._hosts[rank], stack))
