"""A collective as one rank was asked for it, and how it is run."""

from __future__ import annotations

from math import prod
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import code_of
from ..ops import Collective, ReduceOp
from ..schedule.steps import Step
from ..wire.frames import NO_OP, NO_ROOT, Header, digest
from .execute import Part
from .reduce import Kernel
from .sites import nowhere

_WITHOUT_ARRAY = (Collective.BARRIER, Collective.BROADCAST_OBJECT, Collective.ALLGATHER_OBJECT)
_BY_ROWS = (Collective.ALLGATHER, Collective.ALLTOALL)


class Call(NamedTuple):
    """A collective as this rank was asked for it; equal calls are run alike.

    Attributes:
        items: number of elements, where all ranks must agree on it; otherwise 0.
        ahead: whether this is the exchange of numbers that goes ahead of the collective.
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

    def header(self, generation: int) -> Header:
        """The header that goes in front; the name, shape and scale factors become a hash in it."""
        hashed = digest(self.name, self.shape, self.scales)
        code = code_of(self.dtype)
        return Header(generation, 0, self.collective, self.op, code, self.root, self.items, hashed)

    @property
    def kind(self) -> str:
        """What it is called, like ``allreduce``."""
        return Collective(self.collective).name.lower()

    def describe(self) -> str:
        """The call as a person would write it, like ``allreduce(shape (2, 4), float32, op=Sum)``."""
        arguments: List[str] = []
        if self.collective not in _WITHOUT_ARRAY:
            by_rows = self.collective in _BY_ROWS
            # Not everybody says which shape; what does not hold that many elements is none.
            known = by_rows or self.items in (0, prod(self.shape))
            what = f"{'rows of ' if by_rows else ''}shape {self.shape}" if known else f"{self.items} elements"
            arguments = [what, self.dtype.name]
            if self.op != NO_OP:
                arguments.append(f"op={ReduceOp(self.op).name.capitalize()}")
        if self.root != NO_ROOT:
            arguments.append(f"root_rank={self.root}")
        if self.name:
            arguments.append(f"name={self.name!r}")
        for factor, value in zip(("prescale_factor", "postscale_factor"), self.scales):
            if value != 1.0:
                arguments.append(f"{factor}={value!r}")
        return f"{self.kind}({', '.join(arguments)})"


class Plan:
    """How a call is run, kept for the next time the same call comes."""

    __slots__ = ("call", "execution", "fold", "has_place", "header", "items", "schedule", "site", "warns")

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
        self.site = nowhere()
