"""What a prediction assumes: hosts, their interfaces, the processors, and the way gradients are reduced."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..configuration.parsing import bits_per_s
from ..errors import ConfigError
from .calibration import (
    LOCAL_BYTE_S,
    LOCAL_LATENCY_S,
    MESSAGE_S,
    REDUCE_BYTE_S,
    WIRE_BYTE_S,
    WIRE_LATENCY_S,
)
from .cost import CostModel

PAYLOAD = 0.957
"""Which part of a line rate is payload: headers take the rest of a frame of 1514 bytes."""


class Machine(NamedTuple):
    """Hosts on one switch, each with an interface that its ranks share.

    Attributes:
        wire_byte_s: seconds per byte through each host's interface, each way; of further hosts the last one.
        wire_latency_s: from the first byte sent to the first byte received, between hosts.
        local_byte_s, local_latency_s: the same between ranks of one host.
        reduce_byte_s: per byte of an operand that is added.
        message_s: processor time of a message at both ends.
        segment_bytes: how much a rank collects before it adds or passes on.
        moved_byte_s: processor time of a rank per byte that it sends or receives.
        shared_cores: cores that the ranks of all hosts share, where hosts are only simulated; 0.0: each
            host has its own.
        incast: how many times as long an interface takes that receives from more than two hosts at the same
            time: the switch drops packets then.
    """

    wire_byte_s: Tuple[float, ...] = (WIRE_BYTE_S,)
    wire_latency_s: float = WIRE_LATENCY_S
    local_byte_s: float = LOCAL_BYTE_S
    local_latency_s: float = LOCAL_LATENCY_S
    reduce_byte_s: float = REDUCE_BYTE_S
    message_s: float = MESSAGE_S
    segment_bytes: int = 262144
    moved_byte_s: float = 0.0
    shared_cores: float = 0.0
    incast: float = 1.0

    def wires(self, hosts: int) -> Tuple[float, ...]:
        """Seconds per byte of the interfaces of so many hosts."""
        known = self.wire_byte_s[:hosts]
        return known + (self.wire_byte_s[-1],) * (hosts - len(known))


def machine_of(model: CostModel) -> Machine:
    """The machine of a measured model. A model of one host gets interfaces of 1 Gbit/s."""
    machine = Machine(
        local_byte_s=model.byte_s, local_latency_s=model.latency_s, reduce_byte_s=model.reduce_byte_s,
        message_s=model.message_s, segment_bytes=model.segment_bytes,
    )  # fmt: skip
    if not model.hosts:
        return machine
    return machine._replace(wire_byte_s=model.wire_byte_s, wire_latency_s=model.wire_latency_s)


def link_byte_s(text: str) -> float:
    """Seconds per byte of payload over a link of this line rate.

    Args:
        text: like ``1gbit``, ``100mbit`` or ``2.5gbit``.

    Raises:
        ConfigError: it is no rate.

    >>> round(1e-6 / link_byte_s("1gbit"), 1)
    119.6
    """
    try:
        return 8.0 / (bits_per_s(text) * PAYLOAD)
    except ValueError as problem:
        raise ConfigError(f"link={text!r}: {problem}.") from None


class Method(NamedTuple):
    """How gradients are reduced.

    Attributes:
        kind: ``ring``, ``direct``, ``hierarchical`` or ``servers`` (parameter servers).
        servers: number of parameter servers.
        dedicated: whether they are hosts of their own; else they are on the first workers' hosts.
        pipelined: whether a server returns what is summed while more arrives. Otherwise it sends when it has
            received everything.
        codec: name of the compression, for the table.
        sent: bytes sent per byte of gradients.
        coding_byte_s: processor time of encoding and decoding per byte of gradients.
        local_steps: steps between two reductions.
    """

    kind: str
    servers: int = 0
    dedicated: bool = False
    pipelined: bool = True
    codec: str = "float32"
    sent: float = 1.0
    coding_byte_s: float = 0.0
    local_steps: int = 1

    @property
    def label(self) -> str:
        """Like ``2 extra servers`` or ``direct, int8``."""
        text = self.kind
        if self.kind == "servers":
            where = "extra " if self.dedicated else ""
            text = f"{self.servers} {where}server{'s' if self.servers > 1 else ''}"
        text += "" if self.codec == "float32" else f", {self.codec}"
        return text if self.local_steps == 1 else f"{text}, every {self.local_steps} steps"


def grid(ranks: int, slots: Optional[Sequence[int]]) -> Tuple[int, ...]:
    """Return how many ranks each host has; further hosts have as many as the last one.

    >>> grid(5, [2])
    (2, 2, 1)
    """
    places = list(slots or [1])
    found: List[int] = []
    while ranks > 0:
        here = min(ranks, places[min(len(found), len(places) - 1)])
        found.append(here)
        ranks -= here
    return tuple(found)
