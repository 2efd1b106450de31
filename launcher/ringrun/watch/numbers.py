"""The launcher's parser of the counters that a rank reports. Pure."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ringcomm.errors import ProtocolError

from ..reach.incoming import json_of

MAX_RANKS = _MAX_ENTRIES = 4096
_TEXT_CHARACTERS = 1000
_GAUGES = ("local_steps", "local_drift")


class PeerNumbers(NamedTuple):
    """A rank's exchange with another one."""

    sent_bytes: int = 0  # headers included, as in received_bytes
    received_bytes: int = 0
    slept_s: float = 0.0  # asleep until the other one's data came
    delivered_bytes: int = 0  # by TCP to the other one, as the system counts it
    busy_s: float = 0.0  # TCP's time for that


class KindNumbers(NamedTuple):
    """The totals of a rank's collectives of one kind; `moved_bytes` are sent and received."""

    runs: int = 0
    took_s: float = 0.0
    moved_bytes: int = 0


class Sample(NamedTuple):
    """The counters of a rank at one time."""

    at_s: float  # arrival, by the launcher's clock
    rank: int  # as its report says
    generation: int  # membership epoch
    elapsed_s: float  # since the rank joined the job
    steps: int  # of training
    step_s: float  # time of the last step
    waited_s: float  # in collectives, moving data or waiting for other ranks
    peers: Dict[int, PeerNumbers]  # by rank
    kinds: Dict[str, KindNumbers]  # by kind, such as allreduce
    operations: Dict[str, KindNumbers]  # by description, those that took the most time
    late_s: Dict[int, float]  # from rank 0 only: by rank, how long operations by name waited for it alone
    doing: str  # the present or the last collective
    inside: bool  # it is in that collective
    waits_for: Tuple[int, ...]  # ranks from which it waits to receive
    gauges: Dict[str, float]  # other known counters by name

    @property
    def calls(self) -> int:
        return sum(kind.runs for kind in self.kinds.values())

    @property
    def local_steps(self) -> str:
        """Interval of synchronization of ranks that make local steps, in words; "" if they make none."""
        steps, drift = self.gauges.get("local_steps"), self.gauges.get("local_drift")
        if steps is None:
            return ""
        apart = "" if drift is None else f", their weights were {100 * drift:.2g} % apart"
        return f"local steps: the ranks synchronize every {steps:.0f} steps{apart}"

    @property
    def sent_bytes(self) -> int:
        return sum(peer.sent_bytes for peer in self.peers.values())

    @property
    def received_bytes(self) -> int:
        return sum(peer.received_bytes for peer in self.peers.values())


def parse_sample(data: bytes, at_s: float, size: int = MAX_RANKS) -> Optional[Sample]:
    """Return a rank's report from JSON; None if it is not valid. `at_s` is its arrival; entries about ranks
    from `size` on are dropped.
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
