"""The default :class:`~ringcomm.job.context.Context` of this process: joining its job, and leaving it.

The functions of :mod:`ringcomm.api` call this context's methods. Only this module holds its state: whether
the process is in a job, whether it has left one, and the callbacks of leaving and joining again.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from typing import Callable, List, Optional, Union

import numpy as np

from ..config import Membership, Settings
from ..docstrings import documented
from ..errors import ConfigError, NotInitializedError, RingcommError, describe_error
from .context import Context


class Newcomer:
    """A process of an elastic job before it joins. Its numbers are those of the last rank if it joined now.

    The others go on meanwhile. ``init()`` of a process that is started while the job runs returns at once,
    and the process joins when its state is ready: at the call of the function that ``elastic.run``
    decorates, or at its first collective. Otherwise all others would wait while it reads its data.
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
        self._pid = os.getpid()

    def restart(self, position: int = 0) -> Context:
        """Join the next view with a state at ``position``. Raises as :func:`.default_context.restart`."""
        return Context.start(self.membership, self.settings)

    def close(self, reason: str = "", ok: bool = True) -> None:
        """Do nothing: there are no connections."""


def newcomer_of(membership: Membership, settings: Settings) -> Optional[Newcomer]:
    """Return this process as one that joins an elastic job later; None if it is among the first ranks."""
    from ..rendezvous.client import running_size  # other jobs have none

    size = running_size(membership, settings)
    return Newcomer(membership, settings, size) if size else None


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

    Every rank calls it before its first collective. It returns when all ranks have joined, and waits for
    them up to ``RINGCOMM_START_TIMEOUT`` (60 s). The process leaves the job at ``shutdown()`` or at its end;
    after ``shutdown()`` on every rank it can be called again.

    Without a launcher and without ``RINGCOMM_SIZE`` in the environment the job is this one process,
    and no socket is opened.

    Args:
        membership: the job's size, rendezvous and key; by default from the environment, as ``ringrun``
            sets it, else as srun or mpirun does.
        settings: tunables (:class:`~ringcomm.config.Settings`); by default from the ``RINGCOMM_*`` variables.

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
                if membership.elastic:
                    _default = newcomer_of(membership, settings)
                _default = _default or _started(membership, settings)
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

    Does nothing if this process is in no job. It is called automatically when the program ends.
    """
    _finish_first()
    context = _take_default()
    if context is not None:
        context.close()


def restart(position: int = 0) -> None:
    """Leave the present view of the job, and join the next one in the same process.

    In an elastic job the connection to the rendezvous stays open, and every member of the view must call this
    or end; in other jobs it is ``shutdown()`` and ``init()``. ``position`` counts the commits or steps in
    this process's state; a process with the highest becomes rank 0. ExcludedError: this process must leave
    the job. StartupError: the job cannot go on with it.
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
    """Register a function to be called after every :func:`restart` of an elastic job.

    It makes the calls that new processes make after ``init()``, such as registering process sets.
    """
    _after_restart.append(callback)


def before_leaving(callback: Callable[[], None]) -> None:
    """Register a function to be called before this process leaves its job, unless its program has failed.

    It waits for collectives that a framework executes later than the program calls them.
    """
    _before_leaving.append(callback)


def before_calls(callback: Callable[[], None]) -> None:
    """Register a function to be called before each call in order of this process, also in later jobs.

    It waits for collectives that a framework executes later than the program calls them, as calls in order.
    Any thread may call it, also the thread of such a collective.
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
    """Set the function that is called when a change of the membership is reported, in this view.

    It gets the change as :func:`take_changes` returns it, and whether it can take place now (processes that
    are being started join first). None removes it. Return False if the job is not elastic.
    """
    control = _default.group.control if isinstance(_default, Context) else None
    return control is not None and control.on_changes(listener)


def gather_positions(position: int) -> List[int]:
    """Return the positions of all ranks' states, in rank order; in no job only this process's.

    All ranks must call it.
    """
    if _default is None:
        return [position]
    return [int(item) for item in context().allgather(np.array([position], np.int64))]


@documented
def epoch() -> int:
    """The number of the present view of an elastic job, or of the present generation of another job.

    Returns:
        0 at first; every later view has a larger number.

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
    """Leave the job because of an error, which the other ranks' errors name; nothing in no job.

    For processes that outlive the function which failed: others leave when the program ends.
    """
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
    """Become a rank if this process has not joined yet; return whether its numbers changed.

    ExcludedError: this process must leave the job. StartupError: the job cannot go on with it.
    """
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
    """Return the default context, or the :class:`Newcomer` that has its numbers until it joins.

    NotInitializedError: ``init()`` has not been called, or ``shutdown()`` has.
    """
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
