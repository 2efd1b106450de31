"""Which processes prepare data, and for whom: the state behind :mod:`.compute`, without sockets.

There are ``dispatchers``, each with the same number of workers. Processes of two jobs ask: those that prepare
data (the compute job) and those that train. Whoever watches a dispatcher is told how it stands, at once and
whenever that changes; whoever attends is told when training is over. Nobody is waited for here: each process
has its own limit, and knows from the last word that it got who was missing.
"""

from __future__ import annotations

from typing import Dict, List, Set

from ..errors import ProtocolError
from ..rendezvous.actions import Tell
from ..wire.messages import Message

_MOST_ADDRESS_BYTES = 300


class Registry:
    """Who is there.

    Args:
        dispatchers: how many there will be.
        workers: how many each of them will have: dispatcher 0 the workers 0 to ``workers - 1``, and so on.

    Attributes:
        over: whether training has ended.
    """

    def __init__(self, dispatchers: int, workers: int) -> None:
        self.over = False
        self._dispatchers = dispatchers
        self._workers = workers
        self._addresses: Dict[int, str] = {}
        self._present: Set[int] = set()
        self._watching: Dict[int, int] = {}
        self._attending: Set[int] = set()

    def heard(self, connection: int, message: Message) -> List[Tell]:
        """Take a message; what is to be told to whom.

        Raises:
            ProtocolError: nobody may send such a message here.
        """
        kind = message["type"]
        if kind == "attend":
            self._attending.add(connection)
            return [Tell(connection, {"type": "over"})] if self.over else []
        if kind == "finish":
            self.over = True
            told = [Tell(other, {"type": "over"}) for other in sorted(self._attending - {connection})]
            return [Tell(connection, {"type": "noted"}), *told]
        if kind not in ("dispatcher", "worker", "watch"):
            raise ProtocolError(f"the registry of those that prepare data takes no {kind!r}")
        number = int(message["number" if kind == "dispatcher" else "dispatcher"])
        reason = self._objection(kind, number, message)
        if reason:
            return [Tell(connection, {"type": "denied", "reason": reason})]
        if kind == "watch":
            self._watching[connection] = number
            return [Tell(connection, self._standing(number))]
        if kind == "dispatcher":
            self._addresses[number] = str(message["address"])
        else:
            self._present.add(int(message["number"]))
        return [Tell(connection, {"type": "noted"}), *self._announce(number)]

    def lost(self, connection: int) -> None:
        """That connection has ended."""
        self._watching.pop(connection, None)
        self._attending.discard(connection)

    def _objection(self, kind: str, number: int, message: Message) -> str:
        if self.over:
            return "training has ended, and those that prepare data are shutting down"
        if not 0 <= number < self._dispatchers:
            return (
                f"there is no dispatcher {number}: there are {self._dispatchers}, numbered from 0. With more "
                "than one dispatcher every training rank has its own, so there must be as many as those"
            )
        if kind == "worker" and int(message["number"]) not in self._workers_of(number):
            own = self._workers_of(number)
            return f"worker {message['number']} is not one of dispatcher {number}'s: {own[0]} to {own[-1]}"
        if kind == "dispatcher":
            address, known = str(message["address"]), self._addresses.get(number)
            if not address or len(address) > _MOST_ADDRESS_BYTES:
                return "a dispatcher needs an address, and a shorter one than that"
            if known not in (None, address):
                return f"dispatcher {number} is registered already, at {known} and not at {address}"
        return ""

    def _workers_of(self, number: int) -> range:
        return range(number * self._workers, (number + 1) * self._workers)

    def _standing(self, number: int) -> Message:
        missing = [worker for worker in self._workers_of(number) if worker not in self._present]
        return {"type": "standing", "address": self._addresses.get(number, ""), "missing": missing}

    def _announce(self, number: int) -> List[Tell]:
        watching = sorted(connection for connection, other in self._watching.items() if other == number)
        return [Tell(connection, self._standing(number)) for connection in watching]
