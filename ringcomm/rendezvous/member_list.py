"""The list of all ranks, and how it reaches each of them. Pure.

Up to :data:`MAX_DIRECT` ranks the rendezvous itself sends every rank the whole list, and its routes. That is
O(p^2) bytes in one process. Beyond that it sends the list once, to the first rank of the first host. Each
other rank gets it from one that has it, along a tree with at most two times :data:`FAN_OUT` branches at each
rank: between the first ranks of the hosts, and inside each host. Every rank is told the digest of the list by
the rendezvous itself, so no rank that passes it on can change it unnoticed.

On more than :data:`~.routing.MAX_TURNS` hosts, the first rank of each host also decides by itself about the
pairs of hosts that are its share, and reports only those hosts that it has not reached.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from ..errors import ProtocolError
from ..transport.routes import Attempt
from ..wire.messages import Message, body_of
from .membership import Located, Member
from .routing import Routing

MAX_DIRECT = 16
FAN_OUT = 8
MAX_EXPLAINED = 100
"""For so many hosts that a rank has not reached it reports why: a report has a limited length."""


class ListedMember(NamedTuple):
    """A rank, as the list describes it.

    Attributes:
        rank, host, host_index, local_rank: its place in the job.
        machine: identifies its machine.
        addresses: where it listens while the job starts.
    """

    rank: int
    host: str
    host_index: int
    local_rank: int
    machine: str
    addresses: List[Dict[str, Any]]


def list_of(members: Sequence[Member]) -> Message:
    """The list, as a message.

    Args:
        members: in rank order.
    """
    rows = [{**item.describe(), "machine": item.machine, "addresses": item.addresses} for item in members]
    return {"type": "members", "members": rows}


def digest_of(listing: Message) -> str:
    """The SHA-256 of the list as it travels, as hex digits."""
    return hashlib.sha256(body_of(listing)).hexdigest()


def members_of(listing: Message, digest: str) -> List[ListedMember]:
    """The ranks in a list, in rank order.

    Args:
        listing: the list.
        digest: what the rendezvous has sent as its digest.

    Raises:
        ProtocolError: it is not the list of the rendezvous.
    """
    if digest_of(listing) != digest:
        raise ProtocolError("the list of ranks is not the one that the rendezvous has sent")
    if [item["rank"] for item in listing["members"]] != list(range(len(listing["members"]))):
        raise ProtocolError("the list of ranks is not in their order")
    return [
        ListedMember(
            item["rank"], item["host"], item["host_index"], item["local_rank"], item["machine"],
            item["addresses"],
        )
        for item in listing["members"]
    ]  # fmt: skip


def sources_of(members: Sequence[Located]) -> Dict[int, Optional[Located]]:
    """By rank, the rank from which it gets the list; None: from the rendezvous.

    Args:
        members: in rank order.
    """
    leaders = leaders_of(members)
    number = {leader.host_index: index for index, leader in enumerate(leaders)}
    places = {(item.host_index, item.local_rank): item for item in members}
    sources: Dict[int, Optional[Located]] = {}
    for item in members:
        index = number[item.host_index]
        if item.local_rank:
            sources[item.rank] = places[item.host_index, (item.local_rank - 1) // FAN_OUT]
        else:
            sources[item.rank] = leaders[(index - 1) // FAN_OUT] if index else None
    return sources


def leaders_of(members: Sequence[Located]) -> List[Located]:
    """The first ranks of the hosts."""
    return [item for item in members if item.local_rank == 0]


def decides(own: Located, other: Located) -> bool:
    """Return whether the pair of these two hosts is the share of the first one.

    Of each pair it is that of just one end.
    """
    odd = (own.host_index + other.host_index) % 2 == 1
    return odd if own.host_index < other.host_index else not odd


class Share:
    """The pairs of hosts about which one rank decides: it alone dials, measures and chooses.

    Args:
        own: the first rank of a host.
        targets: those of the other hosts.
        attempts: what has become of dialling them.
    """

    def __init__(
        self, own: Located, targets: Sequence[Located], attempts: Sequence[Mapping[str, Any]]
    ) -> None:
        self._own = own
        pairs = [(min(own.rank, item.rank), max(own.rank, item.rank)) for item in targets]
        reports = {own.rank: [Attempt.from_json(item) for item in attempts]}
        self._routing = Routing([own, *targets], reports, pairs)
        self._unreached = self._routing.unreached()
        self._routing.leave_out(self._unreached)

    def wanted(self) -> List[Dict[str, Any]]:
        """Return what is to be measured now; empty once all routes are chosen."""
        return self._routing.wanted().get(self._own.rank, [])

    def measured(self, speeds: Sequence[Mapping[str, Any]]) -> None:
        """What has been measured."""
        self._routing.measured(self._own.rank, speeds)

    def report(self) -> Message:
        """To the rendezvous: which hosts have not been reached, and why."""
        told = self._unreached[:MAX_EXPLAINED]
        attempts = [item.to_json() for pair in told for item in self._routing.tried(pair)]
        unreached = [high if low == self._own.rank else low for low, high in self._unreached]
        return {"type": "decided", "attempts": attempts, "unreached": unreached}

    def ways(self) -> List[Dict[str, Any]]:
        """Return how the ranks of this host reach those of the hosts in this share."""
        return self._routing.ways().get(self._own.host_index, [])


def shares_of(own: Located, members: Sequence[Located], shared: bool) -> List[Located]:
    """The ranks that the first rank of a host dials in order to find routes.

    Args:
        own: that rank.
        members: all ranks.
        shared: whether each pair of hosts is the share of one end; otherwise both ends dial.
    """
    others = [item for item in leaders_of(members) if item.rank != own.rank]
    return [item for item in others if not shared or decides(own, item)]


