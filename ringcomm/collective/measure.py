"""Measures the machine, once per job, over the links that the job will use.

The first rank of every host measures for it: with the next rank of its own host, then with the first ranks of
all other hosts, in rounds of disjoint pairs so that no pair disturbs another. In a pair the lower rank asks.
It sends and gets back a few bytes some times, then both send each other blocks of doubling size at the same
time, until one takes long enough to give the speed, and that one again: a busy machine makes some slow,
nothing makes one fast. Of two hosts the slower interface limits a pair, so the only fast one would look as
slow as the others. That is why, with three hosts or more that look equally fast, each of them swaps with all
others of them at the same time.

All of it goes through the executor, so it measures the speed of collectives. It takes some milliseconds on
one host and some 30 ms per round between hosts of 1 Gbit/s (100 ms where a wire has 20 Mbit/s).
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..codec.codecs import SEGMENT_ITEMS, make_codec
from ..dtypes import Array
from ..ops import Collective
from ..schedule.cost import Calibration, CostModel, leaders, model_of
from ..schedule.steps import SOURCE, Recv, Send, Step
from ..transport.nics import pairings
from ..wire.signature import ahead_of
from .runner import Runner

CHOSEN_CODECS = ("bf16", "int8")
"""Those whose cost is measured, to choose one."""

MAX_LOCAL_RANKS = 8
"""A job on one host with more ranks does without: there the choice is not worth the wait."""

_MAX_ROUNDS = 7
_MAX_CENTRES = 8
_PINGS = 9
_FIRST_BYTES = 16 * 1024
_STEADY_BYTES = 512 * 1024
"""Smaller blocks fit into a shaper's burst or a switch's buffer and say nothing about the wire."""
_LAST_BYTES = 2 * 1024 * 1024
_ENOUGH_S = 0.008
_AT_MOST_S = 0.03
_REPETITIONS = 5


def gathered(runner: Runner, values: Sequence[float]) -> Array:
    """Return the numbers of all ranks, one row per rank; all ranks must call it at the same point."""
    call = ahead_of(Collective.EXCHANGE, np.dtype(np.float64), "measure")
    return runner.exchange(np.array(values, np.float64).view(np.int64).tolist(), call).view(np.float64)


def measure(
    runner: Runner, host_index: Sequence[int], relayed: Collection[Tuple[int, int]] = ()
) -> Optional[CostModel]:
    """Measure the machine together, before anything else, and return the same model on every rank; None if it
    would not be worth it. The runner is used up: later calls need another. ``relayed``: pairs of hosts.
    """
    if runner.size == 1 or (len(set(host_index)) == 1 and runner.size > MAX_LOCAL_RANKS):
        return None
    rank, firsts = runner.rank, leaders(host_index)
    own = [other for other, host in enumerate(host_index) if host == host_index[rank]]
    timer = _LinkTimer(runner)
    local = timer.pair(own[0], own[1]) if rank in own[:2] and len(own) > 1 else (0.0, 0.0)
    wires: List[Tuple[float, float]] = []
    if rank in firsts and len(firsts) > 1:
        for pairs in pairings(firsts, _MAX_ROUNDS):
            wires += [timer.pair(*pair) for pair in pairs if rank in pair]
    latency_s = min((wire[0] for wire in wires), default=0.0)
    byte_s = min((wire[1] for wire in wires), default=0.0)
    if len(firsts) > 2:
        byte_s = _measure_centres(runner, timer, firsts, byte_s)
    a, b = np.ones(32768, np.float32), np.ones(32768, np.float32)
    reduce_byte_s = _seconds(partial(np.add, a, b, out=b)) / a.nbytes
    mine = Calibration(reduce_byte_s, *local, latency_s, byte_s)
    return model_of([Calibration(*row.tolist()) for row in gathered(runner, mine)], host_index, relayed)


def _measure_centres(runner: Runner, timer: _LinkTimer, firsts: Sequence[int], byte_s: float) -> float:
    """Measure the hosts that may be faster than any pair could show; return this host's seconds per byte."""
    everybodys = gathered(runner, [byte_s])[:, 0]
    fastest = min(everybodys[rank] for rank in firsts)
    centres = [rank for rank in firsts if everybodys[rank] <= 1.5 * fastest]
    # With two, each has shown all that the other can; slower ones would only make it take longer.
    if runner.rank in centres and 2 < len(centres) <= _MAX_CENTRES:
        for centre in centres:
            others = [rank for rank in centres if rank != centre]
            together_s = timer.burst(centre, others, fastest)
            if runner.rank == centre:
                byte_s = min(byte_s, together_s)
    return byte_s


