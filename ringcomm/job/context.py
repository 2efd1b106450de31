"""One process's part in one job: its rank, its links, and the collectives.

A :class:`Context` holds everything; nothing is global. The functions of :mod:`ringcomm` are a convenience
over a default one. A process that is alone in its job needs nothing of rendezvous, preparation and program.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Sequence

from ..arrays.kinds import StagingPool
from ..calls.collectives import Collectives
from ..calls.objects import Objects
from ..config import Membership, Settings, misspelt_variables
from ..engine.engine import Engine
from ..errors import Recoverable, describe_error
from ..group.group import Group
from ..group.view import Peer
from ..schedule.select import Selector
from ..storage.files import open_standard_descriptors
from ..transport.base import Channels
from ..transport.memory import memory_channels
from ..wire.signing import Signer
from .activity import flat
from .flight_recorder import forget_what_is_closed
from .timeline import timeline_path

if TYPE_CHECKING:
    from ..rendezvous.client import Joined
    from ..rendezvous.control import Resume
    from ..rendezvous.embedded import EmbeddedRendezvous
    from ..schedule.cost import CostModel
    from .preparation import Preparation, Prepared

logger = logging.getLogger("ringcomm")

_NOT_ADVISED = (
    "No advice: the program ended before every rank was measured. It must take its data from balanced "
    "batches (see docs/unequal.md) and make 64 steps, and two more for each batch that a loader takes in "
    "advance; with Keras on TensorFlow or JAX four epochs of 25."
)


class _Entry(NamedTuple):
    """A place in a job, with established links."""

    joined: Joined
    membership: Membership  # with address and key of the rendezvous
    embedded: Optional[EmbeddedRendezvous] = None  # the rendezvous that this rank serves, if it does


def _enter(membership: Membership, settings: Settings, resume: Optional[Resume] = None) -> _Entry:
    """Join a job of several processes by ringrun's rendezvous, a rank's own, srun, mpirun, or a new view."""
    from ..rendezvous.client import NEW, join
    from ..rendezvous.embedded import OwnRendezvous, join_launched

    if membership.elastic:
        return _Entry(join(membership, settings, NEW if resume is None else resume), membership)
    if membership.launched is not None:
        joined, embedded, membership = join_launched(membership, settings)
        return _Entry(joined, membership, embedded)
    with OwnRendezvous(membership, settings) as own:
        joined = join(membership, settings)
    return _Entry(joined, membership, own.embedded)


class Context(Collectives):
    """A rank of a job. Make one with :meth:`start`, end it with :meth:`close`, or use ``with``.

    Its own collectives are calls in order, see :class:`Collectives`; those of its :attr:`engine` are
    matched by name.

    Args:
        channels: links to the other ranks.
        peers: all ranks, in rank order, this one included.
        settings: tunables.
        joined: the rendezvous' side of it, if there is one.

    Attributes:
        balance_count: how many data sets are divided among the ranks by their speed.
        batch_norm: whether a model is known to have batch normalization.
        cost_model: the links as they were measured; None: they were not.
        advised: whether machines have been recommended (``RINGCOMM_ADVISE``).
        group: the ranks as this one sees them: its links, runner, records and timeline.
        joined_as: how this process has taken part in the job, with address and key of the rendezvous; None:
            it runs alone.
        activity: what this rank has done so far, in numbers.
    """

    def __init__(
        self,
        channels: Channels,
        peers: Sequence[Peer],
        settings: Settings,
        joined: Optional[Joined] = None,
        embedded: Optional[EmbeddedRendezvous] = None,
    ) -> None:
        rank, size = channels.direct.rank, channels.direct.size
        self.peers = tuple(peers)
        self.settings = settings
        self._joined = joined
        self._embedded = embedded
        self._closed = False
        self.balance_count = 0
        self.advised = self.batch_norm = False
        self.cost_model: Optional[CostModel] = None
        self._prepared: Optional[Prepared] = None
        self.joined_as: Optional[Membership] = None
        hosts = [peer.host_index for peer in self.peers]
        report = self._report if settings.verbose and rank == 0 else None
        self._selector = Selector(rank, size, settings.algorithm or None, hosts, report)
        group = self.group = Group(channels, peers, settings, joined, selector=self._selector)
        self.generation = group.generation
        self.host, self.local_rank, self.local_size = group.host, group.local_rank, group.local_size
        across = [peer.rank for peer in self.peers if peer.local_rank == self.local_rank]
        self.cross_rank, self.cross_size = across.index(rank), len(across)
        # Without a job there is no other process from which anything could come.
        signer = joined.signer if joined is not None else Signer(b"")
        super().__init__(group.runner, rank, size, Objects(signer, rank))
        self.engine = Engine(
            channels, settings, self.generation, group.spin_s, group.reporter, group.hosts, self._selector,
            group.runner.progress,
        )  # fmt: skip
        try:
            group.record(self.engine, engine=self.engine)
            self.activity = group.activity
        except BaseException:
            self.engine.stop()
            raise

    @property
    def staging(self) -> StagingPool:
        """The page-locked memory through which arrays of devices are sent."""
        return self._staging

    @classmethod
    def start(
        cls,
        membership: Optional[Membership] = None,
        settings: Optional[Settings] = None,
        resume: Optional[Resume] = None,
        before: Optional[Prepared] = None,
    ) -> Context:
        """Join the job that the environment (or the arguments) describe, and connect to all ranks.

        Args:
            membership: how this process takes part in the job.
            settings: tunables.
            resume, before: in an elastic job, what this process has kept and measured in the last view.

        Raises:
            ExcludedError: an elastic job has no place for this process.
            ConfigError: a setting makes no sense.
            StartupError: (or one of its kinds) the job could not be put together.
        """
        settings = Settings.from_environment() if settings is None else settings
        membership = Membership.from_environment() if membership is None else membership
        if membership.is_alone:
            _point_out_misspelt()
            alone = cls(
                memory_channels(1)[0],
                [Peer(0, membership.host or "localhost", 0, 0, os.getpid())],
                settings,
            )
            if settings.timeline:
                alone.start_timeline(settings.timeline)
            return alone
        forget_what_is_closed()
        open_standard_descriptors()
        while True:
            context = cls._of(_enter(membership, settings, resume), settings)
            try:
                context._prepare(before)
                return context
            except BaseException as problem:
                if not (context.is_elastic and isinstance(problem, Recoverable)):
                    assert context._joined is not None
                    shortage = context._joined.control.report_shortage(problem)
                    context.close(describe_error(problem), ok=False)
                    if shortage is not None:
                        raise shortage from problem
                    raise
                # A member was lost before the first call: the job goes on with the view after this one.
                logger.info("epoch %d failed before the first call: %s", context.generation, problem)
                resume = context.suspend(0 if resume is None else resume.position)
                before = context._kept(before)

    @classmethod
    def _of(cls, entry: _Entry, settings: Settings) -> Context:
        """Return a context over established links."""
        joined, embedded = entry.joined, entry.embedded
        try:
            context = cls(joined.channels, joined.peers, settings, joined, embedded)
        except BaseException as problem:
            shortage = joined.control.report_shortage(problem)
            joined.control.leave(describe_error(problem), ok=False)
            joined.channels.close()
            if embedded is not None:
                embedded.stop(failed=True)
            if shortage is not None:
                raise shortage from problem
            raise
        context.joined_as = entry.membership
        return context

    def _prepare(self, before: Optional[Prepared]) -> None:
        """Choose algorithms, compare programs, and start the timeline; all ranks call it."""
        assert self._joined is not None
        if self.rank == 0:
            _point_out_misspelt()
        if self.size > 1:
            preparation = self._tune(before)
            if self.settings.verbose and self.rank == 0:
                logger.info("%s", self._joined.table)
                self._report(preparation.carriers())
            if not preparation.is_repeated:
                preparation.compare_programs()
            self._prepared = preparation.prepared
        if self.settings.timeline:
            path = timeline_path(self.settings.timeline, self.generation if self.is_elastic else 0)
            self.start_timeline(path)

    def _tune(self, before: Optional[Prepared] = None) -> Preparation:
        """Measure the machine, together with all ranks, and choose schedules accordingly."""
        from .preparation import Preparation

        preparation = Preparation(self.group)
        self.cost_model = preparation.tune(self._selector, before)
        return preparation

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may be lost and may join while the job runs."""
        return self.joined_as is not None and self.joined_as.elastic

    def restart(self, position: int = 0) -> Context:
        """Leave this view of an elastic job, and join the next one in the same process.

        Every member of the view must call it, or end. The control connection to the rendezvous stays open.

        Args:
            position: how many commits or steps this process's state contains. Rank 0 of the next view is a
                process with the highest.

        Returns:
            the context of the next view; this one cannot be used any more.

        Raises:
            ExcludedError: this process is not to be in the job any more.
            StartupError: (or a subclass) the job cannot go on with this process.
        """
        return Context.start(self.joined_as, self.settings, self.suspend(position), self._kept())

    def _kept(self, before: Optional[Prepared] = None) -> Optional[Prepared]:
        """Return what the next view can reuse; None if links or hosts were silent in this one."""
        if not isinstance(self.group.reporter.abort_error, TimeoutError):
            return self._prepared or before
        from .preparation import SILENT

        return SILENT

    def suspend(self, position: int) -> Resume:
        """End this process's part in the view, and keep its connection; ``position``: see :meth:`restart`."""
        assert self._joined is not None
        self._closed = True
        self.group.stop("the next view begins", True)
        resume = self._joined.control.detach(position)
        self.group.close()
        return resume

    def take_changes(self) -> int:
        """Return which changes of an elastic job's membership are to take place, since this was last called:
        the sum of 1 (processes are to leave) and 2 (processes are ready to join).
        """
        return 0 if self._joined is None else self._joined.control.take_changes()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in collectives, moving data or waiting for other ranks."""
        return self.activity.waited_s

    def stats(self) -> Dict[str, float]:
        """See :func:`ringcomm.stats`."""
        return flat(self.activity.numbers())

    @property
    def reduced_bytes(self) -> int:
        """Payload of all all-reduces of this rank so far."""
        return self._runner.reduced_bytes + self.engine.buckets.reduced_bytes

    def _report(self, text: str) -> None:
        """Report a detail (RINGCOMM_VERBOSE): through logging, and at the launcher."""
        logger.info("%s", text)
        if self._joined is not None and self._embedded is None:
            self._joined.control.note(text)

    def announce(self, topic: str, text: str) -> None:
        """Show a line to the user, at the launcher or by logging; of each topic only the first one."""
        if self._joined is not None and self._embedded is None:
            self._joined.control.warn(topic, text)
        else:
            logger.warning("%s", text)

    def close(self, reason: str = "it called shutdown()", ok: bool = True) -> None:
        """Leave the job. Others that still need this rank get an error that names it and ``reason``.

        Args:
            ok: False if this rank leaves because of an error; then all ranks are aborted.
        """
        if self._closed or self.group.is_forked:
            return
        self._closed = True
        if ok and self.settings.advise and not self.advised and self.rank == 0:
            self.announce("no advice", _NOT_ADVISED)
        self.group.leave(reason, ok)
        self.group.close()
        if self._embedded is not None:
            self._embedded.stop(self.group.failed)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.close(describe_error(error), ok=False)

    def start_timeline(self, path: str) -> None:
        """Write what the engines do to a Chrome trace, until :meth:`stop_timeline`.

        Every rank that is to appear must call it; rank 0 writes the file.

        Raises:
            Misuse: it is being written already.
            ConfigError: the file cannot be written.
        """
        self.group.recording.start(path)

    def stop_timeline(self) -> None:
        """End the timeline. Every rank that started it must call it; the file is complete afterwards."""
        self.group.recording.stop(lambda: self.engine.barrier("ringcomm.stop_timeline").wait())

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        counts = [0] * (1 + max(peer.host_index for peer in self.peers))
        for peer in self.peers:
            counts[peer.host_index] += 1
        return len(set(counts)) == 1


def _point_out_misspelt() -> None:
    """Warn of environment variables that look like misspelt settings."""
    for text in misspelt_variables():
        logger.warning("%s", text)
