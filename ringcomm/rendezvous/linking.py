"""The progress of one generation's members in connecting to each other. Pure.

The first ranks of the hosts probe which addresses lead where, and measure where several networks connect two
hosts. Then every rank builds its links.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set

from ..transport.routes import Attempt
from ..wire.messages import Message
from .actions import Action, Send
from .link_table import check_ranges, link_rows
from .membership import Member, as_target
from .routing import Known, Routes, Routing, routes_of, with_second_round


class Linking:
    """The probes, the measurements, the routes and the links of one generation. ``members``: in rank order,
    with hosts and local ranks assigned; ``known``: measurements of earlier generations.
    """

    def __init__(
        self, members: Sequence[Member], generation: int, known: Optional[Known] = None
    ) -> None:
        self._members = list(members)
        self._generation = generation
        self._known = known or {}
        self._leaders = [member for member in members if member.local_rank == 0]
        # probes and measurements have ended: :meth:`link` can choose
        self.probed_all = len(self._leaders) == 1
        self._probing = {leader.rank for leader in self._leaders}
        self._probed_again = False
        self._reports: Dict[int, List[Attempt]] = {}
        self._measuring: Set[int] = set()
        self._routing = Routing((), {})
        self._routes: Routes = {}
        self._links: Dict[int, List[Dict[str, Any]]] = {}
        self._unlinked = len(self._members)

    def begin(self) -> List[Action]:
        """Send every member its rank, and the first ranks of the hosts their targets to probe."""
        rows = [member.describe() for member in self._members]
        return [Send(member.connection, self._assignment(member, rows)) for member in self._members]

    def _assignment(self, member: Member, rows: List[Dict[str, Any]]) -> Message:
        others = [leader for leader in self._leaders if leader is not member]
        return {
            "type": "probe",
            "rank": member.rank,
            "generation": self._generation,
            "members": rows,
            "targets": [as_target(other) for other in others] if member.local_rank == 0 else [],
        }

    def probed(self, member: Member, message: Message) -> List[Action]:
        """Take the attempts of a host's first rank."""
        if member.rank not in self._probing:
            return []
        attempts = [Attempt.from_json(item)._replace(source=member.rank) for item in message["attempts"]]
        self._reports[member.rank] = with_second_round(self._reports.get(member.rank, ()), attempts)
        self._probing.discard(member.rank)
        if self._probing:
            return []
        self._routing = Routing(self._leaders, self._reports, self._known)
        return self._probe_again() or self._measure()

    def _probe_again(self) -> List[Action]:
        """Let ranks dial again, once, the addresses that failed only because they took too long."""
        targets = {} if self._probed_again else self._routing.to_probe_again()
        self._probed_again, self._probing = True, set(targets)
        ranks = ((self._members[rank].connection, found) for rank, found in targets.items())
        return [Send(connection, {"type": "probe_again", "targets": found}) for connection, found in ranks]

    def measured(self, member: Member, message: Message) -> List[Action]:
        """Take the measurements of a host's first rank."""
        if member.rank not in self._measuring:
            return []
        self._routing.measured(member.rank, message["speeds"])
        self._measuring.discard(member.rank)
        return [] if self._measuring else self._measure()

    def _measure(self) -> List[Action]:
        wanted = self._routing.wanted()
        self.probed_all = not wanted
        self._measuring = set(wanted)
        requests = ((self._members[rank], pairs) for rank, pairs in wanted.items())
        return [Send(item.connection, {"type": "measure", "pairs": pairs}) for item, pairs in requests]

    def known(self) -> Known:
        """Return the measurements between hosts, for later generations."""
        return {**self._known, **self._routing.known()}

    def link(self) -> List[Action]:
        """Choose routes, and have every rank build its links. Raises NoRoute between unreachable hosts."""
        self._routes = self._routing.routes()
        ways = self._routing.ways()
        routes = (
            (item.connection, routes_of(item, self._members, ways.get(item.host_index, [])))
            for item in self._members
        )
        return [Send(connection, {"type": "link", "routes": found}) for connection, found in routes]

    def linked(self, member: Member, links: List[Dict[str, Any]]) -> bool:
        """Note that a rank has an authenticated link to every other; return whether all ranks have. Raises
        ProtocolError if it reports a link to a rank that does not exist.
        """
        check_ranges(links, len(self._members))
        self._unlinked -= not member.linked
        member.linked = True
        self._links[member.rank] = links
        return not self._unlinked

    def rows(self) -> List[Dict[str, Any]]:
        """Return the first rows of the table of links; see :func:`.link_rows`."""
        return link_rows(self._members, self._links, self._routes)
