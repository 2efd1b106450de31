"""Jobs whose processes another system starts and keeps: Ray, Dask or Spark.

The driver makes a :class:`PlacedJob`, which serves the rendezvous and has a :class:`Ticket` for each rank.
The system brings each ticket to a worker, which takes part in the job with :func:`call`, or with
:func:`enter` if it calls several functions. From then on the ranks watch each other, and the rendezvous
reports a failure to the driver: none of them waits for the system to notice that a worker has ended.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .. import api
from ..calls.objects import pack_error, pack_value, remote_error, unpack
from ..clock import Deadline
from ..config import Settings, Slot
from ..configuration.membership import assign, format_endpoint
from ..errors import ConfigError, RemoteError, RingcommError
from ..rendezvous.embedded import EmbeddedRendezvous
from ..rendezvous.membership import Notice, Seat
from ..storage.keys import key_text, make_certificate
from ..transport.nics import machine

logger = logging.getLogger("ringcomm")

_POLL_S = 0.1
ARRIVE_S = 5.0  # longest time of the ranks' exceptions to the driver, after an abort
_LOST_S = 1.0  # longest wait for that of a rank whose process has ended, if all others have arrived


@dataclass(frozen=True)
class Ticket:
    """The facts that a worker needs to become one rank of a job. It contains the job's key."""

    job: str
    rank: int
    size: int
    local_rank: Optional[int]  # None if the driver does not know the hosts
    variables: Mapping[str, str] = field(repr=False)  # the RINGCOMM_* variables of the rank


class Host(NamedTuple):
    """The host of a worker: its identity, and its name in messages."""

    identity: str
    name: str


class RankOutcome(NamedTuple):
    """The result or the error of a rank; ``facts`` are those of :func:`ringcomm.calls.objects.unpack`."""

    facts: Dict[str, Any]
    lost: bool = False  # the error is the system's, which reports that the worker has ended

    @property
    def ok(self) -> bool:
        return bool(self.facts["ok"])

    @classmethod
    def of_error(cls, error: BaseException) -> RankOutcome:
        """Return the outcome of a rank about which only the system's error is known."""
        return cls(unpack(pack_error(error)), lost=True)

    def describe(self) -> str:
        """Return the error in one line."""
        lines = str(self.facts["summary"]).splitlines()
        return lines[0] if lines else "an error"


