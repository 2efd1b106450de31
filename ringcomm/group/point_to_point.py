"""Point-to-point messages of one group: their history, their links, and the thread that moves the bytes."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import POLLING, Deadline, monotonic
from ..collective.observe import (
    DONE,
    FAILED,
    RUNNING,
    SUBMITTED,
    OperationTotal,
    Row,
    Site,
    Totals,
    site_text,
)
from ..errors import BrokenInvariantError, PeerStalledError, RingcommError
from ..transport.base import Fabric, Link, LinkClosed
from .failures import FailureReporter
from .message_channel import Address, Channel, Disagreement, Matcher, Receive
from .operation_queue import Turn, Work

SEND, RECEIVE = "send", "recv"
KIND = "message"  # the name of both in sums over kinds of calls


class _Message(NamedTuple):
    """A posted message: ``number`` counts those of this kind to or from this peer (None: any)."""

    kind: str
    peer: Optional[int]
    number: int
    tag: int
    elements: int
    nbytes: int
    began_s: float
    site: Optional[Site]


class Wait(NamedTuple):
    """A thread's wait for a message, see :meth:`MessageHistory.begin_wait`."""

    message: _Message
    work: Work
    began_s: float


class _Flow:
    """The messages of one kind to or from one peer: their number, bytes, and seconds waited for them."""

    __slots__ = ("count", "nbytes", "waited_s")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.waited_s = 0.0


class MessageHistory:
    """The sends and receives of one point-to-point engine."""

    def __init__(self, type_name: Callable[[int], str] = hex) -> None:
        self.on_failure: Optional[Callable[[BaseException], None]] = None  # called when the engine fails
        self._type_name = type_name
        # The last one, and its work, which is not kept alive.
        self._last: Optional[Tuple[_Message, Callable[[], Optional[Work]]]] = None
        self._flows: Dict[Tuple[str, Optional[int]], _Flow] = {}
        self._waits: Dict[int, Wait] = {}
        self._failure: Optional[List[Row]] = None

    # ---- called while messages are exchanged -------------------------------------------------

    def post(
        self, kind: str, peer: Optional[int], tag: int, elements: int, nbytes: int, work: Work
    ) -> _Message:
        """Record a message; one thread at a time. ``peer`` None: any."""
        flow = self._flows.get((kind, peer))
        if flow is None:
            flow = self._flows[kind, peer] = _Flow()
        flow.count += 1
        flow.nbytes += nbytes
        message = _Message(kind, peer, flow.count, tag, elements, nbytes, monotonic(), work.site)
        self._last = message, weakref.ref(work)
        return message

    def begin_wait(self, message: _Message, work: Work) -> Wait:
        """Record that a thread starts to wait for a message; return what :meth:`end_wait` needs."""
        wait = Wait(message, work, time.perf_counter())
        self._waits[id(wait)] = wait
        return wait

    def end_wait(self, wait: Wait) -> None:
        """End a wait. The time counts for the peer, including that of a message from any rank."""
        del self._waits[id(wait)]
        message = wait.message
        peer = wait.work.source if message.peer is None and wait.work.source >= 0 else message.peer
        flow = self._flows.setdefault((message.kind, peer), _Flow())
        flow.waited_s += time.perf_counter() - wait.began_s

    def fail(self, error: BaseException) -> None:
        if self._failure is None:
            text = f"{type(error).__name__}: {error}"
            rows = [row for row in self.rows() if row["state"] == RUNNING]
            self._failure = [{**row, "state": FAILED, "error": text} for row in rows]
        if self.on_failure is not None:
            self.on_failure(error)

    # ---- called on request, by any thread ----------------------------------------------------

    def rows(self) -> List[Row]:
        """Return the messages that threads wait for, and first the last one if nothing waits for it."""
        if self._failure is not None:
            return [dict(row) for row in self._failure]
        waited, last = [wait.message for wait in list(self._waits.values())], self._last
        rows = [self._row(message, RUNNING) for message in waited]
        if last is not None and last[0] not in waited:
            work = last[1]()
            rows.insert(0, self._row(last[0], DONE if work is None or work.is_completed() else SUBMITTED))
        return rows

    def channel(self, name: str, members: Sequence[int]) -> Row:
        """Return the channel of a flight record: :meth:`rows`, and counts by rank in the whole job."""
        rows = self.rows()
        for row in rows:
            row["peer"] = None if row["peer"] is None else members[row["peer"]]
        peers, flows, none = {peer for _, peer in list(self._flows) if peer is not None}, self._flows, _Flow()
        counts = {
            str(members[peer]): [flows.get((kind, peer), none).count for kind in (SEND, RECEIVE)]
            for peer in sorted(peers)
        }
        return {"name": name, "ordered": False, "members": members, "operations": rows, "messages": counts}

    def add_to(self, totals: Totals) -> None:
        """Add the messages to the sums of a rank, including waits that have not ended."""
        for (kind, peer), flow in list(self._flows.items()):
            waited_s = flow.waited_s + self._present_s(kind, peer)
            totals.kinds.setdefault(KIND, OperationTotal()).add(flow.count, waited_s, flow.nbytes)
            if peer is not None:
                total = totals.peer(peer)
                total.exchanged(flow.nbytes * (kind == SEND), flow.nbytes * (kind == RECEIVE))
                total.slept_s += waited_s

    @property
    def waited_s(self) -> float:
        flows = list(self._flows.items())
        return sum(flow.waited_s + self._present_s(*key) for key, flow in flows)

    def waits(self) -> Iterator[Tuple[str, Optional[int]]]:
        """Yield the messages that threads wait for at present, oldest first: in words, and the peer."""
        for wait in list(self._waits.values()):
            yield wait.work.what, wait.message.peer

    def _present_s(self, kind: str, peer: Optional[int]) -> float:
        now_s = time.perf_counter()
        found = (wait for wait in list(self._waits.values()) if wait.message[:2] == (kind, peer))
        return sum(now_s - wait.began_s for wait in found)

    def _row(self, message: _Message, state: str) -> Row:
        what = f"{message.nbytes} bytes"
        if message.elements:
            what += f" of {self._type_name(message.elements)}"
        if message.tag:
            what += f", tag {message.tag}"
        return {
            "op": message.number, "kind": message.kind, "name": "", "what": what, "peer": message.peer,
            "site": "" if message.site is None else site_text(message.site), "state": state,
            "began": message.began_s,
        }  # fmt: skip


