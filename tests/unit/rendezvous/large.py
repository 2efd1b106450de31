"""The start of many ranks without sockets, at the real rendezvous; counts what that receives and sends."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, Deque, Dict, List, Sequence, Tuple

from ringcomm.rendezvous.actions import Notice, Send
from ringcomm.rendezvous.epoch import Phase
from ringcomm.rendezvous.fixed_terms import FixedTerms
from ringcomm.rendezvous.link_table import ranges_of
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.wire.messages import encode, validate
from tests.unit.rendezvous.simulated import VERSION, attempt, join_message, offer, seats_of

Message = Dict[str, Any]


def address_of(host: int) -> str:
    """The address of a host."""
    return f"10.0.{host // 250}.{host % 250}"


class LargeStart:
    """A job whose ranks start on hosts with these numbers of ranks; of `unreachable` pairs of hosts the first
    cannot dial the second.
    """

    def __init__(self, *hosts: int, unreachable: Sequence[Tuple[int, int]] = ()) -> None:
        self.seats = seats_of(*hosts)
        self.unreachable = set(unreachable)
        self.state = Rendezvous(FixedTerms(len(self.seats), self.seats, VERSION, 60.0))
        self.received: Counter[str] = Counter()  # bytes that the rendezvous received, by type of message
        self.sent: Counter[str] = Counter()
        self.rendezvous_s = 0.0  # its processor time, with encoding and without decoding
        self.messages = 0  # that it received and sent
        self.routes: Dict[int, List[Message]] = {}  # by rank, its routes to the others
        self.notices: List[Notice] = []  # to the launcher
        self._hosts = [seat.slot.host_index for seat in self.seats]
        self._waiting: Deque[Tuple[int, Message]] = deque()

    def run(self) -> None:
        """From the first rank that joins to the end of the start."""
        for rank, seat in enumerate(self.seats):
            offers = [offer(address_of(seat.slot.host_index)), offer(f"@{rank}", "unix", "local", 0)]
            message = join_message(slot=seat.slot, hostname=seat.host, pid=100 + rank, addresses=offers)
            self._report(rank, message)
        while self._waiting:
            rank, message = self._waiting.popleft()
            self._answer(rank, validate(message))

    @property
    def bytes(self) -> int:
        """All that the rendezvous has received and sent."""
        return sum(self.received.values()) + sum(self.sent.values())

    def _report(self, rank: int, message: Message) -> None:
        self.received[message["type"]] += len(encode(validate(message)))
        self.messages += 1
        began_s = time.process_time()
        for action in self.state.handle(rank, message, 0.0):
            if isinstance(action, Send):
                self.sent[action.message["type"]] += len(encode(action.message))
                self.messages += 1
                self._waiting.append((action.connection, action.message))
            elif isinstance(action, Notice):
                self.notices.append(action)
        self.rendezvous_s += time.process_time() - began_s

    # ---- ranks -------------------------------------------------------------------------------

    def _answer(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind in ("probe", "probe_again") and message["targets"]:
            targets = [item["rank"] for item in message["targets"]]
            self._report(rank, {"type": "probed", "attempts": self._attempts(rank, targets)})
        elif kind == "link":
            self._link(rank, message["routes"])

    def _attempts(self, rank: int, targets: Sequence[int]) -> List[Message]:
        here = self._hosts[rank]
        return [
            attempt(
                rank, other, address_of(self._hosts[other]),
                "connection refused" if (here, self._hosts[other]) in self.unreachable else "",
            )
            for other in targets
        ]  # fmt: skip

    def _link(self, rank: int, routes: List[Message]) -> None:
        self.routes[rank] = routes
        mates = [item["peer"] for item in routes if self._hosts[item["peer"]] == self._hosts[rank]]
        others = [item["peer"] for item in routes if self._hosts[item["peer"]] != self._hosts[rank]]
        self._report(rank, {"type": "linked", "links": self._links(rank, mates, others)})

    def _links(self, rank: int, mates: List[int], others: List[int]) -> List[Message]:
        return [
            {"iface": iface, "local": local, "peers": ranges_of(peers)}
            for iface, local, peers in (
                ("unix", "", mates), ("eth0", address_of(self._hosts[rank]), others),
            )
            if peers
        ]  # fmt: skip


def started(*hosts: int, **options: Any) -> LargeStart:
    """A job that has started; see :class:`LargeStart`."""
    job = LargeStart(*hosts, **options)
    job.run()
    assert job.state.phase is Phase.RUNNING
    return job