class _LinkTimer:
    """Swaps bytes with single ranks, and takes the time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._source = np.ones(_LAST_BYTES, np.uint8)
        self._data = np.ones(_LAST_BYTES, np.uint8)

    def pair(self, first: int, second: int) -> Tuple[float, float]:
        """Return latency in seconds and seconds per byte between two ranks, as the first of them sees it."""
        latency_s = self._latency(first, second)
        return latency_s, self._speed(first, second)

    def _latency(self, first: int, second: int) -> float:
        """Return half of the time that a few bytes take there and back on idle links."""
        if self._runner.rank == first:
            steps: Tuple[Step, ...] = (Send(second, 0, 8, SOURCE), Recv((second,), 0, 8))
        else:
            steps = (Recv((first,), 0, 8), Send(first, 0, 8))
        times = sorted(self._timed(steps, 8) for _ in range(_PINGS))
        return times[_PINGS // 4] / 2

    def _speed(self, first: int, second: int) -> float:
        """Return seconds per byte between two ranks, both ways at once, as the first of them sees it."""
        length, first_s = _FIRST_BYTES, 0.0
        while True:
            elapsed_s = self._told(first, [second], self._swap(first, [second], length))
            if first_s or elapsed_s >= _AT_MOST_S:
                return min(elapsed_s, first_s or elapsed_s) / length
            if 2 * length > _LAST_BYTES or (length >= _STEADY_BYTES and elapsed_s >= _ENOUGH_S):
                first_s = elapsed_s
            else:
                length *= 2

    def burst(self, centre: int, others: Sequence[int], byte_s: float) -> float:
        """Return seconds per byte between one rank and all others at the same time, as that rank sees it."""
        length = _FIRST_BYTES
        while 2 * length * len(others) <= _LAST_BYTES and length * byte_s < _ENOUGH_S:
            length *= 2
        # The first empties the buckets of shapers. No pair begins the second before the first has ended.
        self._told(centre, others, self._swap(centre, others, length))
        return self._swap(centre, others, length) / (length * len(others))

    def _swap(self, centre: int, others: Sequence[int], length: int) -> float:
        """Swap this many bytes between one rank and each of the others; return the seconds."""
        peers = others if self._runner.rank == centre else [centre]
        steps: List[Step] = [Send(peer, 0, length, SOURCE) for peer in peers]
        steps += [Recv((peer,), i * length, (i + 1) * length) for i, peer in enumerate(peers)]
        return self._timed(tuple(steps), length * len(peers))

    def _told(self, centre: int, others: Sequence[int], elapsed_s: float) -> float:
        """Return the seconds that the one rank reports, so that all come to the same decision."""
        report = np.array([elapsed_s], np.float64)
        if self._runner.rank == centre:
            self._runner.run_apart(tuple(Send(peer, 0, 1) for peer in others), report, report, "report")
        else:
            self._runner.run_apart((Recv((centre,), 0, 1),), report, report, "report")
        return float(report[0])

    def _timed(self, steps: Tuple[Step, ...], length: int) -> float:
        run = partial(self._runner.run_apart, steps, self._data[:length], self._source, "measure")
        return _seconds(run, repetitions=1)


# ---- codecs --------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """The cost of a codec, in seconds per byte of float32."""

    encode_byte_s: float
    decode_byte_s: float


def measured_rates(mean_over_s: float = 0.0) -> Dict[str, Rates]:
    """Return the speed of the codecs: the best of a few runs, with a CPU quota the mean of some seconds."""
    values = np.linspace(-1, 1, SEGMENT_ITEMS, dtype=np.float32)
    found = {}
    for name in CHOSEN_CODECS:
        codec = make_codec(name)
        codes, out = np.empty(codec.encoded_bytes(values.size), np.uint8), np.empty_like(values)
        encode_s = _seconds(partial(codec.encode, values, codes), mean_over_s)
        decode_s = _seconds(partial(codec.decode, codes, out), mean_over_s)
        found[name] = Rates(encode_s / values.nbytes, decode_s / values.nbytes)
    return found


def code_s(nbytes: int, size: int, rates: Optional[Rates]) -> float:
    """Return the seconds of processor time of each rank for the codes of ``nbytes`` of float32."""
    if rates is None or size < 2:
        return 0.0
    others = (size - 1) / size
    return nbytes * (rates.encode_byte_s + others * 2 * rates.decode_byte_s)


def _seconds(act: Callable[[], object], mean_over_s: float = 0.0, repetitions: int = _REPETITIONS) -> float:
    """Return the seconds that it takes: the least of some repetitions, or the mean over so many seconds."""
    times: List[float] = []
    while len(times) < repetitions or sum(times) < mean_over_s:
        started_s = perf_counter()
        act()
        times.append(perf_counter() - started_s)
    return sum(times) / len(times) if mean_over_s else min(times)
