"""The errors that end a job on all ranks, as each rank makes them from a message, or from its absence."""

from __future__ import annotations

from typing import Dict, Optional, Type

from ..errors import (
    ExcludedError,
    LinkLostError,
    MismatchError,
    NoRouteError,
    PeerLostError,
    PeerStalledError,
    RingcommError,
    StartTimeoutError,
    StartupError,
)
from ..wire.messages import Message

_ERRORS: Dict[str, Type[RingcommError]] = {
    "lost": PeerLostError,
    "stalled": PeerStalledError,
    "cut": LinkLostError,
    "mismatch": MismatchError,
    "timeout": StartTimeoutError,
    "no_route": NoRouteError,
    "startup": StartupError,
}


def error_from(message: Message) -> RingcommError:
    """Return the error of an ``abort`` message."""
    kind = _ERRORS.get(str(message["kind"]), RingcommError)
    rank, host = message.get("rank"), message.get("host")
    if issubclass(kind, LinkLostError):
        ranks, hosts = message.get("ranks", ()), message.get("hosts", ())
        return kind(str(message["text"]), ranks=tuple(map(int, ranks)), hosts=tuple(map(str, hosts)))
    if issubclass(kind, PeerLostError):
        return kind(str(message["text"]), rank=rank, host=host)
    if issubclass(kind, MismatchError):
        return kind(str(message["text"]), rank=rank)
    return kind(str(message["text"]))


def without_rendezvous(reason: str, server: Optional[int], name: str, host: Optional[str]) -> PeerLostError:
    """Return the error when the connection to the rendezvous has ended. ``server``, ``name`` and ``host`` are
    of the rank that served it; None: the launcher did, or it is unknown.
    """
    if server is None:
        return PeerLostError(
            f"The rendezvous of this job is gone ({reason}): ringrun, or the process that served it, has "
            "ended. Without it failures cannot be reported to other ranks, so this rank stops."
        )
    text = f"{name} was lost: {reason}. Its process served the rendezvous, over which failures are reported."
    return PeerLostError(text, rank=server, host=host)


def left_behind(host: Optional[str], silent_s: float, problem: RingcommError) -> ExcludedError:
    """Return the error of a member of an elastic job that cannot reach its rendezvous any more. ``silent_s``:
    since the rendezvous' last message, or since this process asked for a view; ``problem``: of the last
    attempt.
    """
    return ExcludedError(
        f"this rank on {host or 'this host'} was cut off from its job: no message for {silent_s:.0f} s, "
        f"then: {problem} The job has gone on without this rank, or has ended, so this process ends. A host "
        "that can be reached again gets new ranks by itself while ringrun runs; if it does not, write "
        f"`ringrun add {host or 'HOST'}` on the machine where ringrun runs. If the job has ended, start it "
        "again.",
        lost=True,
    )
