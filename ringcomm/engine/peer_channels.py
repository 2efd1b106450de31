"""A rank's channels to the other ranks: control messages, heartbeats, and the timeline's events.

Every rank sends a heartbeat to every other one every few seconds, with how far it is in its calls. A process
that is stopped, swapped out, cut off, or inside a C call that keeps the interpreter lock does not. A process
that computes, waits or is in a debugger does: it is late, not failed. :class:`FailureDetector` and
:class:`ProgressReports` find out both; they are pure.

An engine uses the channels besides its work. A process group of ``torch.distributed`` has nothing to match by
name, and so no engine, but its ranks freeze and lose their cables like others: it has a
:class:`HeartbeatThread`.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import repeat
from typing import Any, Callable, Collection, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..clock import Clock, Deadline, monotonic
from ..collective.observe import Progress
from ..errors import BrokenInvariantError, ProtocolError, RingcommError
from ..group.failures import FailureReporter
from ..transport.base import Fabric, Link, LinkClosed, StoppableWatch, Stopped
from ..wire.messages import MAX_RESPONSES_BYTES, Message, MessageReader, body_of, framed, repeat_framed
from .deadlocks import ranks_text, whereabouts
from .observer import Observer, Sink, Tracing
from .stacks import main_stack

logger = logging.getLogger("ringcomm.engine")

Lost = Callable[[int, str, str], BaseException]
"""(peer, why, kind): makes the error to raise for a peer that is gone."""

_READ_BYTES = 64 * 1024
_LOOK_S = 0.002  # how often to look whether all has been sent, at the end
LOOK_AGAIN_S = 0.5
"""How long after a look that has found this rank in a new direct call it looks again, in seconds."""


class ControlMessages:
    """Queues of outgoing control messages, and readers of arriving ones. No method waits."""

    def __init__(self, fabric: Fabric) -> None:
        self.gone: Dict[int, str] = {}  # peers whose link has ended, and why
        # The peers of the negotiation.
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

    def send(self, message: Message, to: Optional[Collection[int]] = None) -> None:
        """Send to some peers, or to the nearest ones, as far as they are still there."""
        body = body_of(message)
        for peer in self.nearest if to is None else to:
            if peer in self._links and peer not in self._end_found:
                self._unsent[peer] += framed(body, self._links[peer].session)
        self.flush()

    def send_repeat(self, message: Message, elements: memoryview) -> None:
        """Send a message of the kind ``repeat`` and its elements to every peer that is still there."""
        for peer, link in self._links.items():
            if peer not in self._end_found:
                self._unsent[peer] += repeat_framed(message, link.session)
                self._unsent[peer] += elements
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
                    unsent.clear()
                    self._given[peer] = memoryview(b"")
                    break
                if not taken:
                    break
                self._given[peer] = self._given[peer][taken:]

    def receive(self, all_peers: bool = True) -> List[Tuple[int, Message]]:
        """Return the messages that have arrived, by sender; each peer that is read costs a system call."""
        messages: List[Tuple[int, Message]] = []
        for peer, link in list(self._links.items()):
            if not all_peers and peer not in self.nearest:
                continue
            try:
                while True:
                    got = link.recv([self._buffer])
                    if not got:
                        break
                    messages += zip(repeat(peer), self._readers[peer].feed(bytes(self._buffer[:got])))
                    if got < _READ_BYTES:
                        break
            except LinkClosed as closed:
                self.gone[peer] = closed.reason
                del self._links[peer]
                self._unsent[peer].clear()
                self._given[peer] = memoryview(b"")
        return messages

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """The links to wait for: (readable, writable)."""
        reading = list(self._links.values())
        unsent = [link for peer, link in self._links.items() if self._unsent[peer] or self._given[peer]]
        return reading, unsent


BEATS = 6  # number of heartbeats in the time without any after which a peer counts as failed
MAX_INTERVAL_S = 5.0  # heartbeats are sent at least this often, in seconds, unless no limit depends on them
CALLS, ENGINE = 0, 1  # the channels that reports are about


class SilenceLimits(NamedTuple):
    """How long others may be silent, in seconds; 0: for ever. ``dead_after_s``: without a heartbeat or in a
    transfer that stands still. ``warning_s`` and ``late_after_s``: with a rank whose program does not come,
    before saying so and before giving it up.
    """

    dead_after_s: float = 0.0
    warning_s: float = 0.0
    late_after_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """How often to give heartbeats, so that none of the limits is missed by much."""
        limits_s = [limit_s / BEATS for limit_s in self if limit_s]
        return min(MAX_INTERVAL_S, *limits_s) if limits_s else 3600.0


class FailureDetector:
    """Finds peers without a heartbeat for ``dead_after_s`` (0: never), and says when own ones are due."""

    def __init__(self, peers: Iterable[int], dead_after_s: float, interval_s: float, now_s: float) -> None:
        self.interval_s = interval_s
        self._dead_after_s = dead_after_s
        self._heard_s: Dict[int, float] = dict.fromkeys(peers, now_s)
        self._sent_s = now_s
        self._looked_s = now_s

    def received(self, peer: int, now_s: float) -> None:
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def left(self, peer: int) -> None:
        """The link to a peer has ended; no heartbeat is expected of it any more."""
        self._heard_s.pop(peer, None)

    def due(self, now_s: float) -> bool:
        """Return whether a heartbeat is due; if so, the caller sends it now."""
        if now_s - self._sent_s < self.interval_s:
            return False
        self._sent_s = now_s
        return True

    def silent(self, now_s: float) -> Optional[Tuple[int, float]]:
        """The peer without a heartbeat for longest, and that time in seconds, if that is too long."""
        if not self._dead_after_s:
            return None
        if now_s - self._looked_s > self._dead_after_s / 3:
            # This process did not run: heartbeats that arrived meanwhile are still in the sockets' buffers.
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        if not self._heard_s:
            return None
        peer, heard_s = min(self._heard_s.items(), key=lambda item: item[1])
        return (peer, now_s - heard_s) if now_s - heard_s >= self._dead_after_s else None

    def divided(self, now_s: float) -> Tuple[List[int], List[int]]:
        """(peers with a heartbeat within half the limit, peers without one)."""
        all_heard_s = dict(self._heard_s)  # a copy, because another thread may ask
        heard = {peer for peer, at_s in all_heard_s.items() if now_s - at_s <= self._dead_after_s / 2}
        return sorted(heard), sorted(set(all_heard_s) - heard)

    def alarm_s(self, now_s: float) -> float:
        """In how many seconds a heartbeat or the next check is due."""
        at_s = self._sent_s + self.interval_s
        if self._dead_after_s and self._heard_s:
            at_s = min(at_s, min(self._heard_s.values()) + self._dead_after_s)
        return max(0.0, min(at_s - now_s, self.interval_s))


class Late(NamedTuple):
    """Ranks that have not entered a call in which others wait, as a text, too."""

    ranks: List[int]
    text: str
    given_up: bool


class _Known(NamedTuple):
    """A rank's last report about one channel, and since when nothing in it has moved."""

    progress: Progress
    since_s: float


