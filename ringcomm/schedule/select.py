"""Chooses one schedule for every call, by a model of the machine if there is one, else by rule.

A :class:`Selector` belongs to one rank of one job. All ranks must give theirs the same model (and settings),
and then all choose the same without communication. For each collective every applicable algorithm is replayed
on the model (:func:`ringcomm.schedule.cost.predict`) once for each power of two of bytes, with times
interpolated linearly between two of them. The quickest algorithm is kept for each of eight size classes from
one power of two to the next.

Not quite the quickest: ``direct`` and ``one_shot`` add up in the order of the ranks, so that results do not
depend on which of them was chosen, and small differences between the measurements of two runs change no bit.
Another algorithm must be better by more than measurements vary. The exception are long messages between three
and more hosts with slow links, where a ring is preferred: see :data:`SLOW_BYTE_S`.

**Relayed links** share the interface of the relay. So hosts that have such links own no chunk of a ``direct``
or ``hierarchical`` all-reduce, if other hosts reach all: these add up, and nothing is relayed.

**Unequal links.** Where hosts' interfaces differ in speed, ``direct`` and ``hierarchical`` all-reduces give
each rank a chunk that its interface can carry (:func:`~.cost.interface_shares`). Reduce-scatter and
all-gather cannot: there the caller defines the chunk of each rank.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from importlib import import_module
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ..configuration.settings import ALGORITHMS
from . import direct, hierarchy
from .cost import CostModel, coarse, interface_shares, predict, share_bounds
from .hierarchy import Hosts, hosts_of
from .registry import Algorithm, Problem, Steps, algorithm, algorithms, build
from .steps import even_bounds

for _module in sorted({*ALGORITHMS.values(), "tree"}):  # that of the broadcasts
    import_module(f"{__package__}.{_module}")  # registers its algorithms

MODEL_MAX_RANKS = 32
"""Beyond, the rules: replaying a ring of 64 ranks takes a second."""

HIERARCHICAL_MIN_BYTES = 64 * 1024
"""Without a model: below, its four messages on the way of an element cost more than the wire's load."""

SLOW_BYTE_S = 40e-9
"""Where the interfaces of all hosts, of three or more, carry 200 Mbit/s or less, TCP fills the queue in front
of a host to which several others send, and packets are dropped. Three hosts, 100 Mbit/s, 12 MB, time over the
bound at queues of 1, 5 and 20 ms: ``direct`` 1.16 to 1.26, 1.11, 1.13 to 1.17 (1.04 without a drop), ``ring``
1.06 each time; 20 Mbit/s: 1.09 and 1.06; six hosts, 6 MB: 1.11 and 1.07; 1 MB: 1.16 and 1.06. Shorter
messages are in flight and in the queues at once: 256 KB 1.07 and 1.14."""
_FULL_QUEUES_BYTES = 512 * 1024
_FULL_QUEUES = 1.12

NEAR_BYTE_S, FAR_BYTE_S = 1e-9, 10e-9
"""What a byte more takes where nothing was measured, within one host and otherwise (800 Mbit/s)."""

HIERARCHICAL = "hierarchical"
"""For all of them but broadcast, on hosts with several ranks each; see :mod:`ringcomm.schedule.hierarchy`."""

ONE_SHOT_MAX_BYTES = 8 * 1024
"""One round instead of two, for ``(p - 2)/2`` times more bytes. At 16 ranks and 8 KiB each rank sends
120 KiB instead of 15: about 0.1 ms more at 10 Gbit/s, the cost of a round (and 0.8 ms at 1 Gbit/s, where
8 ranks and 2 KiB would be the limit)."""

ONE_SHOT_PAIR_MAX_BYTES = 64 * 1024
"""The same for two ranks. One round and two move the same bytes then; but both ranks fold everything
instead of half, which for 64 KiB is a few microseconds."""

