"""The numbers that a rank reports about itself, as the launcher reads them. Pure."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ringcomm.errors import ProtocolError

from ..reach.incoming import json_of

MAX_RANKS = _MAX_ENTRIES = 4096
_TEXT_CHARACTERS = 1000
_GAUGES = ("local_steps", "local_drift")


class PeerNumbers(NamedTuple):
    """What a rank has exchanged with another one.

    Attributes:
        sent_bytes, received_bytes: headers included.
        slept_s: how long the rank slept until the other one's data came, in seconds.
        delivered_bytes: what TCP connections have delivered to the other one, as the system counts it.
        busy_s: for how long they were busy with that, in seconds.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    slept_s: float = 0.0
    delivered_bytes: int = 0
    busy_s: float = 0.0


class KindNumbers(NamedTuple):
    """What a rank's collectives of one kind have done.

    Attributes:
        runs: their number.
        took_s: the time of all of them, in seconds.
        moved_bytes: sent and received.
    """

    runs: int = 0
    took_s: float = 0.0
    moved_bytes: int = 0


class Sample(NamedTuple):
    """What a rank had done at one time.

    Attributes:
        at_s: when it arrived, by the launcher's clock.
        rank: the rank, as its report says.
        generation: membership epoch.
        elapsed_s: since the rank joined the job.
        steps: number of training steps.
        step_s: time of the last one.
        waited_s: time in collectives, moving data or waiting for other ranks.
        peers: by rank.
        kinds: by kind, such as ``allreduce``.
        operations: by description; those that took the most time.
        late_s: from rank 0 only: by rank, how long operations by name have waited for it alone.
        doing: the collective that it is in, or the last one.
        inside: whether it is in it.
        waits_for: the ranks from which it waits to receive.
        gauges: other numbers by name, those that are known here.
    """

    at_s: float
    rank: int
    generation: int
    elapsed_s: float
    steps: int
    step_s: float
    waited_s: float
    peers: Dict[int, PeerNumbers]
    kinds: Dict[str, KindNumbers]
    operations: Dict[str, KindNumbers]
    late_s: Dict[int, float]
    doing: str
    inside: bool
    waits_for: Tuple[int, ...]
    gauges: Dict[str, float]

    @property
    def calls(self) -> int:
        """Number of collectives."""
        return sum(kind.runs for kind in self.kinds.values())

    @property
    def local_steps(self) -> str:
        """How often ranks that make local steps synchronize, in words; "" if they make none."""
        steps, drift = self.gauges.get("local_steps"), self.gauges.get("local_drift")
        if steps is None:
            return ""
        apart = "" if drift is None else f", their weights were {100 * drift:.2g} % apart"
        return f"local steps: the ranks synchronize every {steps:.0f} steps{apart}"

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all ranks."""
        return sum(peer.sent_bytes for peer in self.peers.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received from all ranks."""
        return sum(peer.received_bytes for peer in self.peers.values())


def parse_sample(data: bytes, at_s: float, size: int = MAX_RANKS) -> Optional[Sample]:
    """A rank's report; None if it is not valid.

    Args:
        data: JSON from the rank.
        at_s: when it arrived, in seconds.
        size: the number of ranks; what a report says of others is left out.
    """
    try:
        found = json_of(data)
        return Sample(
            at_s,
            _whole(found["rank"]),
            _whole(found["generation"]),
            _amount(found["elapsed_s"]),
            _whole(found["steps"]),
            _amount(found["step_s"]),
            _amount(found["waited_s"]),
            {
                _whole(rank): PeerNumbers(
                    _whole(sent), _whole(received), _amount(slept_s), _whole(delivered), _amount(busy_s)
                )
                for rank, (sent, received, slept_s, delivered, busy_s) in _entries(found["peers"])
                if _whole(rank) < size
            },
            _kinds(found["kinds"]),
            _kinds(found["operations"]),
            {_whole(rank): _amount(seconds) for rank, seconds in _entries(found["late"])
             if _whole(rank) < size},
            str(found["doing"])[:_TEXT_CHARACTERS],
            bool(found["inside"]),
            tuple(rank for rank in map(_whole, list(found["waits_for"])[:_MAX_ENTRIES]) if rank < size),
            {name: _amount(found["gauges"][name]) for name in _GAUGES if name in found["gauges"]},
        )
    except (ProtocolError, ValueError, TypeError, LookupError, OverflowError, AttributeError):
        return None


def _whole(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{number} is out of range")
    return number


def _amount(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{number} is out of range")
    return number


def _entries(table: Mapping[str, Any]) -> List[Tuple[str, Any]]:
    return list(table.items())[:_MAX_ENTRIES]


def _kinds(table: Mapping[str, Any]) -> Dict[str, KindNumbers]:
    return {
        str(name)[:_TEXT_CHARACTERS]: KindNumbers(_whole(runs), _amount(took_s), _whole(moved_bytes))
        for name, (runs, took_s, moved_bytes) in _entries(table)
    }
