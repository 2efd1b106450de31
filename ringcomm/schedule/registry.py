"""The table of algorithms: each module that defines one registers it here, with the limits of its use.

An :class:`Algorithm` says which collective it computes, how to build one rank's schedule for a
:class:`Problem`, and where it may be considered. :mod:`ringcomm.schedule.select` prices every registered
algorithm that is usable for a call and takes the cheapest. So a new algorithm is one module, a line in
``ringcomm.configuration.settings.ALGORITHMS`` (which names the module), and its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ..errors import BrokenInvariantError, ConfigError
from .steps import Schedule, Step

Steps = Tuple[Step, ...]
"""A finished schedule. All calls of the same shape share it, so it cannot be changed."""

TITLES = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "broadcast": "broadcast",
}
"""The collectives that have algorithms to choose from, and their names in messages."""


@dataclass(frozen=True)
class Problem:
    """The problem that a schedule solves, as one rank sees it."""

    rank: int
    size: int
    count: int  # elements of the whole vector
    bounds: Tuple[int, ...] = ()  # ``size + 1`` chunk boundaries in elements; chunk r belongs to rank r
    hosts: Optional[Tuple[Tuple[int, ...], ...]] = None  # ranks of each host, see :func:`.hierarchy.hosts_of`
    root: int = 0  # of a broadcast


class Algorithm(NamedTuple):
    """One way to compute a collective."""

    collective: str  # one of :data:`TITLES`
    name: str  # unique among those of the collective
    build: Callable[[Problem], Schedule]
    single_fold: bool = False  # one fold makes each element: no sum is rounded or wrapped on the way
    min_ranks: int = 1
    max_ranks: Optional[int] = None
    max_bytes: Optional[int] = None  # not considered from the size class (power of two) of this many bytes on
    needs_hosts: bool = False  # needs ``Problem.hosts``
    # Factor on its predicted time, by which another algorithm wins a near tie. More than 1 where its
    # order of additions depends on the algorithm, so that small differences between two measurements of a
    # machine do not change the bits of a result.
    handicap: float = 1.0
    # Ranks of several hosts send to one at the same time. Where links are slow, queues in front of the
    # receiver overflow then.
    many_to_one: bool = False

    def usable(self, problem: Problem, item_bytes: int, needs_single_fold: bool) -> bool:
        """Return whether it may be considered for ``problem.count`` elements of ``item_bytes`` each."""
        if needs_single_fold and not self.single_fold:
            return False
        if self.needs_hosts and problem.hosts is None:
            return False
        if problem.size < self.min_ranks or (self.max_ranks is not None and problem.size > self.max_ranks):
            return False
        length_bytes = problem.count * item_bytes
        return self.max_bytes is None or length_bytes.bit_length() < self.max_bytes.bit_length()


_TABLE: Dict[str, Dict[str, Algorithm]] = {collective: {} for collective in TITLES}


def register(algorithm: Algorithm) -> None:
    """Add an algorithm to the table; raises BrokenInvariantError for an unknown collective or known name."""
    known = _TABLE.get(algorithm.collective)
    if known is None:
        raise BrokenInvariantError(f"no collective {algorithm.collective!r}; there are {', '.join(TITLES)}")
    if algorithm.name in known:
        raise BrokenInvariantError(f"two {algorithm.collective} algorithms are called {algorithm.name!r}")
    known[algorithm.name] = algorithm


def algorithms(collective: str) -> List[Algorithm]:
    """Return the algorithms of a collective, for ties in an order that does not depend on imports."""
    return sorted(_TABLE[collective].values(), key=lambda item: item.build.__module__)


def algorithm(collective: str, name: str) -> Algorithm:
    """Return the algorithm of that name; raises ConfigError, with the known names, if there is none."""
    known = _TABLE[collective]
    if name not in known:
        names = ", ".join(item.name for item in algorithms(collective))
        raise ConfigError(f"no {TITLES[collective]} algorithm is called {name!r}; there are {names}")
    return known[name]


def build(collective: str, name: str, problem: Problem) -> Steps:
    """Return one rank's schedule by the algorithm of that name; raises ConfigError if there is none.

    >>> from . import ring
    >>> len(build("allreduce", "ring", Problem(rank=0, size=2, count=4, bounds=(0, 2, 4))))
    4
    """
    return tuple(algorithm(collective, name).build(problem))