DOUBLING_MAX_BYTES = 128 * 1024
"""Doubling sends the whole vector in each of ``log2(p)`` rounds, a ring sends two in ``2 (p - 1)``.
At 32 ranks, 50 us and 1 Gbit/s both take the same for 120 KiB; with faster networks doubling wins for
more, but then the difference is small."""

TREE_MAX_BYTES = 64 * 1024
"""A tree sends the whole vector in each of ``log2(p)`` rounds, a chain once after ``p - 1`` hops. At 8
ranks, 50 us and 10 Gbit/s both take the same for 125 KB; at 1 Gbit/s already for 12 KB."""

_MIN_BYTES = 128  # below, all is the same
_CACHED_SCHEDULES = 1024  # a training step uses a handful of different lengths for each collective

Pose = Callable[[str, int, int], Problem]
"""Makes the problem for an algorithm from its name, a rank and a number of elements."""


class Selector:
    """Chooses and builds the schedules of one rank; ``report`` gets each choice and its reason once."""

    def __init__(
        self,
        rank: int,
        size: int,
        override: Optional[str] = None,  # the user's all-reduce
        host_index: Optional[Sequence[int]] = None,  # by rank; None: unknown
        report: Optional[Callable[[str], None]] = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._override = override
        self._grid: Optional[Hosts] = hosts_of(host_index) if host_index is not None else None
        self._one_host = host_index is not None and len(set(host_index)) == 1
        self._report = report
        self._model: Optional[CostModel] = None
        self._shares: Dict[str, Optional[List[float]]] = {}
        self._chosen: Dict[Tuple[str, int, bool], str] = {}  # by collective, size class and single fold
        self._predicted: Dict[Tuple[str, str, int], float] = {}  # by collective, algorithm and bytes
        self._build = lru_cache(_CACHED_SCHEDULES)(build)
        self._build_all_to_all = lru_cache(_CACHED_SCHEDULES)(self._new_all_to_all)

    def adopt(self, model: Optional[CostModel]) -> None:
        """Choose by this model from now on; all ranks must do it at the same point of the program."""
        self._model = None
        if model is not None and self._size <= MODEL_MAX_RANKS:
            self._model = model._replace(wire_byte_s=tuple(map(coarse, model.wire_byte_s)))
        self._shares = _unequal_shares(model, self._grid) if model is not None else {}
        self._chosen.clear()
        self._predicted.clear()
        if self._report is not None and model is not None:
            self._report(_describe(model))

    def all_reduce(self, count: int, item_bytes: int, needs_single_fold: bool) -> Steps:
        """Return this rank's schedule; ``needs_single_fold``: sums must not be rounded between hops."""
        name = self._all_reduce_name(count, item_bytes, needs_single_fold)
        return self._build("allreduce", name, self._all_reduce_problem(name, self._rank, count))

    def one_round(self, count: int, item_bytes: int, needs_single_fold: bool, slack_s: float) -> bool:
        """Return whether every rank may as well send all elements to every other, and add them up itself:
        with the same bits as :meth:`all_reduce`, and at most ``slack_s`` longer.
        """
        name = self._all_reduce_name(count, item_bytes, needs_single_fold)
        if name != "direct" or self._size == 2:
            return name in ("direct", "one_shot")
        if self._model is None:
            more_bytes = count * item_bytes * (self._size - 1) * (self._size - 2) / self._size
            return more_bytes * (NEAR_BYTE_S if self._one_host else FAR_BYTE_S) <= slack_s
        one, two = (
            self._cost("allreduce", name, _class_of(count * item_bytes), item_bytes, self._all_reduce_problem)
            for name in ("one_shot", "direct")
        )
        return one <= two + slack_s

    def _all_reduce_name(self, count: int, item_bytes: int, needs_single_fold: bool) -> str:
        rule = rule_for_all_reduce(
            self._size, count, item_bytes, needs_single_fold=needs_single_fold, override=self._override
        )
        if self._override is not None:
            return "direct" if algorithm("allreduce", rule).needs_hosts and self._grid is None else rule
        if not needs_single_fold and self._hierarchical(count * item_bytes):
            rule = HIERARCHICAL
        return self._choose("allreduce", rule, count, item_bytes, needs_single_fold, self._all_reduce_problem)

    def _hierarchical(self, nbytes: int) -> bool:
        """Return whether ranks add up within their hosts first, where nothing was measured."""
        return self._grid is not None and nbytes >= HIERARCHICAL_MIN_BYTES

    def coded_hosts(self, count: int) -> Optional[Hosts]:
        """Return the ranks by host, if an all-reduce with a codec must add up in hosts first."""
        wanted = self._override in (None, HIERARCHICAL) and self._hierarchical(4 * count)
        return self._grid if wanted else None

    def coded_bounds(
        self, count: int, block_items: int, ranks: Optional[Sequence[int]] = None
    ) -> Tuple[int, ...]:
        """Return the chunks of an all-reduce with a codec, in whole blocks; ``ranks``: one per host."""
        blocks, shares = -(-count // block_items), self._shares.get("direct")
        if ranks is not None:
            own = self._shares.get(HIERARCHICAL)
            # A host's share is divided among its ranks evenly.
            shares = None if own is None else [own[rank] * self._size / len(ranks) for rank in ranks]
        parts = self._size if ranks is None else len(ranks)
        edges = share_bounds(blocks, shares) if shares is not None else even_bounds(blocks, parts)
        return tuple(min(count, edge * block_items) for edge in edges)

    def coded_all_reduce(self, codes: Tuple[int, ...], ranks: Optional[Tuple[int, ...]] = None) -> Steps:
        """Return this rank's schedule over a buffer of codes, whose chunks have these boundaries in bytes:
        every rank with every other, or with one on every other host, so that every element is encoded twice.
        """
        if ranks is None:
            return self._build("allreduce", "direct", Problem(self._rank, self._size, codes[-1], codes))
        spans = [(0, 0)] * self._size
        for rank, span in zip(ranks, zip(codes, codes[1:])):
            spans[rank] = span
        column = tuple((rank,) for rank in ranks)
        steps = hierarchy.reduce_scatter(self._rank, column, spans)
        return tuple(steps + hierarchy.all_gather(self._rank, column, spans))

    def reduce_scatter(self, bounds: Tuple[int, ...], item_bytes: int, needs_single_fold: bool) -> Steps:
        """Return this rank's schedule; chunk r of ``bounds``, in elements, becomes rank r's."""
        rule = rule_in_chunks(self._size, needs_single_fold)
        if not needs_single_fold and self._hierarchical(bounds[-1] * item_bytes):
            rule = HIERARCHICAL
        return self._in_chunks("reducescatter", rule, bounds, item_bytes, needs_single_fold)

    def all_gather(self, bounds: Tuple[int, ...], item_bytes: int) -> Steps:
        """Return this rank's schedule; chunk r of ``bounds``, in elements, is rank r's."""
        rule = rule_in_chunks(self._size)
        if self._hierarchical(bounds[-1] * item_bytes):
            rule = HIERARCHICAL
        return self._in_chunks("allgather", rule, bounds, item_bytes, False)

    def broadcast(self, root: int, count: int, item_bytes: int) -> Steps:
        """Return this rank's schedule; ``count`` elements of rank ``root`` go to all."""
        rule = rule_for_broadcast(self._size, count, item_bytes)

        def pose(name: str, rank: int, count: int) -> Problem:
            return Problem(rank, self._size, count, root=root)

        name = self._choose("broadcast", rule, count, item_bytes, False, pose)
        return self._build("broadcast", name, pose(name, self._rank, count))

    def all_to_all(self, send_bounds: Tuple[int, ...], recv_bounds: Tuple[int, ...]) -> Steps:
        """Return this rank's schedule; see :func:`ringcomm.schedule.direct.all_to_all`."""
        return self._build_all_to_all(send_bounds, recv_bounds)

    def _new_all_to_all(self, send_bounds: Tuple[int, ...], recv_bounds: Tuple[int, ...]) -> Steps:
        return tuple(direct.all_to_all(self._rank, self._size, send_bounds, recv_bounds))

    def _in_chunks(
        self, collective: str, rule: str, bounds: Tuple[int, ...], item_bytes: int, single: bool
    ) -> Steps:
        """Return a schedule for the caller's chunks; the choice is made for even ones, by size class."""

        def pose(name: str, rank: int, count: int) -> Problem:
            return Problem(rank, self._size, count, even_bounds(count, self._size), self._grid)

        name = self._choose(collective, rule, bounds[-1], item_bytes, single, pose)
        problem = Problem(self._rank, self._size, bounds[-1], bounds, self._grid)
        return self._build(collective, name, problem)

    def _all_reduce_problem(self, name: str, rank: int, count: int) -> Problem:
        shares = self._shares.get(name)
        bounds = share_bounds(count, shares) if shares is not None else even_bounds(count, self._size)
        return Problem(rank, self._size, count, bounds, self._grid)

    def _choose(
        self, collective: str, rule: str, count: int, item_bytes: int, single: bool, pose: Pose
    ) -> str:
        """Return the algorithm for all calls of this size class, from the first one on."""
        first_bytes = _class_of(count * item_bytes)
        key = (collective, first_bytes, single)
        name = self._chosen.get(key)
        if name is None:
            problem = Problem(self._rank, self._size, count, hosts=self._grid)
            usable = [item for item in algorithms(collective) if item.usable(problem, item_bytes, single)]
            costs: Dict[str, float] = {}
            if self._model is not None and len(usable) > 1:
                costs = {
                    item.name: self._cost(collective, item.name, first_bytes, item_bytes, pose)
                    for item in usable
                }
            handicaps = {item.name: self._handicap(item, first_bytes) for item in usable}
            name = min(costs, key=lambda name: costs[name] * handicaps[name]) if costs else rule
            self._chosen[key] = name
            if self._report is not None:
                self._report(_explain(collective, first_bytes, single, name, costs))
        return name

    def _handicap(self, item: Algorithm, nbytes: int) -> float:
        """Return the factor on the predicted time of an algorithm, for messages of this many bytes."""
        wires = () if self._model is None else self._model.wire_byte_s
        if len(wires) < 3 or min(wires) < SLOW_BYTE_S or nbytes < _FULL_QUEUES_BYTES:
            return item.handicap
        return _FULL_QUEUES if item.many_to_one else 1.0

    def _cost(self, collective: str, name: str, nbytes: int, item_bytes: int, pose: Pose) -> float:
        """Return the predicted time of the shortest messages of a size class."""
        nbytes = max(nbytes, _MIN_BYTES)
        low = 1 << (nbytes.bit_length() - 1)
        cost = self._predict(collective, name, low, item_bytes, pose)
        if nbytes > low:
            above = self._predict(collective, name, 2 * low, item_bytes, pose)
            cost += (above - cost) * (nbytes - low) / low
        return cost

    def _predict(self, collective: str, name: str, nbytes: int, item_bytes: int, pose: Pose) -> float:
        assert self._model is not None
        key = (collective, name, nbytes)
        found = self._predicted.get(key)
        if found is None:
            count = max(1, nbytes // item_bytes)
            # Not through the cache: other ranks' schedules are only priced, and do not displace this rank's.
            schedules = [build(collective, name, pose(name, rank, count)) for rank in range(self._size)]
            found = self._predicted[key] = predict(schedules, item_bytes, self._model)
        return found


# ---- by rule: limits for networks with some 50 microseconds and 1 to 10 Gbit/s ------------------


def rule_for_all_reduce(
    size: int, count: int, item_bytes: int, *, needs_single_fold: bool, override: str | None = None
) -> str:
    """Return the name of the all-reduce: the user's, unless it cannot add up in a single fold as needed."""
    if override is not None:
        wanted = algorithm("allreduce", override)
        return "direct" if needs_single_fold and not wanted.single_fold else override
    length_bytes = count * item_bytes
    if size <= direct.MAX_RANKS:
        limit_bytes = ONE_SHOT_PAIR_MAX_BYTES if size == 2 else ONE_SHOT_MAX_BYTES
        return "one_shot" if length_bytes <= limit_bytes else "direct"
    if needs_single_fold:
        return "direct"
    return "doubling" if length_bytes <= DOUBLING_MAX_BYTES else "ring"


def rule_in_chunks(size: int, needs_single_fold: bool = False) -> str:
    """Return the name of the reduce-scatter or all-gather; only "direct" folds once."""
    return "direct" if needs_single_fold or size <= direct.MAX_RANKS else "ring"


def rule_for_broadcast(size: int, count: int, item_bytes: int) -> str:
    """Return the name of the broadcast."""
    return "tree" if size <= 2 or count * item_bytes <= TREE_MAX_BYTES else "chain"


# ---- by the model ----------------------------------------------------------------------------------


def _class_of(nbytes: int) -> int:
    """Return the fewest bytes of a message in the same size class; there are eight to each power of two.

    >>> [_class_of(nbytes) for nbytes in (127, 16384, 18431, 18432, 32767)]
    [0, 16384, 16384, 18432, 30720]
    """
    shift = nbytes.bit_length() - 4
    return nbytes >> shift << shift if nbytes >= _MIN_BYTES else 0


def _unequal_shares(model: CostModel, grid: Optional[Hosts]) -> Dict[str, Optional[List[float]]]:
    """Return each rank's share of an all-reduce, by algorithm; nothing where all shares are equal."""
    speeds = [1.0 / byte_s for byte_s in model.wire_byte_s]
    ranks = Counter(model.hosts)
    counts = [ranks[host] for host in range(len(speeds))]
    centres = set(ranks) - {host for pair in model.relayed for host in pair}
    if model.relayed and centres:
        together = sum(counts[host] for host in centres)
        return dict.fromkeys(
            ("direct", HIERARCHICAL), [float(host in centres) / together for host in model.hosts]
        )
    if len(set(speeds)) < 2:
        return {}
    by_host = interface_shares(counts, speeds)
    found: Dict[str, Optional[List[float]]] = {
        "direct": [by_host[host] / counts[host] for host in model.hosts]
    }
    if grid is not None:
        # One rank of every host talks to one of every other: as if each had a single one.
        by_host = interface_shares([1] * len(speeds), speeds)
        found[HIERARCHICAL] = [by_host[host] / counts[host] for host in model.hosts]
    return found


def _describe(model: CostModel) -> str:
    where = "between ranks of a host" if model.hosts else "between ranks"
    text = f"measured: {where} {model.latency_s * 1e6:.0f} us and {1e-9 / model.byte_s:.1f} GB/s"
    if model.hosts:
        speeds = ", ".join(f"{8e-6 / byte_s:.0f}" for byte_s in model.wire_byte_s)
        text += f", between hosts {model.wire_latency_s * 1e6:.0f} us, the hosts' interfaces {speeds} Mbit/s"
    return f"{text}; adding {1e-9 / model.reduce_byte_s:.0f} GB/s"


def _explain(collective: str, first_bytes: int, single: bool, name: str, costs: Dict[str, float]) -> str:
    step_bytes = (1 << (first_bytes.bit_length() - 4)) if first_bytes else _MIN_BYTES
    what = f"{collective} of {first_bytes} to {first_bytes + step_bytes - 1} bytes"
    what += ", all contributions at once" if single else ""
    if not costs:
        return f"{what}: {name}"
    by_cost = sorted((cost, other) for other, cost in costs.items())
    prices = ", ".join(f"{other} {cost * 1e3:.3g}" for cost, other in by_cost)
    return f"{what}: {name} (ms predicted: {prices})"
