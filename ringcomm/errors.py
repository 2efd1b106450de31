"""The exception tree.

Two branches matter to whoever catches: :class:`Recoverable` (a peer is gone or silent; a fresh
generation may go on without it) and :class:`Misuse` (somebody's program is wrong; trying again
fails again). Start-up problems have a branch of their own, because no collective has run yet.

Every error is composed for the person who reads it: who, doing what, with whom, how far, how
long, what to try. The facts are attributes too, so that programs need not parse the text.
"""

from __future__ import annotations

from typing import Optional, Tuple, TypeVar


class HorovodInternalError(RuntimeError):
    """What Horovod's users catch when a collective fails. Here always one of the more telling kinds.

    Code that restarts training should catch :class:`Recoverable`: a program's own mistake
    (:class:`MismatchError`) fails again however often it is tried.
    """


class RingcommError(Exception):
    """Base of everything that ringcomm raises on purpose."""


class Misuse(RingcommError):
    """A program asked for something that cannot work, however often it is tried."""


class ConfigError(Misuse, ValueError):
    """A setting, environment variable or argument has a value that makes no sense."""


class NotInitializedError(Misuse, ValueError):
    """A collective or a question about rank and size came before ``init()`` or after ``shutdown()``."""


class UnsupportedDtypeError(Misuse, TypeError, ValueError):
    """The element type cannot be carried, or the operation has no meaning for it."""


class NotOfferedError(Misuse, NotImplementedError):
    """There is no such combination of an operation and its arguments, though one could imagine it."""


class ShapeError(Misuse, ValueError, HorovodInternalError):
    """An array has no first dimension, and the operation is about rows.

    It is an error of two kinds because Horovod finds this out among the ranks, and callers expect that.
    """


class MismatchError(Misuse, HorovodInternalError):
    """Ranks met in different operations: another collective, type, shape, op or root.

    Attributes:
        rank: the rank that noticed, if it was not this one.
        peer: the rank whose message did not fit.
    """

    def __init__(self, message: str, *, rank: Optional[int] = None, peer: Optional[int] = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer


class DesyncError(Misuse):
    """Ranks that should hold the same numbers do not, to the last bit; training has come apart.

    Attributes:
        tensor: the name of the first tensor that differs.
        ranks: those that differ from most others, or None if there is no majority.
    """

    def __init__(
        self, message: str, *, tensor: Optional[str] = None, ranks: Optional[Tuple[int, ...]] = None
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.ranks = ranks


class DuplicateNameError(Misuse, ValueError):
    """An operation of this name is already on its way on this rank."""


class StartupError(RingcommError):
    """The job could not be put together."""


class StartTimeoutError(StartupError, TimeoutError):
    """Somebody who was expected did not come in time; the message says who."""


class RefusedError(StartupError):
    """The rendezvous answered, and said no; the message carries its reason."""


class AuthenticationError(StartupError):
    """The other side could not prove that it holds this job's key, or we could not."""


class NoRouteError(StartupError):
    """Two hosts share no network path; the message lists what was tried and why each failed."""


class Recoverable(RingcommError):
    """Somebody else is in trouble. This rank's program is fine, its job is not."""


class PeerLostError(Recoverable, ConnectionError, HorovodInternalError):
    """A rank died, left, or its connection broke while others needed it.

    Attributes:
        rank: the rank that is gone (None if it could not be told).
        host: the host it ran on, as the job calls it.
    """

    def __init__(self, message: str, *, rank: Optional[int] = None, host: Optional[str] = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class PeerStalledError(PeerLostError, TimeoutError):
    """A rank is connected but moved nothing for longer than allowed."""


class LinkLostError(PeerLostError, TimeoutError):
    """Ranks live, but do not hear each other: what is between their hosts is at fault, and none of them.

    Attributes:
        ranks: those that do not hear each other.
        hosts: the hosts they are on, in the same order.
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
    """Hosts have come or are about to go; training goes on with others after a reset, from where it is.

    Attributes:
        skip_sync: nobody new is among the ranks, so that their state need not be made the same.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class BrokenInvariantError(RingcommError, AssertionError):
    """ringcomm itself is wrong. Please report it with the message."""


class ProtocolError(RingcommError):
    """The other side sent bytes that mean nothing here: another version, or not ringcomm at all."""


_E = TypeVar("_E", bound=BaseException)


def fresh_copy(error: _E) -> _E:
    """A new exception with the same facts: several waiters must not share one traceback."""
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def failed_before(failure: BaseException) -> Misuse:
    """What a call raises in a job that has failed, once its rank has been told of the failure."""
    return Misuse(
        "This job has failed before, so no collective can run in it any more. ringrun --restarts N starts it "
        "again, in new processes; without ringrun, shutdown() and init() on every rank do. The failure was: "
        f"{describe_error(failure)}"
    )


def interruption_text(name: str, why: str, doing: str) -> str:
    """What is said of a rank that left a collective half-way, while its process may go on."""
    during = f" in {doing}" if doing else ""
    return (
        f"{name} was interrupted ({why}){during}. A message to the other ranks was left unfinished, so the "
        "job cannot go on."
    )


def describe_error(error: BaseException) -> str:
    """An exception as Python ends its traceback: ``KeyError: 'x'``, or just ``KeyboardInterrupt``."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