class ProgressReports:
    """Finds transfers without progress, and ranks that are alive but have not entered a call."""

    def __init__(self, rank: int, hosts: Sequence[str], limits: SilenceLimits) -> None:
        self._rank = rank
        self._hosts = hosts
        self._limits = limits
        self._known: Tuple[Dict[int, _Known], Dict[int, _Known]] = ({}, {})
        self._look_s = 0.0
        self._behind_before: List[int] = []
        self._waited_since_s = self._warned_s = 0.0

    def report(self, rank: int, channel: int, progress: Progress, now_s: float) -> None:
        known = self._known[channel].get(rank)
        since_s = known.since_s if known is not None and known.progress[:3] == progress[:3] else now_s
        self._known[channel][rank] = _Known(progress, since_s)

    # ---- transfers that stand still ----------------------------------------------------------

    def stuck(self, now_s: float) -> Optional[Tuple[int, str]]:
        """A peer to which this rank's transfer stands still although both are at it, and why that is so."""
        limit_s = self._limits.dead_after_s
        for known in self._known if limit_s else ():
            mine = known.get(self._rank)
            if mine is None or not mine.progress.doing or now_s - mine.since_s < limit_s:
                continue
            for peer in mine.progress.waits_for:
                theirs = known.get(peer)
                if theirs is None or now_s - theirs.since_s < limit_s:
                    continue
                what = self._between(mine.progress, theirs.progress, peer)
                if what:
                    return peer, (
                        f"the transfer stands still: not a byte has moved for {now_s - mine.since_s:.0f} s, "
                        f"{mine.progress.moved_bytes} bytes into {mine.progress.doing}, although {what} "
                        "(RINGCOMM_DEAD_AFTER sets the limit)"
                    )
        return None

    def _between(self, mine: Progress, theirs: Progress, peer: int) -> str:
        """Return why only the link of two ranks can be at fault; empty: each may wait for a third one."""
        if theirs.sequence == mine.sequence and theirs.doing:
            on_their_way = theirs.with_peer(self._rank)[0] - mine.with_peer(peer)[1]
            return f"{on_their_way} bytes are on their way" if on_their_way > 0 else ""
        if theirs.sequence >= mine.sequence:
            return "the other has sent its part and is through with it"
        return ""

    # ---- late ranks --------------------------------------------------------------------------

    def late(self, paused: Collection[int], now_s: float) -> Optional[Late]:
        """The ranks that have not entered a direct call, if a warning or the end of the wait is due."""
        if now_s < self._look_s:
            return None
        self._look_s = now_s + self._limits.interval_s
        warning_s, late_after_s = self._limits.warning_s, self._limits.late_after_s
        calls = {rank: known.progress for rank, known in self._known[CALLS].items()}
        waiting = sorted(rank for rank, item in calls.items() if item.doing)
        behind = _behind(calls)
        excused = any(rank in paused for rank in behind)
        if not waiting or not behind or behind != self._behind_before or excused:
            self._behind_before = behind
            self._waited_since_s = self._warned_s = now_s
            return None
        waited_s = now_s - self._waited_since_s
        given_up = bool(late_after_s) and waited_s >= late_after_s
        if not given_up and not (warning_s and now_s - self._warned_s >= warning_s):
            return None
        self._warned_s = now_s
        text = (
            f"{calls[waiting[0]].doing}, call number {calls[waiting[0]].number}, has waited for "
            f"{waited_s:.0f} s on {ranks_text(waiting, self._hosts)} for {ranks_text(behind, self._hosts)}"
        )
        return Late(behind, text, given_up)


