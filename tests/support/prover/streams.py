"""Checks that the steps of all ranks are well formed, and that sends and receives fit together."""

from __future__ import annotations

from typing import Counter, NoReturn, Tuple

from ringcomm.errors import BrokenInvariantError
from ringcomm.schedule.cost import Schedules, Streams, pair_steps
from ringcomm.schedule.steps import DATA, SELF, SOURCE, Send, Step


def checked_streams(schedules: Schedules) -> Streams:
    """Return the pairings of :func:`~ringcomm.schedule.cost.pair_steps`; BrokenInvariantError if a step is
    malformed, or the two sides disagree about number or lengths.
    """
    sent: Counter[Tuple[int, int]] = Counter()
    received: Counter[Tuple[int, int]] = Counter()
    for rank, steps in enumerate(schedules):
        for index, step in enumerate(steps):
            _check_step(rank, index, step, len(schedules))
            if isinstance(step, Send):
                sent[rank, step.peer] += 1
            else:
                received.update((peer, rank) for peer in step.peers)
    for source, target in sorted({*sent, *received}):
        if sent[source, target] != received[source, target]:
            fail(
                f"rank {source} has {sent[source, target]} sends to rank {target}, "
                f"which has {received[source, target]} receives from it"
            )
    streams = pair_steps(schedules)
    for pair in (pair for pairs in streams.values() for pair in pairs):
        if pair.send.stop - pair.send.start != pair.recv.stop - pair.recv.start:
            fail(
                f"{name_of(pair.source, pair.send_index, pair.send)} and "
                f"{name_of(pair.target, pair.recv_index, pair.recv)} meet, but differ in length"
            )
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
