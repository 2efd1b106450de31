"""The start of many ranks, without sockets: the rendezvous is the real one, and so is what ranks decide.

Counts what the rendezvous receives and sends, and what the ranks pass on to each other.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict, deque
from typing import Any, Deque, Dict, List, Sequence, Tuple

from ringcomm.rendezvous import member_list
from ringcomm.rendezvous.actions import Notice, Send
from ringcomm.rendezvous.epoch import Phase
from ringcomm.rendezvous.fixed_terms import FixedTerms
from ringcomm.rendezvous.link_table import ranges_of
from ringcomm.rendezvous.membership import as_target
from ringcomm.rendezvous.routing import routes_of
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.wire.messages import encode, validate
from tests.unit.rendezvous.simulated import VERSION, attempt, join_message, offer, seats_of

Message = Dict[str, Any]


def address_of(host: int) -> str:
    """The address of a host."""
    return f"10.0.{host // 250}.{host % 250}"


class LargeStart:
    """A job whose ranks start on hosts with so many ranks each.

    Args:
        hosts: for each, its number of ranks.
        counts_calls: whether to count calls of functions, which takes much longer.
        unreachable: (from, to) pairs of hosts: the first one cannot dial the second.

    Attributes:
        received, sent: by type of message, how many bytes of it the rendezvous has received and sent.
        messages: how many it has received and sent.
        calls: how many calls of functions (and steps of generators) that took.
        rendezvous_s, rank_s: processor time of the rendezvous without receiving, and of each rank.
        passed_on: by rank, the bytes that it has sent to other ranks so that they can start.
        routes: by rank, how it reaches each other one.
        notices: what the launcher was told.
    """

    def __init__(
        self, *hosts: int, counts_calls: bool = False, unreachable: Sequence[Tuple[int, int]] = ()
    ) -> None:
        self.counts_calls = counts_calls
        self.seats = seats_of(*hosts)
        self.unreachable = set(unreachable)
        self.state = Rendezvous(FixedTerms(len(self.seats), self.seats, VERSION, 60.0))
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.passed_on: Counter[int] = Counter()
        self.rank_s: Dict[int, float] = defaultdict(float)
        self.rendezvous_s = 0.0
        self.messages = self.calls = 0
        self.routes: Dict[int, List[Message]] = {}
        self.notices: List[Notice] = []
        self._hosts = [seat.slot.host_index for seat in self.seats]
        self._assigned: Dict[int, Message] = {}
        self._branches: Dict[int, List[int]] = {}
        self._told_on: Dict[int, List[Message]] = {}
        self._members: Dict[int, List[member_list.ListedMember]] = {}
        self._shares: Dict[int, member_list.Share] = {}
        self._waiting: Deque[Tuple[int, Message]] = deque()

    def run(self) -> None:
        """From the first rank that joins to the end of the start."""
        for rank, seat in enumerate(self.seats):
            offers = [offer(address_of(seat.slot.host_index)), offer(f"@{rank}", "unix", "local", 0)]
            message = join_message(slot=seat.slot, hostname=seat.host, pid=100 + rank, addresses=offers)
            self._report(rank, message)
        while self._waiting:
            rank, message = self._waiting.popleft()
            began_s = time.process_time() - self.rendezvous_s
            self._answer(rank, validate(message))
            self.rank_s[rank] += time.process_time() - self.rendezvous_s - began_s

    @property
    def bytes(self) -> int:
        """All that the rendezvous has received and sent."""
        return sum(self.received.values()) + sum(self.sent.values())

    def _report(self, rank: int, message: Message) -> None:
        self.received[message["type"]] += len(encode(validate(message)))
        self.messages += 1
        previous = sys.getprofile()
        sys.setprofile(self._count if self.counts_calls else previous)
        began_s = time.process_time()
        try:
            actions = self.state.handle(rank, message, 0.0)
        finally:
            sys.setprofile(previous)
        for action in actions:
            if isinstance(action, Send):
                self.sent[action.message["type"]] += len(encode(action.message))
                self.messages += 1
                self._waiting.append((action.connection, action.message))
            elif isinstance(action, Notice):
                self.notices.append(action)
        self.rendezvous_s += time.process_time() - began_s

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    # ---- ranks -------------------------------------------------------------------------------

    def _answer(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind in ("probe", "probe_again") and message["targets"]:
            targets = [item["rank"] for item in message["targets"]]
            self._report(rank, {"type": "probed", "attempts": self._attempts(rank, targets)})
        elif kind == "assign":
            self._assigned[rank] = message
            for target in message["sources"]:
                self._dial(rank, target["rank"])
        elif kind == "members":
            self._take_list(rank, message)
        elif kind == "ways":
            self._take_ways(rank, message)
        elif kind == "link":
            self._link(rank, message["routes"])

    def _dial(self, rank: int, source: int) -> None:
        """A rank has dialled the one from which it gets the list of ranks."""
        self._branches.setdefault(source, []).append(rank)
        for message in self._told_on.get(source, ()):
            self._pass_on(source, rank, message)

    def _attempts(self, rank: int, targets: Sequence[int]) -> List[Message]:
        here = self._hosts[rank]
        return [
            attempt(
                rank, other, address_of(self._hosts[other]),
                "connection refused" if (here, self._hosts[other]) in self.unreachable else "",
            )
            for other in targets
        ]  # fmt: skip

    def _take_list(self, rank: int, listing: Message) -> None:
        members = self._members[rank] = member_list.members_of(listing, self._assigned[rank]["digest"])
        self._pass_on_to_all(rank, listing)
        own, shared = members[rank], self._assigned[rank]["shared"]
        targets = member_list.shares_of(own, members, shared)
        if own.local_rank or not (shared or targets):
            return
        attempts = self._attempts(rank, [as_target(item)["rank"] for item in targets])
        if shared:
            self._shares[rank] = member_list.Share(own, targets, attempts)
            self._report(rank, self._shares[rank].report())
        else:
            self._report(rank, {"type": "probed", "attempts": attempts})

    def _take_ways(self, rank: int, message: Message) -> None:
        members, share = self._members[rank], self._shares.get(rank)
        ways = message["ways"] + ([] if share is None else share.ways())
        self._pass_on_to_all(rank, {"type": "ways", "ways": ways})
        self._link(rank, routes_of(members[rank], members, ways))

    def _pass_on_to_all(self, rank: int, message: Message) -> None:
        self._told_on.setdefault(rank, []).append(message)
        for branch in self._branches.get(rank, ()):
            self._pass_on(rank, branch, message)

    def _pass_on(self, rank: int, branch: int, message: Message) -> None:
        if message["type"] == "ways" and self._hosts[branch] != self._hosts[rank]:
            return
        self.passed_on[rank] += len(encode(validate(message)))
        self._waiting.append((branch, message))

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