def _behind(calls: Dict[int, Progress]) -> List[int]:
    """The ranks whose programs have to make the next call, unless a slow transfer comes before that."""
    first = min((item.sequence for item in calls.values()), default=0)
    last = max((item.sequence for item in calls.values()), default=0)
    ranks = sorted(rank for rank, item in calls.items() if item.sequence == first)
    return [] if first == last or any(calls[rank].doing for rank in ranks) else ranks


class PeerChannels:
    """Channels to every other rank, used by the thread that does the engine's work. ``received`` is what has
    arrived for the engine itself. ``awake``: messages may have arrived, so the next :meth:`pulse` reads from
    all peers. ``waits_in``: how far this rank is in a direct call in which the last two looks have found it.
    """

    def __init__(
        self, fabric: Fabric, hosts: Sequence[str], limits: SilenceLimits, lost: Lost,
        progress: Callable[[], Tuple[Progress, Progress]], clock: Clock,
    ) -> None:  # fmt: skip
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
        self.received: List[Tuple[int, Message]] = []
        self.awake = False
        self._next_look_s = 0.0
        self._in_call, self._looks_again = -1, False
        self.waits_in: Optional[Progress] = None

    def pulse(self) -> None:
        """Exchange heartbeats and messages; raises for a silent peer, or a transfer that stands still."""
        now_s = self._clock()
        look = now_s >= self._next_look_s
        all_peers = look or self.awake
        self.awake = False
        for peer, message in self.messages.receive(all_peers):
            self._detector.received(peer, now_s)
            if message["type"] == "repeat":
                self.received.append((peer, message))
            else:
                self._receive(peer, message, now_s)
        if look:
            self._look(now_s)

    def _receive(self, peer: int, message: Message, now_s: float) -> None:
        if message["type"] == "beat":
            self.progress_reports.report(peer, CALLS, Progress.from_json(message["calls"]), now_s)
            self.progress_reports.report(peer, ENGINE, Progress.from_json(message["engine"]), now_s)
        elif message["type"] == "bye":
            self.said_goodbye.add(peer)
        elif message["type"] not in ("trace", "clock") or not self.tracing.take(peer, message):
            self.received.append((peer, message))

    def _look(self, now_s: float) -> None:
        for peer in self.messages.gone:
            self._detector.left(peer)
        calls, engine = self._progress()
        self.progress_reports.report(self._rank, CALLS, calls, now_s)
        self.progress_reports.report(self._rank, ENGINE, engine, now_s)
        if self._detector.due(now_s):
            beat = {"type": "beat", "calls": calls.to_json(), "engine": engine.to_json()}
            self.messages.send(beat, range(len(self._hosts)))
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
        self.messages.send({"type": "bye"}, range(len(self._hosts)))
        # These refer to the engine's thread and a runner, and would keep both.
        self._progress = lambda: (Progress(), Progress())
        self.lost = lambda peer, why, kind: Stopped()

    def settle(
        self, limit_s: float, waiting: Callable[[], Sequence[Message]], over: Callable[[], Any]
    ) -> None:
        """Wait until this rank's messages are on their way, on rank 0 until all others have left."""
        deadline = Deadline(limit_s)
        while not (deadline.expired() or over() or self.settled(waiting())):
            time.sleep(_LOOK_S)

    def settled(self, waiting: Sequence[Message]) -> bool:
        if self._rank == 0:
            return len(self.said_goodbye | set(self.messages.gone)) == len(self._hosts) - 1
        return not waiting and not self.messages.waiting_for()[1]

    def note_closed(self, reporter: FailureReporter) -> None:
        """Report the links that have ended without a goodbye, each of them once."""
        for peer in set(self.messages.gone) - self.said_goodbye - self._noted:
            self._noted.add(peer)
            reporter.note_closed(peer, self.messages.gone[peer])

    def alarm_s(self) -> float:
        """In how many seconds :meth:`pulse` or the timeline has something to do."""
        now_s = self._clock()
        trace_s = self.tracing.alarm_s(now_s)
        alarm_s = self._detector.alarm_s(now_s)
        if self._looks_again:
            alarm_s = min(alarm_s, max(0.0, self._next_look_s - now_s))
        return alarm_s if trace_s is None else min(alarm_s, trace_s)


