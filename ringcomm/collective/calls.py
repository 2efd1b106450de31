"""A collective as one rank was asked for it, and how it is run."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import HALF_TYPES, code_of
from ..ops import CODECS, WEIGHTED_AVERAGE, Collective, ReduceOp, op_name
from ..schedule.steps import Step
from ..wire.frames import MEASUREMENT, NO_OP, NO_ROOT, Header, digest
from .call_sites import Site, nowhere, number_of_known
from .part import Part
from .reduce import Kernel
from .staged import StagedExecution

_WITHOUT_ARRAY = (Collective.BARRIER, Collective.BROADCAST_OBJECT, Collective.ALLGATHER_OBJECT)
_BY_ROWS = (Collective.ALLGATHER, Collective.ALLTOALL)
_SIZES_SHOWN = 8


class Call(NamedTuple):
    """A collective as this rank was asked for it; equal calls are run alike.

    Attributes:
        items: number of elements, where all ranks must agree on it; otherwise 0.
        ahead: whether this is the exchange of numbers that goes ahead of the collective.
        bounds: boundaries between the pieces, where all ranks must agree on them.
        text: what the arrays are, in words, where the shape does not say it. It may differ between ranks.
        codec: place in :data:`ringcomm.ops.CODECS`.
        staged: whether all ranks choose the schedule for arrays on devices.
    """

    collective: int
    dtype: np.dtype[Any]
    items: int
    op: int
    root: int
    name: str
    shape: Tuple[int, ...]
    scales: Tuple[float, float] = (1.0, 1.0)
    ahead: bool = False
    bounds: Tuple[int, ...] = ()
    text: str = ""
    codec: int = 0
    staged: bool = False

    def header(self, generation: int) -> Header:
        """The header that goes in front; name, shape, scale factors and sizes become a hash in it."""
        # Two schedules may send the same numbers of elements in another order, so the hash differs.
        name = f"{self.name}\0staged" if self.staged else self.name
        hashed = digest(name, self.shape, self.scales, self.bounds)
        code = code_of(self.dtype)
        return Header(
            generation, 0, self.collective, self.op, code, self.root, self.items, hashed, codec=self.codec
        )

    @property
    def kind(self) -> str:
        """What it is called, like ``allreduce``."""
        return MEASUREMENT if self.is_internal else Collective(self.collective).name.lower()

    @property
    def needs(self) -> int:
        """The one rank without which no other can leave the call; -1: every rank, -2: that depends."""
        if self.collective in (Collective.BROADCAST, Collective.BROADCAST_OBJECT, Collective.SCATTER):
            return self.root
        return -2 if self.collective in (Collective.GATHER, Collective.REDUCE) else -1

    @property
    def is_internal(self) -> bool:
        """Whether no program has called it."""
        return self.collective == Collective.EXCHANGE

    def describe(self) -> str:
        """The call as a person would write it, like ``allreduce(shape (2, 4), float32, op=Sum)``."""
        if self.is_internal:
            return MEASUREMENT
        arguments: List[str] = []
        if self.collective not in _WITHOUT_ARRAY:
            arguments = [self.text or self._sizes(), self.dtype.name]
            if self.op != NO_OP:
                arguments.append(f"op={op_name(self.op)}")
            if self.op == WEIGHTED_AVERAGE:
                arguments.append("with a weight")
        if self.root != NO_ROOT:
            arguments.append(f"root_rank={self.root}")
        if self.name:
            arguments.append(f"name={self.name!r}")
        for factor, value in zip(("prescale_factor", "postscale_factor"), self.scales):
            if value != 1.0:
                arguments.append(f"{factor}={value!r}")
        if self.codec:
            arguments.append(f"compression={CODECS[self.codec]!r}")
        return f"{self.kind}({', '.join(arguments)})"

    def _sizes(self) -> str:
        by_rows = self.collective in _BY_ROWS
        # Not every caller gives a shape; one that does not hold that many elements is none.
        known = by_rows or self.items in (0, prod(self.shape))
        return f"{'rows of ' if by_rows else ''}shape {self.shape}" if known else f"{self.items} elements"


class Intent(NamedTuple):
    """What the program asked for, where the runner carries it out by means of something else.

    A gather, for instance, is run as an all-to-all in which only the root receives anything. The
    attributes are those of :class:`Call`.
    """

    collective: int
    op: int = NO_OP
    root: int = NO_ROOT
    name: str = ""
    bounds: Tuple[int, ...] = ()
    text: str = ""

    def applied(self, call: Call) -> Call:
        """The call with this intent instead of its own."""
        collective, op, root, name, bounds, text = self
        return call._replace(
            collective=int(collective), op=op, root=root, name=name, bounds=bounds or call.bounds, text=text
        )


@lru_cache(maxsize=512)
def sizes_text(bounds: Tuple[int, ...]) -> str:
    """The sizes of pieces in words, from their boundaries.

    >>> sizes_text((0, 3, 4)), sizes_text((0, 3, 6))
    ('sizes [3, 1]', '2 x 3 elements')
    """
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:])]
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]} elements"
    if len(sizes) <= _SIZES_SHOWN:
        return f"sizes {sizes}"
    return f"{len(sizes)} sizes [{', '.join(map(str, sizes[:_SIZES_SHOWN]))}, ...]"


class Plan:
    """How a call is run, kept for the next time the same call comes.

    Attributes:
        runs: how often it has been run to its end.
        took_s: the time of all these runs, in seconds.
    """

    __slots__ = (
        "call", "execution", "fold", "has_place", "header", "items", "runs", "schedule", "site", "staged",
        "took_s", "warns",
    )  # fmt: skip

    def __init__(self, call: Call, schedule: Sequence[Step], header: Header, fold: Optional[Kernel]) -> None:
        self.call = call
        self.schedule = schedule
        self.header = header
        self.fold = fold
        self.items = -1
        # Ranks may well wait for each other at different lines: one prepares what the others then use.
        self.has_place = call.collective != Collective.BARRIER
        self.warns = fold is not None and fold.warns
        self.execution: Optional[Part] = None
        self.staged: Optional[StagedExecution] = None  # for arrays on devices
        self.site = nowhere()
        self.runs = 0
        self.took_s = 0.0

    def site_number(self, site: Site) -> int:
        """For the header: where the program makes this call; 0 where ranks may well be at different lines."""
        if not self.has_place:
            return 0
        known = self.site
        if site[1] == known[2] and site[0] is known[1]:
            return int(known[3])
        return number_of_known(site, known)


def usable_codec(codec: int, dtype: np.dtype[Any], op: ReduceOp) -> int:
    """Return the codec with which elements are sent: integers, and reductions that do not add, have none.

    Args:
        codec: place in :data:`ringcomm.ops.CODECS`.
        dtype: of the elements.
        op: the reduction.
    """
    wide = dtype.kind == "f" and dtype.itemsize > 2
    half = dtype.name in HALF_TYPES and CODECS[codec] in ("int8", "int4")
    return codec if (wide or half) and op in (ReduceOp.SUM, ReduceOp.AVERAGE) else 0
