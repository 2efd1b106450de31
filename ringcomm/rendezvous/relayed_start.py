"""The start of a rank that gets the list of all ranks from another rank; see :mod:`.member_list`."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from ..errors import ProtocolError
from ..transport.nics import machine
from ..wire.auth import Claim, Purpose
from ..wire.messages import Message
from .links import LinkSetup, SendMessage
from .member_list import ListedMember, Share, members_of, shares_of
from .membership import as_target
from .probe import PROBE_AGAIN_S, PROBE_S
from .relay import Relay, Source
from .routing import routes_of


class RelayedStart:
    """From the rank that the rendezvous has assigned to the routes to all others.

    Args:
        setup: makes the links.
        assignment: the rendezvous' message.
        send: sends a message to the rendezvous.
        named: called with the description of all ranks, once it is there.
        link: called with the routes to them.
    """

    def __init__(
        self,
        setup: LinkSetup,
        assignment: Message,
        send: SendMessage,
        named: Callable[[List[Dict[str, Any]]], None],
        link: Callable[[List[Dict[str, Any]]], None],
    ) -> None:
        self._setup = setup
        self._send = send
        self._named = named
        self._link = link
        self._digest = str(assignment["digest"])
        self._shared = bool(assignment["shared"])
        self._members: List[ListedMember] = []
        self._share: Optional[Share] = None
        self._source_rank = -1
        self._why = ""
        self._spoiled = self._fetched = False
        self._relay = setup.relay = Relay(setup.reactor, int(assignment["rank"]))
        setup.assign_rank(int(assignment["rank"]), int(assignment["generation"]))
        for target in assignment["sources"][:1]:
            self._source_rank = int(target["rank"])
            claim = Claim(Purpose.MEMBERS, setup.job, setup.generation, setup.rank, self._source_rank)
            # A rank of this host that does not answer is busy; for another host there is another way.
            limit_s = PROBE_AGAIN_S if target["machine"] == machine() else PROBE_S
            self._relay.source = Source(
                setup.reactor, setup.interfaces, setup.key, claim, target, setup.encryption, limit_s,
                self._received, self._source_ended,
            )  # fmt: skip
            if target["machine"] != machine():
                # A way may let small messages through and lose long ones.
                setup.reactor.after(limit_s + PROBE_AGAIN_S, self._source_overdue)

    @property
    def _own(self) -> ListedMember:
        return self._members[self._setup.rank]

    def take_list(self, listing: Message) -> None:
        """The list of all ranks has arrived.

        Raises:
            ProtocolError: it is not the list of the rendezvous.
        """
        if self._members:
            return
        members = members_of(listing, self._digest)
        if self._setup.rank not in range(len(members)):
            raise ProtocolError(f"the list of ranks does not contain rank {self._setup.rank}")
        self._members = members
        self._named(listing["members"])
        mates = {item.rank for item in members if item.host_index == self._own.host_index}
        self._relay.pass_on_list(listing, mates)
        if self._own.local_rank == 0:
            self._relay.close_source()
            self._probe()
        elif self._relay.source is None:
            self._report_unlinked()

    def take_ways(self, message: Message) -> None:
        """How to reach the other hosts: from the rendezvous what it has chosen, from a rank of this host all.

        Raises:
            ProtocolError: it comes too early.
        """
        if not self._members:
            raise ProtocolError("the ways to other hosts have come before the list of ranks")
        ways = list(message["ways"])
        if self._share is not None:
            ways += self._share.ways()
        self._relay.pass_on_ways({"type": "ways", "ways": ways})
        self._relay.close_source()
        self._link(routes_of(self._own, self._members, ways))

    # ---- the rank that this one gets the list from -------------------------------------------

    def _received(self, message: Message) -> None:
        if message["type"] == "members":
            self._spoiled = True  # It is the right list, or the end.
            self.take_list(message)
        elif message["type"] == "ways" and self._members and self._own.local_rank:
            self.take_ways(message)
        else:
            raise ProtocolError(f"it may not send {message['type']!r}")

    def _source_ended(self, reason: str) -> None:
        """Without that rank the rendezvous sends the list; but inside a host nothing else sends the ways."""
        self._relay.source = None
        self._why = f"rank {self._source_rank}, which passes on the list of ranks, did not: {reason}"
        if self._members or self._spoiled:
            self._report_unlinked()
        else:
            self._fetch(self._why)

    def _source_overdue(self) -> None:
        if self._relay.source is not None and not self._members:
            # It stays open: within a host the ways come over it as well.
            self._fetch(f"rank {self._source_rank} has not passed on the list of ranks in time")

    def _fetch(self, reason: str) -> None:
        """Ask the rendezvous for the list, which it sends once."""
        if not self._fetched:
            self._fetched = True
            self._send({"type": "fetch", "reason": reason})

    def _report_unlinked(self) -> None:
        self._send({"type": "unlinked", "peer": self._source_rank, "reason": self._why})

    # ---- the first rank of a host ------------------------------------------------------------

    def _probe(self) -> None:
        """Find out which addresses of the other hosts lead there, or those of the hosts in its share."""
        targets = shares_of(self._own, self._members, self._shared)
        if not self._shared and not targets:
            return  # There is one host: the rendezvous does not wait for a report.

        def probed(attempts: List[Dict[str, Any]]) -> None:
            self._share = Share(self._own, targets, attempts)
            self._measure(self._share)

        self._setup.probe([as_target(item) for item in targets], report=probed if self._shared else None)

    def _measure(self, share: Share) -> None:
        """Measure where several networks connect this host to another, until all routes are chosen."""
        wanted = share.wanted()
        if not wanted:
            self._send(share.report())
            return

        def measured(speeds: List[Dict[str, Any]]) -> None:
            share.measured(speeds)
            self._measure(share)

        self._setup.measure(wanted, measured)
