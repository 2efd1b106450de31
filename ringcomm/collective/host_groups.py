"""All-reduces of arrays on devices where each host has several: within hosts from device to device.

The stages are those of :mod:`ringcomm.schedule.hierarchy`. The devices of a host reduce and scatter, so that
each holds a chunk of the host's sum; the ranks with the same place on their hosts reduce that chunk over
TCP, through host memory, all places at the same time; the devices of a host gather.

From :mod:`.placement` follows in which call all arrays are on devices first. There each host makes its group
of devices; if one host cannot, no host uses its own, and arrays go through host memory as before.
Every later call begins with an exchange of one number over the links, in which ranks compare their calls (the
devices would wait for each other for ever), and learn if an array is in host memory after all.
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import Any, Callable, List, NamedTuple, Optional, Protocol, Sequence, Tuple

import numpy as np

from ..dtypes import dtype_named
from ..errors import DeviceError, describe_error
from ..group.failures import FailureReporter
from ..ops import Collective, ReduceOp
from ..schedule.hierarchy import Hosts
from ..transport.base import Watch
from ..wire.signature import Signature
from .device_group import TICKET_BYTES, DeviceGroup, DevicePort
from .mirror import Done, Mirror
from .progress import Progress
from .reduce import Kernel
from .totals import Totals

logger = logging.getLogger("ringcomm")

JOIN_S = 120.0
"""How long the devices of a host may take to find each other: NCCL takes seconds."""
_LOOK_S = 0.1
_LAST_S = 5.0
_ABLE, _UNABLE, _ON_HOST = 1, 0, -1


class Reducer(Protocol):
    """What this module uses of a runner; see :class:`~.runner.Runner`."""

    timeout_s: float

    def all_reduce(self, *arguments: Any, **options: Any) -> None:
        """Reduce an array over all ranks."""

    def broadcast(self, *arguments: Any, **options: Any) -> None:
        """Copy an array to all ranks."""

    def exchange(self, *arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
        """Exchange some numbers."""

    def await_copy(self, copy: Done) -> None:
        """Wait for a copy."""

    def progress(self) -> Progress:
        """Return how far it is."""

    def totals(self) -> Totals:
        """Return what it has done."""


class _Answer(NamedTuple):
    """What one rank says before groups are made."""

    able: int
    identity: int
    version: int


class HostGroups:
    """One rank's device in the group of its host, and the exchange with the same place on other hosts.

    Args:
        hosts: the ranks of each host; see :func:`ringcomm.schedule.hierarchy.device_hosts`.
        rank: this rank.
        whole: the runner of all ranks.
        make: a runner of some ranks over the same links.
        reporter: says when the job has been aborted.
        watch: interrupts waits; None: nothing does.

    Attributes:
        active: whether all hosts have groups.
        decided: whether that has been found out.
    """

    def __init__(
        self,
        hosts: Hosts,
        rank: int,
        whole: Reducer,
        make: Callable[[Sequence[int]], Reducer],
        reporter: FailureReporter,
        watch: Optional[Watch],
    ) -> None:
        self.active = self.decided = False
        self._hosts = hosts
        self._rank = rank
        own = next(ranks for ranks in hosts if rank in ranks)
        self._local, self._place = own, own.index(rank)
        self._whole = whole
        self._make = make
        self._reporter = reporter
        self._watch = watch
        self._group: Optional[DeviceGroup] = None
        self._column: Optional[Reducer] = None
        self._exchanging = False
        self._over = threading.Event()

    # ---- making the groups -------------------------------------------------------------------

    def prepare(self, call: Signature, mirror: Optional[Mirror]) -> None:
        """Make the groups, together with all ranks in the same call; log what has come of it.

        Args:
            call: what the program has called.
            mirror: of this rank's array; None if that is in host memory.
        """
        port = None if mirror is None else mirror.port(self)
        answer = _Answer(_ON_HOST, 0, 0)
        if mirror is not None:
            answer = _Answer(_UNABLE, 0, 0)
            if isinstance(port, DevicePort):
                answer = _Answer(_ABLE, port.identity, port.version)
        answers = [_Answer(*map(int, row)) for row in self._exchange(call, answer)]
        if any(other.able == _ON_HOST for other in answers):
            return  # The next call may be better.
        self.decided = True
        reason = str(port) if isinstance(port, str) else _obstacle(answers, self._hosts)
        if not reason:
            assert isinstance(port, DevicePort)
            reason = self._join(call, port)
        self.active = not reason
        if self.active:
            threading.Thread(target=self._look_out, name="ringcomm-devices", daemon=True).start()
        self._log(port, reason)

    def _join(self, call: Signature, port: DevicePort) -> str:
        """Make this host's group; why that, or a group of another host, has failed; empty if none has."""
        local = self._make(self._local)
        ticket, reason = np.zeros(1 + TICKET_BYTES, np.uint8), ""
        if self._place == 0:
            try:
                made = port.ticket()
                ticket[0] = len(made)
                ticket[1 : 1 + len(made)] = np.frombuffer(made, np.uint8)
            except DeviceError as problem:
                reason = str(problem)
        local.broadcast(ticket, 0, "the group of devices")
        if ticket[0]:
            try:
                self._group = self._joined(port, bytes(ticket[1 : 1 + int(ticket[0])]))
            except DeviceError as problem:
                reason = str(problem)
        joined = self._exchange(call, [self._group is not None])[:, 0]
        if joined.all():
            if len(self._hosts) > 1:
                self._column = self._make([ranks[self._place] for ranks in self._hosts])
            return ""
        self._end_group()
        failed = [rank for rank, done in enumerate(joined) if not done]
        return reason or f"rank {failed[0]} could not join the group of its host"

    def _joined(self, port: DevicePort, ticket: bytes) -> DeviceGroup:
        """Join in a thread, so that this one can leave if another member never comes."""
        found: List[Any] = []

        def join() -> None:
            try:
                found.append(port.join(ticket, self._place, len(self._local)))
            except BaseException as problem:  # noqa: BLE001 - raised in the thread that waits
                found.append(problem)
            done.set()

        done = threading.Event()
        threading.Thread(target=join, name="ringcomm-join", daemon=True).start()
        until_s = monotonic() + min(JOIN_S, self._whole.timeout_s)
        while not done.wait(_LOOK_S):
            if self._watch is not None:
                self._watch.check()
            if monotonic() > until_s:
                raise DeviceError(f"the devices of this host have not found each other in {JOIN_S:g} s")
        if isinstance(found[0], DeviceGroup):
            return found[0]
        problem = found[0]
        raise problem if isinstance(problem, DeviceError) else DeviceError(describe_error(problem))

    def _log(self, port: Any, reason: str) -> None:
        many = f"{len(self._local)} devices of {'each' if len(self._hosts) > 1 else 'this'} host"
        if self.active:
            beyond = f", and TCP between {len(self._hosts)} hosts" if self._column is not None else ""
            text = f"All-reduces of arrays on devices use {port.name} between the {many}{beyond}."
        else:
            text = f"All-reduces of arrays on the {many} go through host memory: {reason}."
        logger.log(logging.INFO if self._rank == 0 else logging.DEBUG, "%s", text)

    # ---- running -----------------------------------------------------------------------------

    def all_reduce(self, call: Signature, mirror: Optional[Mirror], fold: Kernel, op: ReduceOp) -> bool:
        """Reduce an array in place, if all ranks' are on devices.

        Args:
            call: what the program has called.
            mirror: of this rank's array; None if that is in host memory.
            fold: the arithmetic of the reduction.
            op: likewise.

        Returns:
            whether it has been reduced; otherwise nothing was done, on any rank.
        """
        if not self._exchange(call, [mirror is not None]).all():
            return False
        group, column = self._group, self._column
        assert mirror is not None and group is not None
        try:
            array = mirror.enter(group, self._whole.await_copy)
            group.scale(array, 1, fold.prescale)
            if column is None:
                group.all_reduce(array, op)
                group.scale(array, fold.divisor, fold.postscale)
            else:
                bounds = even_chunks(call.items, len(self._local))
                group.reduce_scatter(array, bounds, op)
                own = bounds[self._place], bounds[self._place + 1]
                with group.current():
                    self._between_hosts(column, call, mirror.part(array, *own), op)
                group.scale(array[own[0] : own[1]], fold.divisor, fold.postscale)
                group.all_gather(array, bounds)
            mirror.leave(group)
        except BaseException:
            group.abort()
            raise
        return True

    def _between_hosts(self, column: Reducer, call: Signature, part: Mirror, op: ReduceOp) -> None:
        column.timeout_s = self._whole.timeout_s
        self._exchanging = True
        op = ReduceOp.SUM if op == ReduceOp.AVERAGE else op
        try:
            column.all_reduce(part.host, op, call.name, part.host.shape, mirror=part)
        finally:
            self._exchanging = False
        part.finish()

    def _exchange(self, call: Signature, values: Sequence[int]) -> np.ndarray[Any, Any]:
        """One row of numbers from each rank; ranks that make different calls all raise an error."""
        kind, dtype = Collective(call.kind), dtype_named(call.dtypes[0])
        return self._whole.exchange(values, kind, dtype, call.name, (call.items,), call.op)

    # ---- for the runner ----------------------------------------------------------------------

    def progress(self) -> Optional[Progress]:
        """Of the exchange between hosts, while there is one. For any thread."""
        column = self._column
        return column.progress() if column is not None and self._exchanging else None

    def totals(self) -> Optional[Totals]:
        """Return what has been exchanged between hosts. For any thread."""
        return None if self._column is None else self._column.totals()

    def close(self) -> None:
        """Leave the group, when what is queued is done: this rank leaves the job."""
        group = self._group
        if group is not None and self._reporter.abort_error is None:
            queued, until_s = group.queued(), monotonic() + _LAST_S
            try:
                while not queued.poll() and monotonic() < until_s and self._reporter.abort_error is None:
                    self._over.wait(1e-3)
            except DeviceError as problem:
                logger.debug("the last work of the devices has failed: %s", problem)
        self._end_group()
        self._over.set()

    def _end_group(self) -> None:
        group, self._group = self._group, None
        self.active = False
        if group is not None:
            group.abort()

    def _look_out(self) -> None:
        """Abort the group once the job is aborted: devices wait for a lost one for ever otherwise."""
        while not self._over.wait(_LOOK_S):
            if self._reporter.abort_error is not None:
                group = self._group
                if group is not None:
                    group.abort()
                return


def even_chunks(count: int, size: int) -> Tuple[int, ...]:
    """Boundaries of equal chunks; what remains is in the last.

    >>> even_chunks(11, 3)
    (0, 3, 6, 11)
    """
    return (*(count // size * member for member in range(size)), count)


def _obstacle(answers: Sequence[_Answer], hosts: Hosts) -> str:
    """Why groups cannot be made; empty if they can."""
    for ranks in hosts:
        for place, rank in enumerate(ranks):
            mine = answers[rank]
            if mine.able != _ABLE:
                return f"rank {rank} has no way to reach other devices"
            if mine.version != answers[ranks[0]].version:
                return f"rank {ranks[0]} and rank {rank} have different versions of it"
            for other in ranks[:place]:
                if mine.identity and mine.identity == answers[other].identity:
                    return f"rank {other} and rank {rank} use the same device"
    return ""
