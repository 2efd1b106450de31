"""The registry of dispatchers and workers that prepare data: the state behind :mod:`.service`, without I/O.

There are ``dispatchers``, each with the same number of workers. Processes of two jobs are clients: those that
prepare data (the compute job) and those that train. A client that watches a dispatcher gets its progress, at
once and whenever it changes; a client that attends is notified when training is over. The registry has no
time limits for this: each client has its own, and names the missing workers from the last progress.

Training processes stay connected. If the last of them is gone without having reported that training is over,
another may connect for a while, as when a job that crashed is started again; then training is over, too.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Set

from ..clock import is_due
from ..errors import ProtocolError
from ..rendezvous.actions import Send, Timer
from ..wire.messages import Message

_MAX_ADDRESS_BYTES = 300
_OVER = "training has ended, and the compute job is shutting down"


class Registry:
    """The registered dispatchers and workers, and the clients that wait for them.

    Args:
        dispatchers: how many there will be.
        workers: how many each of them will have: dispatcher 0 the workers 0 to ``workers - 1``, and so on.
        grace_s: for how many seconds others may connect when all training processes are gone.

    Attributes:
        over: whether training has ended.
    """

    def __init__(self, dispatchers: int, workers: int, grace_s: float) -> None:
        self.over = False
        self._reason = ""
        self._grace_s = grace_s
        self._training: Set[int] = set()
        self._no_training_since_s: Optional[float] = None
        self._dispatchers = dispatchers
        self._workers = workers
        self._addresses: Dict[int, str] = {}
        self._present: Set[int] = set()
        self._watching: Dict[int, int] = {}
        self._awaiting_end: Set[int] = set()

    def received(self, connection: int, message: Message) -> List[Send]:
        """Handle a message; the messages to send.

        Raises:
            ProtocolError: the registry takes no such message.
        """
        kind = message["type"]
        if kind == "attend":
            self._awaiting_end.add(connection)
            return [Send(connection, self._end())] if self.over else []
        if kind == "finish":
            self.over = True
            return [Send(connection, {"type": "noted"}), *self._announce_end(connection)]
        if kind == "train" and not self.over:
            self._training.add(connection)
            self._no_training_since_s = None
            return [Send(connection, {"type": "noted"})]
        if kind == "train":
            return [Send(connection, {"type": "denied", "reason": _OVER})]
        if kind not in ("dispatcher", "worker", "watch"):
            raise ProtocolError(f"the registry of data workers takes no {kind!r}")
        number = int(message["number" if kind == "dispatcher" else "dispatcher"])
        reason = self._objection(kind, number, message)
        if reason:
            return [Send(connection, {"type": "denied", "reason": reason})]
        if kind == "watch":
            self._watching[connection] = number
            return [Send(connection, self._progress(number))]
        if kind == "dispatcher":
            self._addresses[number] = str(message["address"])
        else:
            self._present.add(int(message["number"]))
        return [Send(connection, {"type": "noted"}), *self._announce(number)]

    def lost(self, connection: int, now_s: float) -> List[Timer]:
        """A connection has ended; the timers to set, each for a call of :meth:`tick`."""
        self._watching.pop(connection, None)
        self._awaiting_end.discard(connection)
        if connection not in self._training:
            return []
        self._training.remove(connection)
        if self._training or self.over:
            return []
        self._no_training_since_s = now_s
        return [Timer(self._grace_s)]

    def tick(self, now_s: float) -> List[Send]:
        """Time has passed: end training if all training processes have been gone for long enough."""
        since_s = self._no_training_since_s
        if self.over or since_s is None or not is_due(since_s + self._grace_s, now_s):
            return []
        self.over = True
        self._reason = (
            f"The job that trained is gone: its last process hung up {self._grace_s:g} s ago without "
            "saying that training is over (compute_client().shutdown()), and no other has come since. The "
            "compute job ends."
        )
        return self._announce_end()

    def _end(self) -> Message:
        return {"type": "over", "reason": self._reason}

    def _announce_end(self, but: int = -1) -> List[Send]:
        return [Send(other, self._end()) for other in sorted(self._awaiting_end - {but})]

    def _objection(self, kind: str, number: int, message: Message) -> str:
        if self.over:
            return _OVER
        if not 0 <= number < self._dispatchers:
            return (
                f"there is no dispatcher {number}: there are {self._dispatchers}, numbered from 0. With more "
                "than one dispatcher every training rank has its own, so there must be as many as those"
            )
        if kind == "worker" and int(message["number"]) not in self._workers_of(number):
            own = self._workers_of(number)
            return f"worker {message['number']} is not one of dispatcher {number}'s: {own[0]} to {own[-1]}"
        if kind == "dispatcher":
            address, registered = str(message["address"]), self._addresses.get(number)
            if not address or len(address) > _MAX_ADDRESS_BYTES:
                return f"a dispatcher needs an address of at most {_MAX_ADDRESS_BYTES} bytes"
            if registered not in (None, address):
                return f"dispatcher {number} is registered already, at {registered} and not at {address}"
        return ""

    def _workers_of(self, number: int) -> range:
        return range(number * self._workers, (number + 1) * self._workers)

    def _progress(self, number: int) -> Message:
        missing = [worker for worker in self._workers_of(number) if worker not in self._present]
        return {"type": "standing", "address": self._addresses.get(number, ""), "missing": missing}

    def _announce(self, number: int) -> List[Send]:
        watching = sorted(connection for connection, other in self._watching.items() if other == number)
        return [Send(connection, self._progress(number)) for connection in watching]
