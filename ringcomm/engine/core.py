"""The parts of an engine: made from the settings, connected with each other, observed and ended.

Every rank has a runner of buckets; with other ranks it has a thread, too, and rank 0 has the coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

from ..clock import StepClock, Stopwatch
from ..collective.call_history import KEPT, CallHistory
from ..collective.progress import Progress
from ..collective.reduce import kernel
from ..collective.runner import Runner
from ..config import Settings
from ..dtypes import dtype_named
from ..group.failures import FailureReporter, Reporter
from ..ops import ReduceOp
from ..schedule.select import Selector
from ..transport.base import Channels, Fabric, StoppableWatch
from ..wire.signature import Signature
from .bucket_runner import BucketRunner
from .observer import Observer, Sink
from .operation_history import OperationHistory
from .process_sets import GLOBAL_SET, ProcessSets
from .request import Request
from .single_rank import SingleRank

if TYPE_CHECKING:
    from .coordinator import Coordinator
    from .thread import EngineThread


NEGOTIATION_S = 200e-6
"""What it takes at least to ask rank 0, and to be answered."""


class EngineCore:
    """The engine of one rank without its operations, which :class:`~.engine.Engine` adds.

    Args:
        channels: the links of this rank.
        settings: tunables.
        generation: membership epoch.
        spin_s: how long to poll while a caller waits, in seconds.
        reporter: reports lost peers to the rendezvous, or None.
        hosts: of every rank, for messages.
        selector: chooses algorithms among all ranks.
        calls: how far this rank is in collectives that do not go through the engine.

    Attributes:
        buckets: runs the operations; its totals and its progress are for any thread.
        history: the last operations, if they are recorded.
        repeated: counts the repetitions of operations with names; most programs repeat them once per step.
    """

    def __init__(
        self,
        channels: Channels,
        settings: Settings,
        generation: int = 0,
        spin_s: float = 0.0,
        reporter: Optional[FailureReporter] = None,
        hosts: Sequence[str] = ("localhost",),
        selector: Optional[Selector] = None,
        calls: Callable[[], Progress] = Progress,
    ) -> None:
        self.rank = channels.background.rank
        self.size = channels.background.size
        self.sets = ProcessSets(self.rank, self.size)
        self.coordinator: Optional[Coordinator] = None
        self.history: Optional[OperationHistory] = None
        self.repeated = StepClock()
        self._known: Dict[Tuple[Any, ...], Signature] = {}
        self._thread: Optional[EngineThread] = None
        reporter = Reporter() if reporter is None else reporter

        def make_runner(fabric: Fabric) -> Runner:
            whole = fabric is channels.background
            runner = Runner(fabric, settings, generation, spin_s, reporter, selector if whole else None)
            runner.history = CallHistory(1)  # of a bucket only how far it is; its members are remembered
            return runner

        self.buckets = BucketRunner(channels.background, make_runner, self.sets)
        if self.size == 1:
            self._single = SingleRank(self.buckets)
            return
        from .peer_channels import SilenceLimits  # what follows is not needed by a rank that is alone
        from .thread import EngineThread

        watch = StoppableWatch(channels.background.watch)
        channels.background.watch = channels.control.watch = watch
        if self.rank == 0:
            self.coordinator = self._make_coordinator(settings, hosts, selector)
        self._thread = EngineThread(
            channels.control,
            channels.background,
            self.buckets,
            self.coordinator,
            watch,
            reporter,
            calls,
            hosts,
            channels.direct.wake,
            spin_s,
            SilenceLimits(settings.dead_after_s, settings.stall_warning_s, settings.late_after_s),
        )
        self.history = OperationHistory(KEPT, self.buckets.moved_bytes)
        self._thread.record(self.history)

    def _make_coordinator(
        self, settings: Settings, hosts: Sequence[str], selector: Optional[Selector]
    ) -> Coordinator:
        from .coordinator import Coordinator, Tuning

        def one_round(signatures: Sequence[Signature]) -> bool:
            """Return whether operations, reduced alike, may be added up by every rank itself."""
            first = signatures[0]
            dtype = dtype_named(first.dtypes[0])
            count = sum(item.nbytes for item in signatures) // dtype.itemsize
            single = kernel(ReduceOp(first.op), dtype, self.size).needs_single_fold
            return selector is None or selector.one_round(count, dtype.itemsize, single, NEGOTIATION_S)

        return Coordinator(
            hosts,
            self.sets.members,
            Tuning(settings.fusion_bytes, settings.cycle_ms * 1e-3),
            settings.stall_warning_s,
            settings.late_after_s,
            one_round=one_round,
        )

    def stop(self) -> None:
        """End the thread; what is still on its way fails."""
        if self._thread is not None:
            self._thread.stop()
        self.buckets.release()

    def settle(self, limit_s: float) -> None:
        """Wait for what is on its way at the end; see :meth:`~.thread.EngineThread.settle`."""
        if self._thread is not None:
            self._thread.settle(limit_s)

    @property
    def observer(self) -> Optional[Observer]:
        """The observer that receives the engine's events, if there is one."""
        return self._single.trace.observer if self._thread is None else self._thread.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Report what happens from now on to an observer, or none: :meth:`~.thread.EngineThread.observe`."""
        if self._thread is not None:
            self._thread.observe(observer, sink)
        else:
            self._single.trace.observe(observer, sink)

    @property
    def waited(self) -> Stopwatch:
        """The time that threads of this rank have waited for operations."""
        return Stopwatch() if self._thread is None else self._thread.waited

    @property
    def late_s(self) -> Dict[int, float]:
        """On rank 0: by rank, how long operations have waited for it alone; empty on other ranks."""
        return {} if self.coordinator is None else dict(self.coordinator.late_s)

    def finish_earlier(self, name: str, process_set: int = GLOBAL_SET) -> None:
        """Wait for this rank's own operation of this name, if one is on its way that its program has left.

        For names that a program cannot change, such as those of a model's gradients: ranks then match the
        next operation of the name with each other's next one.
        """
        if self._thread is not None:
            self._thread.finish_earlier(name, process_set)

    def pending(self) -> List[Request]:
        """Return what is on its way, in the order of submission."""
        return self._thread.pending() if self._thread is not None else []
