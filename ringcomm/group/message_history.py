"""The point-to-point messages of a group: their numbers by peer, the last one, and the waits for them."""

from __future__ import annotations

import time
import weakref
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import monotonic
from ..collective.call_history import DONE, FAILED, RUNNING, SUBMITTED, Row
from ..collective.call_sites import Site, site_text
from ..collective.totals import OperationTotal, Totals
from .operation_queue import Work

SEND, RECEIVE = "send", "recv"
KIND = "message"
"""The name of both in sums over kinds of calls."""


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
        """Mark the messages that threads waited for as failed, with the engine."""
        if self._failure is None:
            text = f"{type(error).__name__}: {error}"
            rows = [row for row in self.rows() if row["state"] == RUNNING]
            self._failure = [{**row, "state": FAILED, "error": text} for row in rows]
        if self.on_failure is not None:
            self.on_failure(error)

    # ---- called on request, by any thread ----------------------------------------------------

    def rows(self) -> List[Row]:
        """Return the messages that threads wait for, oldest first, and before them the last one if nothing
        waits for it; after a failure those that were waited for then.
        """
        if self._failure is not None:
            return [dict(row) for row in self._failure]
        waited, last = [wait.message for wait in self._present()], self._last
        rows = [self._row(message, RUNNING) for message in waited]
        if last is not None and last[0] not in waited:
            work = last[1]()
            rows.insert(0, self._row(last[0], DONE if work is None or work.is_completed() else SUBMITTED))
        return rows

    def channel(self, name: str, members: Sequence[int]) -> Row:
        """Return the channel of a flight record: :meth:`rows`, and the numbers of messages by peer, which are
        named by their ranks in the whole job (``members``).
        """
        rows = self.rows()
        for row in rows:
            row["peer"] = None if row["peer"] is None else members[row["peer"]]
        peers = sorted({peer for _, peer in list(self._flows) if peer is not None})
        counts = {str(members[peer]): [self._count(SEND, peer), self._count(RECEIVE, peer)] for peer in peers}
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
        """Return the seconds that threads have waited for messages."""
        flows = list(self._flows.items())
        return sum(flow.waited_s + self._present_s(*key) for key, flow in flows)

    def waits(self) -> Iterator[Tuple[str, Optional[int]]]:
        """Yield the messages that threads wait for at present, oldest first: in words, and the peer."""
        for wait in self._present():
            yield wait.work.what, wait.message.peer

    def _present(self) -> List[Wait]:
        return list(self._waits.values())

    def _present_s(self, kind: str, peer: Optional[int]) -> float:
        now_s = time.perf_counter()
        found = (wait for wait in self._present() if wait.message[:2] == (kind, peer))
        return sum(now_s - wait.began_s for wait in found)

    def _count(self, kind: str, peer: int) -> int:
        flow = self._flows.get((kind, peer))
        return 0 if flow is None else flow.count

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