class HeartbeatThread:
    """A thread that sends and receives heartbeats on links that only it uses. ``failed`` is the last thing
    that it calls; ``elsewhere`` returns what this process waits for outside of the group, or "".
    """

    def __init__(
        self, fabric: Fabric, hosts: Sequence[str], limits: SilenceLimits, reporter: Any,
        progress: Callable[[], Progress], failed: Callable[[RingcommError], None], name: str,
        elsewhere: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self.rank = fabric.rank
        self._fabric, self._hosts, self._name = fabric, hosts, name
        self._reporter, self._failed, self._elsewhere = reporter, failed, elsewhere
        self._lock = threading.Lock()
        self._outbox: List[Message] = []
        self._ended = False
        self._watch = fabric.watch = StoppableWatch(reporter)

        def lost(peer: int, why: str, kind: str) -> BaseException:
            return reporter.report_lost(peer, self._peers.doing(), why, kind)

        self._peers = PeerChannels(fabric, hosts, limits, lost, lambda: (progress(), Progress()), monotonic)
        reporter.heard_and_silent = self._peers.divided
        fabric.make_wakeable()
        self._thread = threading.Thread(target=self._main, name=f"ringcomm-heartbeat ({name})", daemon=True)
        self._thread.start()

    # ---- for all threads ---------------------------------------------------------------------

    @property
    def observer(self) -> Optional[Observer]:
        return self._peers.tracing.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Bring what an observer collects to rank 0's ``sink``; None: send what the last one has."""
        with self._lock:
            self._outbox += self._peers.tracing.attach(observer, sink)
        self._fabric.wake()

    def settle(self, limit_s: float) -> None:
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
            self._ended = True  # as it was told to
        except Exception as problem:  # noqa: BLE001 - without this thread no failure is detected
            error = problem
            if not isinstance(error, RingcommError):
                logger.exception("the watch over %s failed on rank %d", self._name, self.rank)
                error = BrokenInvariantError(f"watch over {self._name}: {type(error).__name__}: {error}")
            self._ended = True
            self._failed(error)

    def _turn(self) -> None:
        peers = self._peers
        with self._lock:
            outbox, self._outbox = self._outbox, []
        for message in outbox:
            peers.tracing.deliver(message)
        peers.messages.flush()
        self._watch.check()
        peers.awake = True
        peers.pulse()
        received, peers.received = peers.received, []
        for peer, message in received:
            self._take(peer, message)
        peers.note_closed(self._reporter)
        if self.rank == 0:
            self._look_for_late()
        peers.tracing.flush(monotonic())

    def _take(self, peer: int, message: Message) -> None:
        if message["type"] == "explain":
            self._peers.messages.send({"type": "stack", "text": self._where()})
        elif message["type"] == "stack" and self.rank == 0:
            logger.warning("%s", whereabouts(peer, self._hosts[peer], str(message["text"])))
        else:
            raise ProtocolError(f"rank {peer} may not send {message['type']!r} to rank {self.rank}")

    def _look_for_late(self) -> None:
        """Report which ranks have not entered a call, and where they are. The call's own limit ends it."""
        late = self._peers.progress_reports.late((), monotonic())
        if late is None:
            return
        logger.warning("%s: %s.", self._name[:1].upper() + self._name[1:], late.text)
        for rank in late.ranks:
            if rank == self.rank:
                logger.warning("%s", whereabouts(rank, self._hosts[rank], self._where()))
            else:
                self._peers.messages.send({"type": "explain"}, [rank])

    def _where(self) -> str:
        """Return where this rank is instead. If it waits itself, what it waits for says more than a stack."""
        elsewhere = self._elsewhere()
        return f"  {elsewhere}\n" if elsewhere else main_stack()
