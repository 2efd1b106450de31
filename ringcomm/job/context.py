"""One process's part in one job: its rank, its links, and the collectives.

A :class:`Context` holds everything. The functions of :mod:`ringcomm` are a convenience over a default one,
which the functions behind the class make and end: whether the process is in a job, whether it has left one,
and the callbacks of leaving and joining again are the only state of a process. A process that is alone in its
job needs nothing of rendezvous and preparation.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np

from ..arrays.kinds import StagingPool
from ..calls.collectives import Collectives
from ..calls.objects import Objects
from ..config import Membership, Settings, misspelt_variables
from ..docstrings import documented
from ..engine.engine import Engine
from ..errors import ConfigError, NotInitializedError, Recoverable, RingcommError, describe_error
from ..group.group import Group, Peer
from ..schedule.select import Selector
from ..storage.files import open_standard_descriptors
from ..transport.base import Channels
from ..transport.memory import memory_channels
from ..wire.auth import Signer
from .flight_recorder import RecorderSocket, flat, forget_what_is_closed
from .timeline import timeline_path

if TYPE_CHECKING:
    from ..rendezvous.client import Joined
    from ..rendezvous.control import Resume
    from ..schedule.cost import CostModel
    from .preparation import Prepared

logger = logging.getLogger("ringcomm")

_NOT_ADVISED = (
    "No advice: the program ended before every rank was measured. It must take its data from balanced "
    "batches (see docs/unequal.md) and make 64 steps, and two more for each batch that a loader takes in "
    "advance; with Keras on TensorFlow or JAX four epochs of 25."
)


def _enter(membership: Membership, settings: Settings, resume: Optional[Resume] = None) -> Joined:
    """Join a job of several processes by ringrun's rendezvous, a rank's own, srun, mpirun, or a new view."""
    from ..rendezvous.client import NEW, join
    from ..rendezvous.embedded import OwnRendezvous, join_launched

    if membership.elastic:
        return join(membership, settings, NEW if resume is None else resume)
    if membership.launched is not None:
        return join_launched(membership, settings)
    with OwnRendezvous(membership, settings) as own:
        joined = join(membership, settings)
    return joined._replace(embedded=own.embedded)


class Context(Collectives):
    """One rank of a job. Make it with :meth:`start`, and end it with :meth:`close` or by ``with``.

    Its methods are collectives that all ranks call in the same order. Collectives of its :attr:`engine` are
    matched by name.

    Args:
        channels: links to the other ranks.
        peers: all ranks in rank order, including this one.
        settings: the settings of the job.
        joined: what the rendezvous has assigned to this rank, if there is a rendezvous.

    Attributes:
        balance_count: number of data sets that are divided among the ranks by their speed.
        batch_norm: whether a model is known to have batch normalization.
        cost_model: the measured speed of the links; None: it was not measured.
        advised: whether machines have been recommended (``ringrun --advise``).
        group: the links, the executor of collectives, the records and the timeline of this rank.
        joined_as: how this process has joined the job, with the address and key of the rendezvous; None: it
            runs alone.
        activity: numbers about what this rank has done so far.
    """

    def __init__(
        self, channels: Channels, peers: Sequence[Peer], settings: Settings, joined: Optional[Joined] = None
    ) -> None:
        rank, size = channels.direct.rank, channels.direct.size
        self.peers = tuple(peers)
        self.settings = settings
        self._joined = joined
        self._embedded = None if joined is None else joined.embedded
        self.joined_as = None if joined is None else joined.membership
        self._closed = False
        self.balance_count = 0
        self.advised = self.batch_norm = False
        self.cost_model: Optional[CostModel] = None
        self._prepared: Optional[Prepared] = None
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
        """The page-locked memory through which arrays on GPUs are sent."""
        return self._staging

    @classmethod
    def start(
        cls, membership: Optional[Membership] = None, settings: Optional[Settings] = None,
        resume: Optional[Resume] = None, before: Optional[Prepared] = None,
    ) -> Context:  # fmt: skip
        """Join the job that the arguments or the environment describe, and connect to all ranks.

        Args:
            membership: how this process takes part in the job.
            settings: the settings of the job.
            resume: in an elastic job, what this process has kept from the last view (set of ranks).
            before: in an elastic job, what this process has measured in the last view.

        Raises:
            ExcludedError: an elastic job has no place for this process.
            ConfigError: a setting has an invalid value.
            StartupError: (or a subclass) the job could not start.
        """
        settings = Settings.from_environment() if settings is None else settings
        membership = Membership.from_environment() if membership is None else membership
        if membership.is_alone:
            _point_out_misspelt()
            own = Peer(0, membership.host or "localhost", 0, 0, os.getpid())
            alone = cls(memory_channels(1)[0], [own], settings)
            if settings.timeline:
                alone.start_timeline(settings.timeline)
            return alone
        forget_what_is_closed()
        open_standard_descriptors()
        RecorderSocket.of_this_process()  # so that ringrun can ask where a rank is that does not connect
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
    def _of(cls, joined: Joined, settings: Settings) -> Context:
        """Return a context over established links."""
        try:
            return cls(joined.channels, joined.peers, settings, joined)
        except BaseException as problem:
            shortage = joined.control.report_shortage(problem)
            joined.control.leave(describe_error(problem), ok=False)
            joined.channels.close()
            if joined.embedded is not None:
                joined.embedded.stop(failed=True)
            if shortage is not None:
                raise shortage from problem
            raise

    def _prepare(self, before: Optional[Prepared]) -> None:
        """Choose algorithms, compare programs, and start the timeline; all ranks call it."""
        assert self._joined is not None
        if self.rank == 0:
            _point_out_misspelt()
        if self.size > 1:
            from .preparation import carriers, point_out_other_programs

            is_repeated = self._tune(before)
            if self.settings.verbose and self.rank == 0:
                logger.info("%s", self._joined.table)
                self._report(carriers(self.group))
            if not is_repeated:
                point_out_other_programs(self.group)
        if self.settings.timeline:
            path = timeline_path(self.settings.timeline, self.generation if self.is_elastic else 0)
            self.start_timeline(path)

    def _tune(self, before: Optional[Prepared] = None) -> bool:
        """Measure the machine and choose schedules; return whether the ranks have been together before."""
        from .preparation import tune

        self._prepared, is_repeated = tune(self.group, self._selector, before)
        self.cost_model = self._prepared.model
        return is_repeated

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may be lost and may join while the job runs."""
        return self.joined_as is not None and self.joined_as.elastic

    def restart(self, position: int = 0) -> Context:
        """Leave this view of an elastic job, and join the next one in the same process.

        Every process of the view must call this, or end. The connection to the rendezvous stays open.

        Args:
            position: number of commits or steps in this process's state. A process with the highest position
                becomes rank 0 of the next view.

        Returns:
            the context of the next view. Do not use this context any more.

        Raises:
            ExcludedError: this process must leave the job.
            StartupError: (or a subclass) the job cannot continue with this process.
        """
        return Context.start(self.joined_as, self.settings, self.suspend(position), self._kept())

    def _kept(self, before: Optional[Prepared] = None) -> Optional[Prepared]:
        """Return what the next view can reuse; None if links or hosts were silent in this one."""
        return None if isinstance(self.group.reporter.abort_error, TimeoutError) else self._prepared or before

    def suspend(self, position: int) -> Resume:
        """Leave the view, and keep the connection to the rendezvous; ``position``: see :meth:`restart`."""
        assert self._joined is not None
        self._closed = True
        self.group.stop("the next view begins", True)
        resume = self._joined.control.detach(position)
        self.group.close()
        return resume

    def take_changes(self) -> int:
        """Return the changes since the last call: 0 none, 1 processes leave, 2 processes join, 3 both."""
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
        """Number of bytes that this rank has reduced in all-reduces so far."""
        return self._runner.reduced_bytes + self.engine.buckets.reduced_bytes

    def _report(self, text: str) -> None:
        """Report a detail (RINGCOMM_VERBOSE): through logging, and at the launcher."""
        logger.info("%s", text)
        if self._joined is not None and self._embedded is None:
            self._joined.control.note(text)

    def announce(self, topic: str, text: str) -> None:
        """Show a line to the user, by the launcher or by logging, once for each topic."""
        if self._joined is not None and self._embedded is None:
            self._joined.control.warn(topic, text)
        else:
            logger.warning("%s", text)

    def close(self, reason: str = "it called shutdown()", ok: bool = True) -> None:
        """Leave the job. Ranks that still need this rank get an error that names it and ``reason``.

        Args:
            ok: False if this rank leaves because of an error. Then the job of all ranks is aborted.
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
        """Write the operations of the ranks to a Chrome trace, until :meth:`stop_timeline`.

        Every rank that is to appear must call this. Rank 0 writes the file.

        Raises:
            Misuse: a timeline is already being written.
            ConfigError: the file cannot be written.
        """
        self.group.recording.start(path)

    def stop_timeline(self) -> None:
        """End the timeline. Every rank that started it must call this. Then the file is complete."""
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


# ---- the default context of this process ---------------------------------------------------------


class Newcomer:
    """A process of an elastic job before it joins. Its numbers are those of the last rank if it joined now.
    The others go on meanwhile. ``init()`` of a process that is started while the job runs returns at once,
    and the process joins when its state is ready: at the call of the function that ``elastic.run`` decorates,
    or at its first collective. Otherwise all others would wait while it reads its data.
    """

    is_elastic = True
    is_homogeneous = False

    def __init__(self, membership: Membership, settings: Settings, size: int) -> None:
        self.membership, self.settings = membership, settings
        self.host = membership.host or socket.gethostname()
        self.rank, self.size = size, size + 1
        self.local_rank = 0 if membership.slot is None else membership.slot.local
        self.local_size = self.local_rank + 1
        self.cross_rank, self.cross_size = size, size + 1

    def restart(self, position: int = 0) -> Context:
        """Join the next view with a state at ``position``."""
        return Context.start(self.membership, self.settings)

    def close(self, reason: str = "", ok: bool = True) -> None:
        """Do nothing: there are no connections."""


_lock = threading.Lock()
_joining = threading.RLock()  # restart() may call functions that make collectives
_default: Union[Context, Newcomer, None] = None
_registered = False
_left = False
_after_restart: List[Callable[[], None]] = []
_before_leaving: List[Callable[[], None]] = []
_before_calls: Optional[Callable[[], None]] = None


def init(membership: Optional[Membership] = None, settings: Optional[Settings] = None) -> None:
    """Join the job: find the other ranks and connect to them. A second call does nothing.

    Every rank calls it before its first collective. It waits up to ``RINGCOMM_START_TIMEOUT`` (60 s) until
    all ranks have joined. The process leaves the job at ``shutdown()`` or when it ends. After ``shutdown()``
    on every rank you can call ``init()`` again.

    Without a launcher and without ``RINGCOMM_SIZE`` in the environment, this process is the whole job, and no
    socket is opened.

    Args:
        membership: the job's size, rendezvous and key. By default they come from the environment that
            ``ringrun``, srun or mpirun sets.
        settings: a :class:`~ringcomm.config.Settings`; by default from the ``RINGCOMM_*`` variables.

    Raises:
        ConfigError: a variable or an argument has an invalid value.
        StartupError: (or a subclass) the ranks did not connect; the message says which and why.
    """
    global _default, _registered
    with _lock:
        if _default is None:
            try:
                settings = Settings.from_environment() if settings is None else settings
                membership = Membership.from_environment() if membership is None else membership
                if not (isinstance(membership, Membership) and isinstance(settings, Settings)):
                    raise ConfigError("init() takes a Membership and Settings of ringcomm.config, or none.")
                size = 0
                if membership.elastic:
                    from ..rendezvous.client import running_size

                    size = running_size(membership, settings)
                _default = Newcomer(membership, settings, size) if size else _started(membership, settings)
            except RingcommError as error:
                # The message has all facts; a traceback through ringcomm's own code adds none.
                raise error.with_traceback(None) from None
        if not _registered:
            atexit.register(_leave_at_exit)
            _registered = True


def _started(membership: Membership, settings: Settings) -> Context:
    context = Context.start(membership, settings)
    context.group.runner.before_call = _before_calls
    return context


def shutdown() -> None:
    """Leave the job and close its connections.

    It does nothing if this process is in no job. It is called automatically when the program ends.
    """
    _finish_first()
    context = _take_default()
    if context is not None:
        context.close()


def restart(position: int = 0) -> None:
    """Leave the present view of an elastic job, and join the next one, see :meth:`Context.restart`; in other
    jobs it is ``shutdown()`` and ``init()``.
    """
    global _default, _left
    if _default is None or not _default.is_elastic:
        shutdown()
        init()
        return
    with _lock:
        before, _default, _left = _default, None, True
        context = _default = before.restart(position)
        context.group.runner.before_call = _before_calls
    for callback in _after_restart:
        callback()


def after_restart(callback: Callable[[], None]) -> None:
    """Register a function to be called after every :func:`restart`, as new processes do after ``init()``."""
    _after_restart.append(callback)


def before_leaving(callback: Callable[[], None]) -> None:
    """Register a function to be called before this process leaves its job, unless its program has failed: it
    waits for collectives that a framework executes later than the program calls them.
    """
    _before_leaving.append(callback)


def before_calls(callback: Callable[[], None]) -> None:
    """Register a function to be called before each call in order of this process, also in later jobs, as
    :func:`before_leaving`. Any thread may call it, also the thread of such a collective.
    """
    global _before_calls
    with _lock:
        _before_calls = callback
        if isinstance(_default, Context):
            _default.group.runner.before_call = callback


def _finish_first() -> None:
    if isinstance(_default, Context) and not _default.group.is_forked:
        for callback in _before_leaving:
            callback()


def take_changes() -> int:
    """See :meth:`Context.take_changes`; 0 if this process is in no job."""
    return _default.take_changes() if isinstance(_default, Context) else 0


def on_changes(listener: Optional[Callable[[int, bool], None]]) -> bool:
    """Set the function that is called when a change of the membership is reported in this view, with the
    change and whether it can take place now; None removes it. Return False if the job is not elastic.
    """
    control = _default.group.control if isinstance(_default, Context) else None
    return control is not None and control.on_changes(listener)


def gather_positions(position: int) -> List[int]:
    """Return the positions of all ranks' states, in rank order, which all call it; in no job the own one."""
    if _default is None:
        return [position]
    return [int(item) for item in context().allgather(np.array([position], np.int64))]


