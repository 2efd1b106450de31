"""Pairs the sends of all ranks with the receives that they fill.

The cost model and the checker of the tests both work on the schedules of all ranks together.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, NoReturn, Sequence, Tuple

from ..errors import BrokenInvariantError
from .steps import DATA, SELF, SOURCE, Recv, Send, Step

Schedules = Sequence[Sequence[Step]]
"""One schedule per rank."""

Streams = Dict[Tuple[int, int], List["Pairing"]]
"""Per (sender, receiver): the pairings between them, in order."""


class Pairing(NamedTuple):
    """A ``Send`` and the ``Recv`` that takes its elements; indices into the two ranks' lists."""

    source: int
    send_index: int
    send: Send
    target: int
    recv_index: int
    recv: Recv


def pair_steps(schedules: Schedules) -> Streams:
    """Match sends with receives: per (sender, receiver), in the order of the stream between them. Raises
    BrokenInvariantError if a step is malformed, or the two sides disagree about number or lengths.
    """
    sends: Dict[Tuple[int, int], List[Tuple[int, Send]]] = {}
    recvs: Dict[Tuple[int, int], List[Tuple[int, Recv]]] = {}
    for rank, steps in enumerate(schedules):
        for index, step in enumerate(steps):
            _check_step(rank, index, step, len(schedules))
            if isinstance(step, Send):
                sends.setdefault((rank, step.peer), []).append((index, step))
            else:
                for peer in step.peers:
                    recvs.setdefault((peer, rank), []).append((index, step))
    streams: Streams = {}
    for source, target in sorted(sends.keys() | recvs.keys()):
        outgoing, incoming = sends.get((source, target), []), recvs.get((source, target), [])
        if len(outgoing) != len(incoming):
            fail(
                f"rank {source} has {len(outgoing)} sends to rank {target}, "
                f"which has {len(incoming)} receives from it"
            )
        pairs = [
            Pairing(source, i, send, target, j, recv) for (i, send), (j, recv) in zip(outgoing, incoming)
        ]
        for pair in pairs:
            if pair.send.stop - pair.send.start != pair.recv.stop - pair.recv.start:
                fail(
                    f"{name_of(source, pair.send_index, pair.send)} and "
                    f"{name_of(target, pair.recv_index, pair.recv)} meet, but differ in length"
                )
        streams[source, target] = pairs
    return streams


def fail(message: str) -> NoReturn:
    """Raise BrokenInvariantError for a wrong schedule."""
    raise BrokenInvariantError(f"schedule is wrong: {message}")


def name_of(rank: int, index: int, step: Step) -> str:
    """Return the name of a step in messages."""
    return f"rank {rank} step {index} {step}"


def _check_step(rank: int, index: int, step: Step, size: int) -> None:
    """Raise BrokenInvariantError if a step is malformed in itself."""
    wrong = ""
    peers = (step.peer,) if isinstance(step, Send) else step.peers
    if not 0 <= step.start <= step.stop:
        wrong = "not a span"
    elif not peers or len(set(peers)) < len(peers) or rank in peers or min(peers) < 0 or max(peers) >= size:
        wrong = f"peers must be different other ranks below {size}"
    elif isinstance(step, Send):
        if step.buffer not in (DATA, SOURCE):
            wrong = "no such buffer"
    elif step.fold:
        if sorted(step.fold) != sorted((SELF, *peers)):
            wrong = "the fold is no permutation of the peers and SELF"
    elif len(peers) != 1 or step.final:
        wrong = "only a fold can have several peers or be final"
    if wrong:
        fail(f"{name_of(rank, index, step)}: {wrong}")