LARGE_BYTES = 256 * 1024  # A caller that starts a longer message leaves it to the thread, and returns at once
PAUSE_S = 2e-3
"""The thread takes the turn this long after a caller has given it back, if no message needs it before."""
_MAX_WAIT_S = 3600.0
_MIN_WAIT_S = 1e-3


class _Request(NamedTuple):
    """An operation that a user's thread has posted."""

    work: Work
    limit_s: Optional[float]
    peer: Optional[int]
    do: Callable[[], None]


class PointToPoint:
    """Sends and receives arrays' bytes, matched by peer and tag, over links for these messages only."""

    def __init__(
        self,
        fabric: Fabric,
        reporter: FailureReporter,
        spin_s: float,  # how long to poll before sleeping while a caller waits
        name: str,
        type_name: Callable[[int], str] = hex,
    ) -> None:
        self.history: Optional[MessageHistory] = None  # records the messages
        self._fabric = fabric
        self._reporter = reporter
        self._spin_s = spin_s
        self._name = name
        self._type_name = type_name
        self._matcher = Matcher()
        self._channels: Dict[int, Channel] = {
            peer: Channel(fabric.link(peer), self._matcher, type_name)
            for peer in range(fabric.size)
            if peer != fabric.rank
        }
        self._gone: Dict[int, str] = {}
        self._lock = threading.Lock()
        self._posted: List[_Request] = []
        self._limits: Dict[Work, Tuple[Deadline, Optional[int]]] = {}
        self._thread: Optional[threading.Thread] = None
        self._failure: Optional[BaseException] = None
        self._stopping = self._is_broken = False
        self._turn = Turn(fabric.wake, PAUSE_S)
        fabric.make_wakeable()

    # ---- called by any thread ----------------------------------------------------------------

    def send(
        self, peer: int, address: Address, view: memoryview, work: Work, limit_s: Optional[float],
        elements: int = 0,
    ) -> None:  # fmt: skip
        """Start sending bytes, which must not change until the end; ``limit_s`` is without progress."""
        request = _Request(
            work, limit_s, peer, lambda: self._channel(peer).send(address, view, work, elements)
        )
        self._post(request, SEND, address, elements, view.nbytes)

    def receive(
        self, peer: Optional[int], address: Address, view: memoryview, work: Work, limit_s: Optional[float],
        elements: int = 0,
    ) -> None:  # fmt: skip
        """Start receiving exactly ``view.nbytes`` bytes, from a peer or (None) from any peer."""
        receive = Receive(peer, address, view, work, elements)
        request = _Request(work, limit_s, peer, lambda: self._take(receive))
        self._post(request, RECEIVE, address, elements, view.nbytes)

    def _post(self, request: _Request, kind: str, address: Address, elements: int, nbytes: int) -> None:
        work, history = request.work, self.history
        with self._lock:
            failure = self._failure
            if failure is None:
                if history is not None:
                    message = history.post(kind, request.peer, address[1], elements, nbytes, work)
                    work.noted = history, message
                self._posted.append(request)
                if self._thread is None:
                    thread = threading.Thread(target=self._main, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        if failure is not None:
            work.finish(failure)
        elif nbytes > LARGE_BYTES or not self._turn.take(at_once=True):
            self._turn.hurry()
        else:
            self._with_turn(self._push)

    def help(self, work: Work) -> None:
        """Move messages until the caller's work is finished, unless another waiting thread does so."""
        if self._turn.take():
            self._with_turn(lambda: self._move(work.is_completed))

    def _with_turn(self, act: Callable[[], object]) -> None:
        """Run ``act`` as a caller that has the turn, and give it back."""
        try:
            self._guard(act)
        except BaseException:
            # Interrupted anywhere: the rest of a message is unknown. The caller ends the group.
            self._is_broken = True
            raise
        finally:
            waited_for = any(work.waiters and not work.is_completed() for work in self._limits)
            at_work = any(channel.is_at_work() for channel in self._channels.values())
            self._turn.give_back(waited_for or at_work)

    def close(self, error: RingcommError) -> None:
        """End the thread; unfinished operations fail with ``error``."""
        with self._lock:
            self._stopping = True
            self._failure = self._failure or error
        if self._thread is not None:
            self._turn.hurry()
            if not self._turn.is_mine():  # as it is in a callback of a message
                self._thread.join(10.0)
                self._turn.end(10.0)
        self._fail_all(error)

    # ---- the thread that has the turn --------------------------------------------------------

    def _main(self) -> None:
        while not self._stopping:
            self._turn.pause()
            with self._turn:
                self._guard(lambda: self._move(lambda: self._turn.wanted))

    def _guard(self, act: Callable[[], object]) -> None:
        """Run ``act``; if that fails, all operations fail."""
        try:
            act()
        except RingcommError as error:
            self._fail_all(error)
        except Disagreement as difference:
            text = f"rank {self._fabric.rank}: {difference}"
            self._fail_all(self._reporter.report_mismatch(difference.peer, text))
        except Exception as error:  # noqa: BLE001 - all pending operations must fail
            self._fail_all(BrokenInvariantError(f"{self._name} failed: {type(error).__name__}: {error}"))

    def _move(self, is_over: Callable[[], bool]) -> None:
        """Send and receive, at least once, until a condition is true."""
        while not self._stopping:
            moved = self._cycle()
            if is_over():
                return
            if not moved:
                self._sleep(is_over)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._stopping = True
            self._failure = self._failure or error
            works = [*self._limits, *(request.work for request in self._posted)]
            self._posted, self._limits = [], {}
        # Callers may overwrite memory that peers have not read yet.
        self._fabric.revoke()
        if self.history is not None:
            self.history.fail(self._failure)
        for work in works:
            work.finish(self._failure)

    def _cycle(self) -> bool:
        if self._is_broken:
            return False
        moved = self._start_posted()
        moved = self._each(Channel.advance) or moved
        if self._limits:
            self._limits = {work: limit for work, limit in self._limits.items() if not work.is_completed()}
        return moved

    def _push(self) -> bool:
        """Start posted operations, and send bytes that need not wait for a peer: an attempt of few copies."""
        return not self._is_broken and self._start_posted() and self._each(Channel.push)

    def _start_posted(self) -> bool:
        with self._lock:
            posted, self._posted = self._posted, []
        for request in posted:
            self._limits[request.work] = (Deadline(request.limit_s), request.peer)
        for request in posted:
            try:
                request.do()
            except LinkClosed as closed:
                self._give_up(closed.peer, closed.reason)
        return bool(posted)

    def _each(self, act: Callable[[Channel], bool]) -> bool:
        moved = False
        for peer, channel in list(self._channels.items()):
            try:
                moved = act(channel) or moved
            except LinkClosed as closed:
                self._lose(peer, closed.reason)
        return moved

    def _sleep(self, is_over: Callable[[], bool]) -> None:
        if self._is_broken:
            self._wait([], [], _MAX_WAIT_S)  # until the group has ended
            return
        if any(work.waiters for work in self._limits):
            until = POLLING.until(time.perf_counter(), self._spin_s)
            while time.perf_counter() < until:
                if self._posted or self._cycle() or is_over():
                    return
                POLLING.give_way()
        timeout_s = self._check_limits()
        reading = [item.link for item in self._channels.values()]
        writing = [item.link for item in self._channels.values() if item.writing()]
        with self._lock:
            if self._posted or self._stopping or is_over():  # at its limit, perhaps
                return
        self._wait(reading, writing, timeout_s)

    def _wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        self._fabric.wait(reading, writing, timeout_s)
        if self._fabric.watch is not None:
            self._fabric.watch.check()

    def _check_limits(self) -> float:
        """Fail operations whose limit has expired; return the seconds until the next limit expires."""
        first_s = _MAX_WAIT_S
        for work, (deadline, peer) in self._limits.items():
            if deadline.expired() and not work.is_completed() and not self._still_moves(work, deadline):
                self._give_up_waiting(work, peer, f"not done within {deadline.timeout_s:g} s")
            else:
                first_s = min(first_s, max(deadline.remaining_s(), _MIN_WAIT_S))
        return first_s

    def _still_moves(self, work: Work, deadline: Deadline) -> bool:
        """Return whether its bytes, or bytes before them, moved within its limit, which then restarts."""
        for channel in self._channels.values():
            if monotonic() - channel.moved_s < (deadline.timeout_s or 0.0) and channel.in_transit(work):
                deadline.restart()
                return True
        return False

    def _give_up_waiting(self, work: Work, peer: Optional[int], why: str) -> None:
        if peer is not None:
            raise self._reporter.report_lost(peer, work.what, why, "stalled")
        for receive in self._matcher.receives():
            if receive.work is work:
                self._matcher.withdraw(receive)
        work.finish(PeerStalledError(f"{work.what}: no peer has sent a message; {why}."))

    # ---- peers -------------------------------------------------------------------------------

    def _channel(self, peer: int) -> Channel:
        if peer in self._gone:
            raise LinkClosed(peer, self._gone[peer])
        return self._channels[peer]

    def _take(self, receive: Receive) -> None:
        arrival = self._matcher.post(receive)
        if arrival is not None:
            if arrival.content is None:
                self._channel(arrival.peer)
            channel = self._channels.get(arrival.peer)
            if channel is None:  # its link is closed: one that only delivers messages received before
                channel = Channel(self._fabric.link(arrival.peer), self._matcher, self._type_name)
            channel.serve(receive, arrival)
        elif receive.peer is not None:
            self._channel(receive.peer)
        elif not self._channels:
            raise LinkClosed(*next(iter(self._gone.items())))

    def _lose(self, peer: int, reason: str) -> None:
        """Handle the end of a peer's link: fail if an operation still needs the peer."""
        needed = bool(self._channels.pop(peer).unfinished())
        self._gone[peer] = reason
        for receive in self._matcher.receives():
            needed = needed or receive.peer == peer or receive.peer is None and not self._channels
        if needed:
            self._give_up(peer, reason)

    def _give_up(self, peer: int, reason: str) -> None:
        doing = next((work.what for work in self._limits if not work.is_completed()), "send or recv")
        raise self._reporter.report_lost(peer, doing, reason)
