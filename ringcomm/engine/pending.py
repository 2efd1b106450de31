"""A rank's own operations between submission and execution: pure bookkeeping."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any, Deque, Dict, Iterable, List, Optional, Sequence, Tuple

from ..collective.weighted import Total
from ..errors import DuplicateNameError
from ..wire.messages import Message
from ..wire.signature import Key, Signature
from .announcements import masks_as_text
from .cache import KnownIds
from .piggyback import may_piggyback, pack
from .request import MAX_SITES, Request

Work = Tuple[Signature, Optional[Request]]


class Pending:
    """What this rank has submitted and not finished.

    :meth:`add` is called by any thread under the engine's lock, as is everything else here.
    """

    def __init__(self) -> None:
        self.ids = KnownIds()
        self._requests: Dict[Key, Request] = {}
        self._later: Dict[Key, Deque[Request]] = {}
        self._unannounced: List[Request] = []
        self._counts: Dict[int, int] = {}
        self._sites: Dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def unannounced(self) -> bool:
        """Whether :meth:`announce` has something to say."""
        return bool(self._unannounced)

    @property
    def announced(self) -> bool:
        """Whether rank 0 knows of an operation that has not ended."""
        return len(self._requests) > len(self._unannounced) or bool(self._later)

    def add(self, request: Request) -> None:
        """Add an operation. Of messages between two ranks with one name, each waits for the one before it."""
        signature = request.signature
        if not signature.name:
            count = self._counts.get(signature.process_set, 0) + 1
            self._counts[signature.process_set] = count
            request.key = signature.key(count)
        elif request.key in self._requests:
            if request.key.process_set < 0:
                self._later.setdefault(request.key, deque()).append(request)
                return
            older = self._requests[request.key]
            raise DuplicateNameError(
                f"The operation {signature.name!r} at {request.site} has the same name as another one that "
                f"is currently being processed, submitted at {older.site}. Wait for that one first, or give "
                "them different names."
            )
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self._requests[request.key] = request
        self._unannounced.append(request)

    def named(self, name: str, process_set: int) -> Optional[Request]:
        """Return the operation of this name that is on its way, or None."""
        return self._requests.get(Key(process_set, name, 0))

    def new(self) -> Sequence[Request]:
        """Return all operations, if rank 0 has been told of none of them; otherwise nothing."""
        return () if self.announced else self._unannounced

    def hold(self) -> None:
        """Do not announce what has not been announced yet, unless :meth:`announce_again` returns it."""
        self._unannounced = []

    def announce_again(self, requests: Sequence[Request]) -> None:
        """Announce operations that were held back."""
        self._unannounced = [*requests, *self._unannounced]

    def announce(self, urgent: bool, rank: int) -> Optional[Message]:
        """Return what rank 0 has not been told yet. ``rank`` is this one."""
        if not self._unannounced:
            return None
        known: List[int] = []
        piggybacked: List[List[Any]] = []
        fresh: List[List[Any]] = []
        sites: List[str] = []
        # In the order in which rank 0 reads the operations: known ones, short ones, new ones.
        kinds: Tuple[List[Request], List[Request], List[Request]] = ([], [], [])
        for request in self._unannounced:
            number = self.ids.id_of(request.signature)
            if number is None:
                kinds[2].append(request)
                fresh.append([request.signature.to_json(), request.key.number, self._site(request, sites)])
            elif request.urgent and may_piggyback(request):
                kinds[1].append(request)
                site = self._site(request, sites)
                piggybacked.append([number, request.key.number, site, pack(request, rank)])
            else:
                kinds[0].append(request)
                known += (number, request.key.number, self._site(request, sites))
        self._unannounced = []
        in_order = [request for requests in kinds for request in requests]
        return {
            "type": "ready", "known": known, "carried": piggybacked, "fresh": fresh, "sites": sites,
            "weights": [request.weight for request in in_order if request.signature.weighted],
            "absent": masks_as_text([request.absent for request in in_order]), "urgent": urgent,
        }  # fmt: skip

    def _site(self, request: Request, fresh: List[str]) -> int:
        """The number of the line that submitted it, from 1; a new one is added to ``fresh``. 0: too many."""
        number = self._sites.get(request.site, 0)
        if not number and len(self._sites) < MAX_SITES:
            number = self._sites[request.site] = len(self._sites) + 1
            fresh.append(request.site)
        return number

    def learn(self, fresh: Sequence[Sequence[Any]]) -> None:
        """Rank 0 has given signatures numbers."""
        for number, data in fresh:
            self.ids.learn(int(number), Signature.from_json(data))

    def take_bucket(
        self, run: Sequence[int], totals: Iterable[Total] = (), absent: Iterable[int] = ()
    ) -> List[Work]:
        """Return the members of a bucket, no longer pending; without a request if this rank has joined.

        ``run`` has the numbers of signature and operation of each member.
        """
        bucket: List[Work] = []
        totals, absent = iter(totals), iter(absent)
        for number, count in zip(run[::2], run[1::2]):
            signature = self.ids.signature(number)
            request = self.take(signature.key(count))
            everywhere = next(absent, 0)
            if request is not None:
                request.absent = everywhere
            if signature.weighted:
                total = next(totals, None)
                if total is None:
                    raise ValueError("a weighted average without a sum of weights")
                if request is not None:
                    request.total = total
            bucket.append((signature, request))
        return bucket

    def take(self, key: Key) -> Optional[Request]:
        """One operation, which is no longer pending; None if this rank has not submitted it.

        It has joined then, and counts operations without a name as if it had submitted them.
        """
        if key.number:
            now = self._counts.get(key.process_set, 0)
            self._counts[key.process_set] = max(now, key.number)
        request, later = self._requests.pop(key, None), self._later.get(key)
        if later:
            self._begin(later.popleft())
            if not later:
                del self._later[key]
        return request

    def take_all(self) -> List[Request]:
        """Everything, in the order of submission."""
        requests = self.waiting()
        self._requests.clear()
        self._later.clear()
        self._unannounced.clear()
        return requests

    def waiting(self) -> List[Request]:
        """Everything, in the order of submission; it stays. Messages that wait for others are the last."""
        return [*self._requests.values(), *chain(*self._later.values())]
