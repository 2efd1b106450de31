"""A collective as one rank requests it: its fields, its text, and the differences between two calls.

Direct calls and the engine describe every operation with a :class:`Signature`. The header of a direct call
(:mod:`.frames`) is made from it, and another rank's header is read as one.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, Collection, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array, code_of_name, name_of_code, type_names
from ..ops import CODECS, WEIGHTED_AVERAGE, Collective, ReduceOp, factor_of, op_name
from .frames import NO_OP, NO_ROOT, Header, digest

Shape = Tuple[int, ...]

MEASUREMENT = "the measurement of links in init()"
"""The name in messages of the one kind of exchange that no program requests."""
BY_ROWS = (Collective.ALLGATHER, Collective.ALLTOALL)
"""Their first dimension may differ from rank to rank."""
_WITHOUT_ARRAY = (
    Collective.BARRIER, Collective.JOIN, Collective.BROADCAST_OBJECT, Collective.ALLGATHER_OBJECT,
)  # fmt: skip
_SIZES_SHOWN = 8
_COMPARED = (
    ("kind", "the operation", "operations"),
    ("dtypes", "the data type", "data types"),
    ("op", "the reduction", "reduction operations"),
    ("codec", "the compression", "compressions"),
    ("root", "the root rank", "root ranks"),
    ("items", "the number of elements", "numbers of elements"),
    ("shapes", "the tensor shape", "tensor shapes"),
    ("prescale", "the prescale factor", "prescale factors"),
    ("postscale", "the postscale factor", "postscale factors"),
    ("weighted", "the weight", "averages, some with and some without weights,"),
    ("bounds", "the list of sizes", "lists of sizes"),
)
"""The fields that ranks must agree on, with their names in messages; the first that differs is named."""


class Signature(NamedTuple):
    """A collective as this rank requests it. Equal signatures are run alike."""

    name: str  # as the user named it; empty for operations matched by their order
    process_set: int  # number
    kind: int  # :class:`~ringcomm.ops.Collective`
    op: int  # :class:`~ringcomm.ops.ReduceOp` or :class:`~ringcomm.ops.Bitwise`, or ``NO_OP``
    root: int  # rank in the job, or ``NO_ROOT``
    dtypes: Tuple[str, ...]
    shapes: Tuple[Shape, ...]  # of every tensor; for collectives by rows the shape of a row
    prescale: float = 1.0
    postscale: float = 1.0
    codec: int = 0  # place in :data:`ringcomm.ops.CODECS`, for reductions
    weighted: bool = False  # every rank weights its contribution; the weights themselves may differ
    # Boundaries between the pieces, where all ranks must agree on them: in elements of a direct call, in
    # rows of a reducescatter by name (those of every tensor, one after the other).
    bounds: Tuple[int, ...] = ()
    items: int = 0  # of a direct call: elements, where all ranks must agree on it; otherwise 0
    ahead: bool = False  # the exchange of numbers that goes ahead of a direct call
    text: str = ""  # describes a direct call's arrays if the shape does not; may differ between ranks

    # ---- on the wire -------------------------------------------------------------------------

    def to_json(self) -> List[Any]:
        """Return the description of an operation that the engine sends to rank 0."""
        return list(self[:_FIELDS_SENT])

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Signature:
        """Invert :meth:`to_json`; raises ValueError, TypeError or OverflowError for an invalid operation."""
        name, process_set, kind, op, root, dtypes, shapes, prescale, postscale, codec, weighted, bounds = data
        found = cls(
            str(name), int(process_set), int(kind), int(op), int(root), tuple(map(str, dtypes)),
            tuple(tuple(map(int, shape)) for shape in shapes), factor_of(float(prescale)),
            factor_of(float(postscale)), int(codec), bool(weighted), tuple(map(int, bounds)),
        )  # fmt: skip
        Collective(found.kind)
        if not 0 <= found.codec < len(CODECS):
            raise ValueError("no such codec")
        for dtype in found.dtypes:
            _itemsize(dtype)
        if len(found.dtypes) != len(found.shapes) or any(n < 0 for shape in found.shapes for n in shape):
            raise ValueError("tensors without a type or of negative length")
        if found.kind == Collective.REDUCESCATTER and not found.has_edges():
            raise ValueError("rows that are not divided over ranks")
        return found

    def header(self, generation: int) -> Header:
        """Return the header of a direct call; name, shape, scale factors and sizes become a hash."""
        hashed = digest(self.name, self.shapes[0], (self.prescale, self.postscale), self.bounds)
        op, code = WEIGHTED_AVERAGE if self.weighted else self.op, code_of_name(self.dtypes[0])
        return Header(generation, 0, self.kind, op, code, self.root, self.items, hashed, codec=self.codec)

    @classmethod
    def from_header(cls, header: Header) -> Signature:
        """Return the call of a header; raises ValueError, KeyError or IndexError for an unknown one."""
        weighted = header.op == WEIGHTED_AVERAGE
        op = int(ReduceOp.AVERAGE) if weighted else header.op
        dtypes = (name_of_code(header.dtype),)
        return cls(
            "", 0, int(Collective(header.collective)), op, header.root, dtypes, (), codec=header.codec,
            weighted=weighted, items=header.items,
        )  # fmt: skip

    def edges(self) -> List[Tuple[int, ...]]:
        """Return, by tensor, the boundaries between the ranks' rows in a reducescatter by name."""
        each = len(self.bounds) // max(1, len(self.shapes))
        return [self.bounds[place * each : (place + 1) * each] for place in range(len(self.shapes))]

    def has_edges(self) -> bool:
        """Return whether :meth:`edges` divide all rows of every tensor."""
        return len(self.bounds) % max(1, len(self.shapes)) == 0 and all(
            edges and shape and edges[0] == 0 and edges[-1] == shape[0] and sorted(edges) == list(edges)
            for edges, shape in zip(self.edges(), self.shapes)
        )

    # ---- as it is run ------------------------------------------------------------------------

    def key(self, number: int = 0) -> Key:
        """Return the key by which the operation is matched; ``number`` counts those without a name."""
        return Key(self.process_set, self.name, number)

    @classmethod
    def intent(
        cls, kind: Collective, op: int = NO_OP, root: int = NO_ROOT, name: str = "",
        bounds: Tuple[int, ...] = (), text: str = "",
    ) -> Signature:  # fmt: skip
        """Return a request that another operation carries out: a gather, for instance, is an all-to-all."""
        return cls(name, 0, int(kind), op, root, (), (), bounds=bounds, text=text)

    def on(self, data: Array, bounds: Tuple[int, ...] = (), items: Optional[int] = None) -> Signature:
        """Return this :meth:`intent` as a direct call on a flat array; see :func:`direct_call`."""
        return self._replace(
            dtypes=type_names(data.dtype), shapes=((),), bounds=self.bounds or bounds,
            items=data.size if items is None else items,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Return the payload of all tensors together in bytes (by rows: of one row)."""
        return sum(_itemsize(dtype) * prod(shape) for dtype, shape in zip(self.dtypes, self.shapes))

    @property
    def needs(self) -> int:
        """Return the one rank without which no other can leave the call; -1: every rank, -2: that depends."""
        if self.kind in (Collective.BROADCAST, Collective.BROADCAST_OBJECT, Collective.SCATTER):
            return self.root
        return -2 if self.kind in (Collective.GATHER, Collective.REDUCE) else -1

    @property
    def is_internal(self) -> bool:
        """Return whether no program has called it."""
        return self.kind == Collective.EXCHANGE

    # ---- in words ----------------------------------------------------------------------------

    @property
    def verb(self) -> str:
        """Return the name of its kind, like ``allreduce``."""
        return MEASUREMENT if self.is_internal else Collective(self.kind).name.lower()

    def describe(self, named: bool = True) -> str:
        """Return the call as a program would make it, like ``allreduce(shape (2, 4), float32, op=Sum)``.
        ``named``: include the name, if it has one; a message between two ranks has none.
        """
        if self.is_internal:
            return MEASUREMENT
        message = self.process_set < 0  # between two ranks, which its name says
        verb = "message" if message else self.verb
        arguments: List[str] = []
        if self.kind not in _WITHOUT_ARRAY:
            if len(self.dtypes) > 1:
                verb = f"grouped_{verb}"
                arguments += [f"{len(self.dtypes)} tensors", "types " + "/".join(sorted(set(self.dtypes)))]
            elif self.dtypes:
                arguments += [part for part in (self.text or self._sizes(), self.dtypes[0]) if part]
            if self.op != NO_OP:
                arguments.append(f"op={op_name(self.op)}")
        if self.bounds and not self.items and self.shapes:
            edges = self.edges()[0]
            sizes = [stop - start for start, stop in zip(edges, edges[1:])]
            uneven = sizes != sorted(sizes, reverse=True) or sizes[0] - sizes[-1] > 1
            if uneven or self.kind != Collective.REDUCESCATTER:
                arguments.append(f"{sizes} rows by rank")
        if self.root != NO_ROOT and not message:
            arguments.append(f"root_rank={self.root}")
        if self.name and named and not message:
            arguments.append(f"name={self.name!r}")
        if self.prescale != 1.0:
            arguments.append(f"prescale_factor={self.prescale!r}")
        if self.postscale != 1.0:
            arguments.append(f"postscale_factor={self.postscale!r}")
        if self.codec:
            arguments.append(f"compression={CODECS[self.codec]!r}")
        if self.weighted:
            arguments.append("with a weight")
        if self.process_set and not message:
            arguments.append(f"process set {self.process_set}")
        return f"{verb}({', '.join(arguments)})"

    def _sizes(self) -> str:
        by_rows = self.kind in BY_ROWS
        # Not every caller gives a shape; one that does not hold that many elements is none.
        if self.shapes and (by_rows or self.items in (0, prod(self.shapes[0]))):
            return f"{'rows of ' if by_rows else ''}shape {self.shapes[0]}"
        return f"{self.items} elements" if self.items else ""


_FIELDS_SENT = Signature._fields.index("items")


def direct_call(
    kind: Collective, data: Array, name: str = "", shape: Shape = (), op: int = NO_OP, root: int = NO_ROOT,
    **more: Any,
) -> Signature:  # fmt: skip
    """Return a direct call on a flat array; all ranks must have as many elements, except with ``items=0``."""
    more.setdefault("items", data.size)
    # Plain integers: they hash faster than members of enumerations.
    return Signature(name, 0, int(kind), int(op), root, type_names(data.dtype), (shape,), **more)


@lru_cache(maxsize=512)
def ahead_of(
    kind: Collective, dtype: np.dtype[Any], name: str = "", shape: Shape = (), op: int = NO_OP,
    weighted: bool = False,
) -> Signature:  # fmt: skip
    """Return the exchange of numbers ahead of a direct call; cached, since making it takes twice as long."""
    names = type_names(dtype)
    return Signature(name, 0, int(kind), int(op), NO_ROOT, names, (shape,), weighted=weighted, ahead=True)


class Key(NamedTuple):
    """The key by which the same operation on several ranks is recognised. ``number`` counts the operations
    without a name of a process set, from 1; 0 for those with one.
    """

    process_set: int
    name: str
    number: int

    def __str__(self) -> str:
        return repr(self.name) if self.name else f"without a name (number {self.number})"


def first_difference(calls: Collection[Signature]) -> Tuple[str, str, str]:
    """Return the first field in which calls differ, and its two names in messages; else three empty texts."""
    return next(
        (item for item in _COMPARED if len({getattr(call, item[0]) for call in calls}) > 1), ("", "", "")
    )


def explain_difference(mine: Header, theirs: Header) -> str:
    """Return in which respect two direct calls differ, in words; empty if only their sites do. ``mine`` is
    the expected header: this rank's own, :meth:`~.frames.Header.turned`.

    >>> a = Header(0, 7, 1, 1, 10, -1, 8, 0)
    >>> explain_difference(a, a._replace(items=9))
    'they disagree about the number of elements (8 here, 9 there)'
    """
    if theirs.collective == 0:
        return "what arrived is not the start of a ringcomm message"
    if mine.generation & 0xFFFF != theirs.generation:
        return f"they belong to different generations ({mine.generation} here, {theirs.generation} there)"
    if mine.sequence & 0xFFFFFFFF != theirs.sequence:
        numbers = f"number {mine.sequence} here, {theirs.sequence} there"
        return f"they are not the same call ({numbers}, which is {header_text(theirs)})"
    both_reduce = mine.collective == theirs.collective
    if both_reduce and (mine.op == WEIGHTED_AVERAGE) is not (theirs.op == WEIGHTED_AVERAGE):
        where = "a weight here, none there" if mine.op == WEIGHTED_AVERAGE else "no weight here, one there"
        return f"only one of the two gives a weight ({where}): all ranks pass weight=... or none does"
    try:
        field, words, _ = first_difference([Signature.from_header(mine), Signature.from_header(theirs)])
    except (ValueError, KeyError, IndexError):
        field, words = "kind", "the operation"
    if field == "items":
        return f"they disagree about {words} ({mine.items} here, {theirs.items} there)"
    if field:
        return f"they disagree about {words} ({header_text(mine)} here, {header_text(theirs)} there)"
    if mine.sends != theirs.sends:
        return f"its message has {theirs.sends} elements, but {mine.sends} are expected here"
    if mine.expects != theirs.expects:
        return f"it expects {theirs.expects} elements, but the message from here has {mine.expects}"
    if mine.digest == theirs.digest:
        return ""
    if mine.digest >> 32 == theirs.digest >> 32:
        return "they disagree about the name, and about nothing else"
    name = "" if mine.digest & 0xFFFFFFFF == theirs.digest & 0xFFFFFFFF else "the name, "
    return f"they disagree about {name}the shape, the scale factors or the list of sizes"


def header_text(header: Header) -> str:
    """Return the call that a header belongs to, like ``allreduce(1000 elements, float32, op=Sum)``."""
    try:
        return Signature.from_header(header).describe()
    except (ValueError, KeyError, IndexError):
        return "something that this version of ringcomm does not have"


@lru_cache(maxsize=512)
def sizes_text(bounds: Tuple[int, ...]) -> str:
    """Return the sizes of pieces in words, from their boundaries.

    >>> sizes_text((0, 3, 4)), sizes_text((0, 3, 6))
    ('sizes [3, 1]', '2 x 3 elements')
    """
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:])]
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]} elements"
    if len(sizes) <= _SIZES_SHOWN:
        return f"sizes {sizes}"
    return f"{len(sizes)} sizes [{', '.join(map(str, sizes[:_SIZES_SHOWN]))}, ...]"


@lru_cache(maxsize=None)
def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