class PlacedJob:
    """The driver's side of a job. ``hosts`` are those of the workers in rank order, or None if they are not
    known yet; ``limit`` names what sets the time limit of the start.
    """

    def __init__(
        self, system: str, size: int, settings: Settings, hosts: Optional[Sequence[Host]] = None,
        limit: str = "RINGCOMM_START_TIMEOUT of the driver's process",
    ) -> None:  # fmt: skip
        self.id = f"{system}-{secrets.token_hex(8)}"
        self.size = size
        self._slots = _slots(size, hosts)
        self._hosts = [f"a {system} worker"] * size if hosts is None else [host.name for host in hosts]
        self.failed = threading.Event()  # the ranks have been aborted
        self._leaving = False
        self._embedded: Optional[EmbeddedRendezvous] = None
        self._when_failed: List[Callable[[], None]] = []
        common = dict(settings.to_environment())
        if size > 1:
            common.update(self._serve(settings, hosts is not None, limit))
        local = [slot.local for slot in self._slots] if hosts is not None else [None] * size
        self.tickets = [
            Ticket(self.id, rank, size, local[rank], {**common, **self._place(rank)}) for rank in range(size)
        ]

    def _serve(self, settings: Settings, planned: bool, limit: str) -> Dict[str, str]:
        """Start the rendezvous; return the variables that all ranks need to reach it."""
        key = secrets.token_bytes(32)
        certificate = make_certificate() if settings.encrypt else ""
        seats = [Seat(slot, host) for slot, host in zip(self._slots, self._hosts)] if planned else []
        self._embedded, endpoints = EmbeddedRendezvous.serve(
            key, certificate, self.id, self.size, settings, notify=self._notice, seats=seats, limit=limit
        )
        return {
            "RINGCOMM_JOB": self.id,
            "RINGCOMM_RENDEZVOUS": ",".join(format_endpoint(*item) for item in endpoints),
            "RINGCOMM_RENDEZVOUS_MACHINE": machine(),
            "RINGCOMM_KEY": key_text(key, certificate),
        }

    def _place(self, rank: int) -> Dict[str, str]:
        slot = self._slots[rank]
        place = {"RANK": str(rank), "SLOT": f"{slot.host_index}:{slot.local}"} if self.size > 1 else {}
        return {f"RINGCOMM_{name}": text for name, text in {"SIZE": str(self.size), **place}.items()}

    def _notice(self, notice: Notice) -> None:
        if notice.text:
            logger.log(logging.WARNING if notice.kind == "warning" else logging.INFO, "%s", notice.text)
        if notice.kind == "failed":
            self._leaving = bool(notice.detail.get("leaving")) or notice.culprit is None
            self.failed.set()
            for callback in self._when_failed:
                _start_thread(callback)

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Register a function to be called when the ranks have been aborted, in a thread; perhaps twice."""
        self._when_failed.append(callback)
        if self.failed.is_set():
            _start_thread(callback)

    @property
    def failure(self) -> Optional[RingcommError]:
        """Return the error that all ranks were aborted with; None as long as the job has not failed."""
        return None if self._embedded is None else self._embedded.failure

    @property
    def culprit(self) -> int:
        """Return the rank that this error names; -1 if there is none."""
        return -1 if self._embedded is None else self._embedded.culprit

    def ended(self, rank: int, how: str) -> None:
        """Report that a rank has failed with the error text ``how``; the others then do not wait for it."""
        if self._embedded is not None:
            self._embedded.process_exited(rank, how, False)

    def collect(self, poll: Callable[[float], Iterable[Tuple[int, RankOutcome]]]) -> List[Any]:
        """Return the ranks' results in rank order, when all have returned; RemoteError if one failed. After a
        failure the other ranks have :data:`ARRIVE_S` to return: then their processes can be ranks of the next
        job, which the caller may start at once. ``poll`` returns the ranks that ended since its last call.
        """
        outcomes: Dict[int, RankOutcome] = {}
        deadline: Optional[Deadline] = None
        while len(outcomes) < self.size and (deadline is None or not deadline.expired()):
            for rank, outcome in poll(_POLL_S):
                outcomes[rank] = outcome
                if not outcome.ok:
                    self.ended(rank, outcome.describe())
            failed = self.failed.is_set()
            if deadline is None and (failed or not all(item.ok for item in outcomes.values())):
                deadline = Deadline(ARRIVE_S)
            only_lost = failed and not self._leaving and set(range(self.size)) - {*outcomes} == {self.culprit}
            if only_lost and deadline is not None and deadline.elapsed_s() > _LOST_S:
                break
        self.check(outcomes)
        return [outcomes[rank].facts["value"] for rank in range(self.size)]

    def check(self, outcomes: Mapping[int, RankOutcome]) -> None:
        """Raise the RemoteError of the rank that failed first, if any; outcomes are in order of arrival."""
        failure, culprit = self.failure, self.culprit
        bad = [rank for rank, outcome in outcomes.items() if not outcome.ok]
        known = culprit in bad and not outcomes[culprit].lost
        if known or (failure is None and bad):
            rank = culprit if known else bad[0]
            host = getattr(failure, "host", None) or self._hosts[rank]
            raise remote_error(outcomes[rank].facts, rank, host)
        if failure is not None and len(outcomes) - len(bad) < self.size:
            raise RemoteError(
                str(failure), rank=culprit if culprit >= 0 else None, host=getattr(failure, "host", None)
            ) from failure

    def close(self) -> None:
        """Stop serving the rendezvous. Ranks that are still in the job go on without it."""
        if self._embedded is not None:
            self._embedded.stop(failed=True)


def _start_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="ringcomm-job-failed", daemon=True).start()


def _slots(size: int, hosts: Optional[Sequence[Host]]) -> List[Slot]:
    """Return the place of every rank: the number of its host, and its number there."""
    if hosts is None:
        return [Slot(0, rank) for rank in range(size)]
    order = {identity: index for index, identity in enumerate(dict.fromkeys(item.identity for item in hosts))}
    counts: Dict[str, int] = {}
    slots = []
    for item in hosts:
        counts[item.identity] = counts.get(item.identity, -1) + 1
        slots.append(Slot(order[item.identity], counts[item.identity]))
    return slots


def by_host(workers: Sequence[Any], identity_of: Callable[[Any], str]) -> List[Any]:
    """Return the workers, those of the same host next to each other, for their ranks."""
    order = {name: index for index, name in enumerate(dict.fromkeys(map(identity_of, workers)))}
    return sorted(workers, key=lambda item: order[identity_of(item)])


# ---- in the worker ----------------------------------------------------------------------------------------

_lock = threading.Lock()
_present: Optional[Ticket] = None


def enter(ticket: Ticket) -> None:
    """Make this process a rank: from now on ``init()`` joins the ticket's job."""
    global _present
    with _lock:
        if _present is not None or api.is_initialized():
            here = "a rank" if _present is None else f"rank {_present.rank} of {_present.job}"
            raise ConfigError(
                f"This process cannot be rank {ticket.rank} of {ticket.job}: it is {here} already. Use "
                "workers that are processes of their own, and for two jobs at once other workers for each."
            )
        _present = ticket
        assign(ticket.variables)


def end(error: Optional[BaseException] = None) -> None:
    """Leave the job, if this process is in one; ``error`` is what the rank's function raised."""
    global _present
    try:
        # Process groups of PyTorch that the function has left: the next job needs its own.
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
        if error is None:
            api.shutdown()
        else:
            api.leave(error)
    finally:
        with _lock:
            _present = None
            assign({})


def call(ticket: Ticket, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Join the job as a rank, call a function, and leave the job; return the function's result. The job is
    joined before the call, so that the errors of all ranks name a rank whose function fails at once.
    """
    enter(ticket)
    try:
        api.init()
        value = fn(*args, **kwargs)
    except BaseException as error:
        end(error)
        raise
    end()
    return value


def attempt(function: Callable[[], Any]) -> bytes:
    """Call a function; return its result or error for :func:`ringcomm.calls.objects.unpack`."""
    try:
        return pack_value(function())
    except Exception as error:  # noqa: BLE001  whatever the user's function raises goes to the driver
        return pack_error(error, skip=1)


def settings_for(start_timeout_s: Optional[float] = None, iface: Optional[str] = None) -> Settings:
    """Return the driver's settings, with the given values in place of its own."""
    changes: Dict[str, Any] = {"start_timeout_s": start_timeout_s, "iface": iface}
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(Settings.from_environment(), **changes)
