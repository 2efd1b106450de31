"""The exceptions of ringcomm.

There are three branches. :class:`Recoverable`: a rank is gone or silent, and a new start may continue without
it. :class:`Misuse`: the program is wrong, and another attempt fails again. :class:`StartupError`: the job
could not start.

Every error text contains the facts: rank, host, operation, peer, progress, duration, and what to try. Facts
are also attributes, so that programs need not parse the text.
"""

from __future__ import annotations

import re
from typing import Optional, Tuple, TypeVar


class HorovodInternalError(RuntimeError):
    """Horovod's error for a failed collective. ringcomm raises one of its more specific subclasses.

    Code that restarts training should catch :class:`Recoverable`. A mistake of the program
    (:class:`MismatchError`) fails in every attempt.
    """


class RingcommError(Exception):
    """Base class of all errors that ringcomm raises deliberately."""


class Misuse(RingcommError):
    """The program asked for something that cannot work, also in another attempt."""


class ConfigError(Misuse, ValueError):
    """A setting, environment variable or argument has an invalid value."""


class NotInitializedError(Misuse, ValueError):
    """A collective, or a query such as ``rank()``, was called before ``init()`` or after ``shutdown()``."""


class UnsupportedDtypeError(Misuse, TypeError, ValueError):
    """The element type cannot be sent, or the operation is not defined for it."""


class NotOfferedError(Misuse, NotImplementedError):
    """The combination of an operation and its arguments is valid, but not implemented."""


class ShapeError(Misuse, ValueError, HorovodInternalError):
    """An array has no first dimension, and the operation needs rows.

    It is also a :class:`HorovodInternalError`, because Horovod raises that error in this case.
    """


class MismatchError(Misuse, HorovodInternalError):
    """Ranks called different operations: another collective, element type, shape, op or root.

    Attributes:
        rank: the rank that detected the mismatch, if another rank did.
        peer: the rank whose message did not fit.
    """

    def __init__(self, message: str, *, rank: Optional[int] = None, peer: Optional[int] = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer


class DesyncError(Misuse):
    """Ranks that should hold bitwise equal numbers do not: their parameters have diverged.

    Attributes:
        tensor: the name of the first tensor that differs.
        ranks: the ranks that differ from most others, or None if there is no majority.
    """

    def __init__(
        self, message: str, *, tensor: Optional[str] = None, ranks: Optional[Tuple[int, ...]] = None
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.ranks = ranks


class DuplicateNameError(Misuse, ValueError):
    """An operation of this name is already in progress on this rank."""


class StartupError(RingcommError):
    """The job could not start."""


class StartTimeoutError(StartupError, TimeoutError):
    """Not all ranks joined in time; the message names the missing ranks."""


class RefusedError(StartupError):
    """The rendezvous refused this process; the message has the reason."""


class AuthenticationError(StartupError):
    """One of the two ends of a connection could not prove that it holds the job's key."""


class NoRouteError(StartupError):
    """Two hosts share no network path; the message lists what was tried and why each failed."""


class Recoverable(RingcommError):
    """Another rank or the network has failed. The program is correct, but the job cannot continue."""


class PeerLostError(Recoverable, ConnectionError, HorovodInternalError):
    """A rank has ended or left, or its connection broke, while others needed it.

    Attributes:
        rank: the rank that is gone (None if it could not be determined).
        host: the name of its host in the job.
    """

    def __init__(self, message: str, *, rank: Optional[int] = None, host: Optional[str] = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class PeerStalledError(PeerLostError, TimeoutError):
    """A rank is connected, but has moved no data for longer than allowed."""


class LinkLostError(PeerLostError, TimeoutError):
    """Ranks are running, but do not receive each other's messages: the network between hosts has failed.

    Attributes:
        ranks: the ranks that do not receive each other's messages.
        hosts: the hosts of these ranks, in the same order.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: Optional[int] = None,
        host: Optional[str] = None,
        ranks: Tuple[int, ...] = (),
        hosts: Tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, rank=rank, host=host)
        self.ranks = ranks
        self.hosts = hosts


class HostsUpdatedInterrupt(RingcommError, RuntimeError):
    """Hosts have been added or will be removed. After a reset, training continues.

    Attributes:
        skip_sync: True if no rank is new, so that the state need not be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class ExcludedError(SystemExit):
    """This process must leave an elastic job: its host was removed, or the job continues without it.

    If the program does not catch it, it ends the program with exit code 0. If the job has lost this process,
    the exit code is 1, and the reason is printed to stderr.

    Args:
        reason: why the process must leave.
        lost: True if the job has lost this process; False if the job has asked it to leave.

    Attributes:
        reason: why the process must leave.
    """

    def __init__(self, reason: str, lost: bool = False) -> None:
        super().__init__(f"ringcomm: {reason}" if lost else 0)
        self.reason = reason


class RemoteError(RingcommError):
    """A function that ran as a job failed on a rank, or the job did not start.

    ``__cause__`` is the exception of the rank that failed first, if it could be pickled.

    Attributes:
        rank: the rank that failed first, or None if the job did not start.
        host: the host of that rank.
        traceback_text: the traceback of that rank; "" if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: Optional[int] = None,
        host: Optional[str] = None,
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.traceback_text = traceback_text


class BrokenInvariantError(RingcommError, AssertionError):
    """ringcomm has a defect. Please report it with the message."""


class DeviceError(RingcommError):
    """A copy between a device (a GPU) and the host has failed or does not end."""


class ProtocolError(RingcommError):
    """The other end sent invalid bytes: it has another version, or it is not ringcomm."""


_E = TypeVar("_E", bound=BaseException)


def fresh_copy(error: _E) -> _E:
    """Return a copy of an exception, because several waiting threads must not share one traceback."""
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def failed_before(failure: BaseException) -> Misuse:
    """Return the error of a call in a job whose failure this rank has already raised."""
    return Misuse(
        "This job has failed before, so no collective can run in it any more. In an elastic job elastic.run "
        "goes on without the rank that was lost. ringrun --restarts N starts a job again, in new processes; "
        "without ringrun, shutdown() and init() on every rank do. The failure was: "
        f"{describe_error(failure)}"
    )


def used_in_fork(rank: int, pid: int) -> Misuse:
    """Return the error of a call in a fork of a rank's process, which has this pid."""
    return Misuse(
        f"This process is a fork of rank {rank} and shares its connections; only process {pid}, which called "
        "ringcomm.init(), may use them."
    )


def another_call_text(rank: int, call: str, peer: int, why: str) -> str:
    """Return the report of a rank whose peer makes a different call.

    >>> another_call_text(0, "barrier at train.py:3", 1, "they disagree about the root")
    'rank 0: barrier at train.py:3; rank 1 makes another call: they disagree about the root.'
    """
    return f"rank {rank}: {call}; rank {peer} makes another call: {why}."


# Follows a rank's own call in another_call_text(), before the difference.
ANOTHER_CALL = re.compile(r"; rank (\d+) makes another call: ")


def interruption_text(name: str, why: str, doing: str) -> str:
    """Return the error text about a rank that left a collective half-way, while its process may continue."""
    during = f" in {doing}" if doing else " in a collective"
    return (
        f"{name} was interrupted ({why}){during} and left it unfinished, so the job cannot go on."
    )


def describe_error(error: BaseException) -> str:
    """Return an exception as the end of its traceback: ``KeyError: 'x'``, or just ``KeyboardInterrupt``."""
    text = str(error).strip()  # PyTorch begins some texts with an empty line; readers take the first one
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