@documented
def epoch() -> int:
    """Return the number of the present set of ranks (elastic job) or of the present start (other jobs).

    Returns:
        0 at first, and a larger number after each change of the ranks or new start.

    Raises:
        {not_initialized}
    """
    return context().generation


def _leave_at_exit() -> None:
    """Leave the job, and report an uncaught exception, so that the other ranks' errors can name it."""
    global _default
    error = getattr(sys, "last_value", None)
    if error is None:
        _finish_first()
    context, _default = _default, None
    if context is None:
        return
    if error is not None and not sys.flags.interactive and not hasattr(sys, "ps1"):
        context.close(f"uncaught {describe_error(error)}", ok=False)
    else:
        context.close("its program ended")


def leave(error: BaseException) -> None:
    """Leave the job, if there is one, because of an error in a function that the process outlives."""
    context = _take_default()
    if context is not None:
        context.close(f"uncaught {describe_error(error)}", ok=False)


def _take_default() -> Union[Context, Newcomer, None]:
    """Return the default context, which is none from now on."""
    global _default, _left
    with _lock:
        context, _default = _default, None
        _left = _left or context is not None
    return context


def is_initialized() -> bool:
    """Return whether this process is in a job.

    Returns:
        True between ``init()`` and ``shutdown()``.
    """
    return _default is not None


def is_elastic() -> bool:
    """Return whether this process is in an elastic job."""
    return _default is not None and _default.is_elastic


def join_now() -> bool:
    """Become a rank if this process has not joined yet; return whether its numbers changed."""
    with _joining:
        before = _default
        if before is None or isinstance(before, Context):
            return False
        restart()
        after = placed()
    return (before.rank, before.size) != (after.rank, after.size)


def context() -> Context:
    """Return the default context, joining if needed; NotInitializedError if this process is in no job."""
    found = _default
    if isinstance(found, Context):
        return found
    join_now()
    found = placed()
    assert isinstance(found, Context)
    return found


def placed() -> Union[Context, Newcomer]:
    """Return the default context, or the :class:`Newcomer`; NotInitializedError in no job."""
    if _default is None and _left:
        raise NotInitializedError(
            "This rank has left the job: ringcomm.shutdown() was called. To join again, call "
            "ringcomm.init() first."
        )
    if _default is None:
        raise NotInitializedError(
            "ringcomm has not been initialized; call ringcomm.init() first (and start the program with "
            "ringrun for more than one rank)."
        )
    return _default
