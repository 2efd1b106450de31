"""The collectives and the reduction operations."""

from __future__ import annotations

from enum import IntEnum
from operator import index
from typing import Any, List, NamedTuple, Optional, Tuple

from .errors import Misuse


class ReduceOp(IntEnum):
    """A reduction: how the arrays of all ranks become one. The numbers are those of Horovod.

    ``AVERAGE`` is the sum divided by the number of ranks. For integers the division happens in
    float64 and truncates toward zero. ``ADASUM`` adds gradients as far as they are orthogonal, and
    averages them as far as they are equal (Maleki et al., "Scaling Distributed Training with Adaptive
    Summation", 2021). Only allreduce has it.
    """

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Collective(IntEnum):
    """The kind of operation, as in every message header."""

    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    REDUCESCATTER = 4
    ALLTOALL = 5
    BARRIER = 6
    EXCHANGE = 7  # the small fixed-size exchange of the ranks' row counts
    BROADCAST_OBJECT = 8
    ALLGATHER_OBJECT = 9
    JOIN = 10
    PROCESS_SET = 11  # a process set is added or removed: a barrier with consequences
    GATHER = 12
    SCATTER = 13
    REDUCE = 14


class Bitwise(IntEnum):
    """Reductions of integers and booleans bit by bit, for torch.distributed only.

    Message headers hold the numbers, beside those of :class:`ReduceOp`.
    """

    BAND = 16
    BOR = 17
    BXOR = 18


# In headers of averages for which this rank gives a weight; the others must also give one.
WEIGHTED_AVERAGE = 32


def op_name(op: int) -> str:
    """Return the reduction with this number in a header, like ``Sum``; ValueError if none has it."""
    return Bitwise(op).name if op >= Bitwise.BAND else ReduceOp(op).name.capitalize()


class CodecKind(NamedTuple):
    """What all of ringcomm knows of a codec; :mod:`ringcomm.codec.codecs` encodes and decodes."""

    name: str
    about: str  # for help texts
    dtype: str = ""  # to which frameworks can convert instead, as numbers of it can be added
    has_scales: bool = False  # per block; so it has error feedback, and is for gradients of large matrices


# Their places are their numbers on the wire.
CODEC_KINDS = (
    CodecKind("none", "unchanged"),
    CodecKind("fp16", "half the bytes of float32", dtype="float16"),
    CodecKind("bf16", "half the bytes", dtype="bfloat16"),
    CodecKind("int8", "a quarter; each block of 256 elements has one scale", has_scales=True),
    CodecKind("int4", "an eighth", has_scales=True),
)
CODECS: Tuple[str, ...] = tuple(item.name for item in CODEC_KINDS)
HALVES = {item.name: item.dtype for item in CODEC_KINDS if item.dtype}
BLOCKWISE = frozenset(item.name for item in CODEC_KINDS if item.has_scales)
ENCODED = frozenset(CODECS[1:]) - set(HALVES)  # by reductions only: sums of what is sent have no meaning

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def op_of(op: Any) -> ReduceOp:
    """Return the reduction for a number, a constant or a name in any case; Misuse if there is none.

    >>> op_of("sum"), op_of("Mean")
    (<ReduceOp.SUM: 1>, <ReduceOp.AVERAGE: 0>)
    """
    if type(op) is ReduceOp:
        return op
    if op is True or op is False:  # the numbers 1 and 0 are Sum and Average
        raise Misuse(f"op={op} is ambiguous: op=rc.Average is the mean, op=rc.Sum the sum.")
    try:
        if isinstance(op, str):
            name = op.strip().upper()
            return ReduceOp[_OTHER_NAMES.get(name, name)]
        return ReduceOp(op)
    except (KeyError, ValueError):
        names = ", ".join(item.name.capitalize() for item in ReduceOp)
        raise Misuse(f"op={op!r:.80} is not a reduction; there are {names}.") from None


_OTHER_NAMES = {"MEAN": "AVERAGE", "AVG": "AVERAGE", "PROD": "PRODUCT", "MINIMUM": "MIN", "MAXIMUM": "MAX"}


def codec_number(compression: Any) -> int:
    """Return the wire number of a codec from the users' ``compression``; Misuse if there is no such codec.

    It is None, a name such as ``"fp16"``, or a class in ``Compression``, which has its name as ``kind``.
    """
    if compression is None:
        return 0
    name = getattr(compression, "kind", compression)
    if not isinstance(name, str) or name not in CODECS:
        raise Misuse(f"compression={compression!r}: there are {', '.join(map(repr, CODECS))}.")
    return CODECS.index(name)


_NAN = float("nan")


def factor_of(value: Any) -> float:
    """Return a scale factor as a number; every NaN is the same object. Misuse: it is not a number.

    Tuples compare their items by identity first, so calls and signatures with such a factor are equal.
    """
    if type(value) is float and value == value:  # at once: it is on the path of every call
        return value
    try:
        factor = number(value)
    except (TypeError, ValueError, OverflowError):
        raise Misuse(f"prescale_factor and postscale_factor are numbers, not {value!r}.") from None
    return factor if factor == factor else _NAN


def number(value: Any) -> float:
    """Return a number as a float; TypeError, ValueError or OverflowError otherwise, also for text."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError
    return float(value)


def finite_numbers(values: Any, least: float, above: bool = False) -> List[Any]:
    """Return a sequence's numbers; none unless all are finite and at least (``above``: over) ``least``."""
    try:
        found = list(values)
        fit = all(least <= value < float("inf") and not (above and value == least) for value in found)
    except (TypeError, ValueError, RuntimeError):  # no sequence, no numbers, or tensors in place of them
        return []
    return found if fit else []


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return bool(finite_numbers([value], least)) and bool(value == int(value))


def weight_of(value: Any) -> float:
    """Return the weight of a contribution; Misuse if it is negative, not finite, or not a number."""
    try:
        weight = number(value)
    except (TypeError, ValueError, OverflowError):
        raise Misuse(f"weight={value!r}: a weight is a number, such as the number of samples.") from None
    if not 0.0 <= weight < float("inf"):
        raise Misuse(f"weight={weight!r}: a weight is a finite number that is not negative.")
    return weight


def root_of(value: Any) -> int:
    """Return a root's rank as a number; Misuse if it is not a whole number."""
    try:
        return index(value)
    except TypeError:
        raise Misuse(f"root_rank={value!r} is not a whole number.") from None


def name_of(name: Optional[str]) -> str:
    """Return an operation's name; "" for None; Misuse if it is not text.

    Ranks recognise operations by name, and every name travels as text. So the rank that gave another object
    would not recognise it.
    """
    if name is None:
        return ""
    if not isinstance(name, str):
        raise Misuse(f"name={name!r}: a name is a str, not {type(name).__name__}; str(name) makes it one.")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise Misuse(f"name={name!r}: a name must be valid Unicode, without lone surrogates.") from None
    return name
