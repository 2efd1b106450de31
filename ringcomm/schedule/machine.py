"""The model of hosts, their interfaces and their processors that the closed forms use."""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

from .calibration import (
    LOCAL_BYTE_S,
    LOCAL_LATENCY_S,
    MESSAGE_S,
    REDUCE_BYTE_S,
    WIRE_BYTE_S,
    WIRE_LATENCY_S,
)
from .cost import CostModel


class Machine(NamedTuple):
    """Hosts on one switch, each with an interface that its ranks share."""

    wire_byte_s: Tuple[float, ...] = (WIRE_BYTE_S,)  # each way; of further hosts the last one
    wire_latency_s: float = WIRE_LATENCY_S  # from the first byte sent to the first byte received
    local_byte_s: float = LOCAL_BYTE_S
    local_latency_s: float = LOCAL_LATENCY_S
    reduce_byte_s: float = REDUCE_BYTE_S  # of an operand that is added
    message_s: float = MESSAGE_S  # processor time of a message at both ends
    segment_bytes: int = 262144  # collected before a rank adds or passes on

    def wires(self, hosts: int) -> Tuple[float, ...]:
        """Return the seconds per byte of the interfaces of this many hosts."""
        known = self.wire_byte_s[:hosts]
        return known + (self.wire_byte_s[-1],) * (hosts - len(known))


def machine_of(model: CostModel) -> Machine:
    """Return the machine of a measured model. A model of one host gets interfaces of 1 Gbit/s."""
    machine = Machine(
        local_byte_s=model.byte_s, local_latency_s=model.latency_s, reduce_byte_s=model.reduce_byte_s,
        message_s=model.message_s, segment_bytes=model.segment_bytes,
    )  # fmt: skip
    if not model.hosts:
        return machine
    return machine._replace(wire_byte_s=model.wire_byte_s, wire_latency_s=model.wire_latency_s)


def grid(ranks: int, slots: Sequence[int]) -> Tuple[int, ...]:
    """Return the number of ranks on each host; further hosts have as many as the last one.

    >>> grid(5, [2])
    (2, 2, 1)
    """
    found: List[int] = []
    while ranks > 0:
        here = min(ranks, slots[min(len(found), len(slots) - 1)])
        found.append(here)
        ranks -= here
    return tuple(found)
