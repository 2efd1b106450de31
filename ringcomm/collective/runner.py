"""Collectives on flat arrays: from a call to a schedule, a header and an execution.

Everything here works on contiguous one-dimensional arrays and counts in elements; shapes, copies
and objects are the context's affair. All calls go through :meth:`Runner._run`, in the calling
thread and one at a time: that is the one way to the wire.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, Optional, Sequence, Tuple

import numpy as np

from ..config import Settings
from ..dtypes import code_of
from ..errors import MismatchError, Misuse, PeerLostError, PeerStalledError, RingcommError
from ..ops import Collective, ReduceOp
from ..schedule import choose
from ..schedule.steps import Step, even_bounds
from ..transport.base import Fabric, LinkClosed
from ..wire.frames import NO_OP, NO_ROOT, Header, digest
from .execute import Execution, SegmentPool, run
from .reduce import Kernel

_PACKAGE = str(Path(__file__).resolve().parent.parent)


class Reporter:
    """Where failures are reported, and the common verdict comes from. This one has nobody to ask."""

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """A peer is lost, or ``stalled``: the error to raise."""
        error = PeerStalledError if kind == "stalled" else PeerLostError
        return error(f"rank {peer} was lost while this rank was in {doing}: {why}.", rank=peer)

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """A peer is in a different call: the error to raise."""
        return MismatchError(text, peer=peer)


class Runner:
    """Runs collectives over one fabric.

    Args:
        fabric: links to all peers.
        settings: algorithm, segment size, limits.
        generation: membership epoch, part of every header.
        spin_s: how long to poll before sleeping.
        reporter: asked for the common error when something goes wrong.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: Settings,
        generation: int = 0,
        spin_s: float = 0.0,
        reporter: Optional[Any] = None,
    ) -> None:
        self.rank = fabric.rank
        self.size = fabric.size
        self._fabric = fabric
        self._settings = settings
        self._generation = generation
        self._spin_s = spin_s
        self._reporter = reporter if reporter is not None else Reporter()
        self._pool = SegmentPool(settings.segment_bytes)
        self._override = settings.algorithm or None
        self._sequence = 0
        self._lock = threading.Lock()
        self._broken: Optional[BaseException] = None

    def all_reduce(
        self,
        data: np.ndarray[Any, Any],
        op: ReduceOp,
        name: str = "",
        shape: Sequence[int] = (),
        prescale: float = 1.0,
        postscale: float = 1.0,
        collective: Collective = Collective.ALLREDUCE,
    ) -> None:
        """Reduce ``data`` over all ranks, in place."""
        kernel = Kernel(op, data.dtype, self.size, prescale, postscale)
        kernel.prepare(data)
        if self.size == 1:
            kernel.finish_alone(data)
            return
        algorithm = choose.choose_all_reduce(
            self.size, data.size, data.itemsize,
            needs_single_fold=kernel.needs_single_fold, override=self._override,
        )  # fmt: skip
        schedule = choose.build_all_reduce(algorithm, self.rank, self.size, data.size)
        header = self._header(
            collective, data, name, shape, op, items=data.size, scales=(prescale, postscale)
        )
        self._run(schedule, header, data, kernel)

    def reduce_scatter(
        self,
        data: np.ndarray[Any, Any],
        bounds: Tuple[int, ...],
        op: ReduceOp,
        name: str = "",
        shape: Sequence[int] = (),
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce over all ranks; afterwards chunk ``rank`` of ``data`` is finished, the rest is not."""
        kernel = Kernel(op, data.dtype, self.size, prescale, postscale)
        kernel.prepare(data)
        if self.size == 1:
            kernel.finish_alone(data)
            return
        algorithm = choose.choose_reduce_scatter(self.size, needs_single_fold=kernel.needs_single_fold)
        schedule = choose.build_reduce_scatter(algorithm, self.rank, self.size, bounds)
        header = self._header(
            Collective.REDUCESCATTER, data, name, shape, op, items=data.size, scales=(prescale, postscale)
        )
        self._run(schedule, header, data, kernel)

    def all_gather(
        self, data: np.ndarray[Any, Any], bounds: Tuple[int, ...], name: str = "", shape: Sequence[int] = ()
    ) -> None:
        """Fill ``data`` with every rank's chunk; this rank's own must be in its place already."""
        if self.size == 1:
            return
        algorithm = choose.choose_all_gather(self.size)
        schedule = choose.build_all_gather(algorithm, self.rank, self.size, bounds)
        self._run(schedule, self._header(Collective.ALLGATHER, data, name, shape), data)

    def exchange(
        self,
        values: Sequence[int],
        collective: Collective,
        dtype: np.dtype[Any],
        name: str,
        shape: Sequence[int],
    ) -> np.ndarray[Any, Any]:
        """Tell everybody a few numbers (how many rows will come); one row of answers per rank.

        ``dtype`` and ``shape`` are those of the operation that follows: if ranks disagree about
        it, they learn so here.
        """
        numbers = np.zeros((self.size, len(values)), np.int64)
        numbers[self.rank] = values
        if self.size > 1:
            flat = numbers.reshape(-1)
            bounds = even_bounds(flat.size, self.size)
            algorithm = choose.choose_all_gather(self.size)
            schedule = choose.build_all_gather(algorithm, self.rank, self.size, bounds)
            header = self._header(collective, np.empty(0, dtype), name, shape)
            self._run(schedule, header, flat)
        return numbers

    def broadcast(
        self, data: np.ndarray[Any, Any], root: int, name: str = "", shape: Sequence[int] = ()
    ) -> None:
        """Overwrite ``data`` on all ranks with the root's."""
        if self.size == 1:
            return
        algorithm = choose.choose_broadcast(self.size, data.size, data.itemsize)
        schedule = choose.build_broadcast(algorithm, self.rank, self.size, root, data.size)
        header = self._header(Collective.BROADCAST, data, name, shape, root=root, items=data.size)
        self._run(schedule, header, data)

    def all_to_all(
        self,
        source: np.ndarray[Any, Any],
        data: np.ndarray[Any, Any],
        send_bounds: Tuple[int, ...],
        recv_bounds: Tuple[int, ...],
        name: str = "",
        shape: Sequence[int] = (),
    ) -> None:
        """Chunk ``i`` of ``source`` goes to rank i; chunk ``i`` of ``data`` comes from it."""
        mine = source[send_bounds[self.rank] : send_bounds[self.rank + 1]]
        data[recv_bounds[self.rank] : recv_bounds[self.rank + 1]] = mine
        if self.size == 1:
            return
        schedule = choose.build_all_to_all(self.rank, self.size, send_bounds, recv_bounds)
        self._run(schedule, self._header(Collective.ALLTOALL, data, name, shape), data, source=source)

    def barrier(self, name: str = "") -> None:
        """Return once every rank has called it: an allreduce of one byte."""
        self.all_reduce(np.zeros(1, np.uint8), ReduceOp.MAX, name, collective=Collective.BARRIER)

    def _header(
        self,
        collective: Collective,
        data: np.ndarray[Any, Any],
        name: str,
        shape: Sequence[int],
        op: int = NO_OP,
        root: int = NO_ROOT,
        items: int = 0,
        scales: Tuple[float, float] = (1.0, 1.0),
    ) -> Header:
        return Header(
            self._generation, 0, collective, op, code_of(data.dtype), root, items, digest(name, shape, scales)
        )

    def _run(
        self,
        schedule: Sequence[Step],
        header: Header,
        data: np.ndarray[Any, Any],
        kernel: Optional[Kernel] = None,
        source: Optional[np.ndarray[Any, Any]] = None,
    ) -> None:
        with self._lock:
            if self._broken is not None:
                raise Misuse(
                    f"This job has failed before ({type(self._broken).__name__}: {self._broken}); call "
                    "shutdown(), and init() if it shall start again."
                ) from self._broken
            self._sequence += 1
            header = header._replace(sequence=self._sequence)
            execution = Execution(schedule, self._fabric, header, data, self._pool, kernel, source)
            try:
                # Overflow and NaN are the caller's numbers; a warning on whichever rank happens to
                # own the element would help nobody.
                with np.errstate(all="ignore"):
                    run(execution, self._fabric, self._settings.timeout_s, self._spin_s)
            except BaseException as problem:
                # The streams stop in the middle of a message: nothing can be sent on them any more.
                self._broken = self._translate(problem, execution, header)
                if self._broken is problem:
                    raise
                raise self._broken from None

    def _translate(self, problem: BaseException, execution: Execution, header: Header) -> BaseException:
        """The error for people, the same on every rank, for what stopped an execution."""
        doing = f"{header.describe()}, call number {header.sequence}"
        error: BaseException = problem
        if isinstance(problem, LinkClosed):
            error = self._reporter.report_lost(problem.peer, doing, problem.reason)
        elif isinstance(problem, MismatchError) and problem.peer is not None:
            text = f"rank {self.rank}, at {call_site()}, and rank {problem.peer} do not make the same call: {problem}."
            error = self._reporter.report_mismatch(problem.peer, text)
        elif type(problem) is TimeoutError:
            reading, writing = execution.waiting_for()
            peer = (reading or writing)[0].peer
            why = f"not a byte for {self._settings.timeout_s:g} s, {execution.moved_bytes} bytes into it"
            error = self._reporter.report_lost(peer, doing, why, "stalled")
        return error


def call_site() -> str:
    """File and line of the caller's code that led here: the innermost frame outside ringcomm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(Path(frame.f_code.co_filename).resolve()).startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
