"""The header in front of every collective's bytes on a link.

It costs no round trip: it is the first 40 bytes of the same stream. A rank that reads a header
other than its own knows that the program has diverged, and both calls can be named.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Sequence, Tuple, Union

from ..dtypes import name_of_code
from ..ops import Collective, ReduceOp

_HEADER = struct.Struct("<HHIQBBBxiQQ")
HEADER_BYTES = _HEADER.size
_STAMP = struct.Struct("<IQ")
_STAMP_AT = 4
_MAGIC = 0x7C52
NO_OP = 255
NO_ROOT = -1


class Header(NamedTuple):
    """What a rank is doing, in 40 bytes.

    Attributes:
        generation: membership epoch (low 16 bits).
        sequence: how many collectives came before on this context (low 32 bits).
        collective: :class:`~ringcomm.ops.Collective`.
        op: :class:`~ringcomm.ops.ReduceOp`, or ``NO_OP``.
        dtype: code from :mod:`ringcomm.dtypes`.
        root: root rank, or ``NO_ROOT``.
        items: elements, where all ranks must agree on it; otherwise 0.
        digest: hash of the name, the shape and the scale factors.
        site: the line of the program that makes the call, see :func:`ringcomm.collective.sites.site_number`;
            0 where that says nothing. The one field that may differ.
    """

    generation: int
    sequence: int
    collective: int
    op: int
    dtype: int
    root: int
    items: int
    digest: int
    site: int = 0

    def pack(self) -> bytes:
        """The 40 bytes."""
        return _HEADER.pack(
            _MAGIC,
            self.generation & 0xFFFF,
            self.sequence & 0xFFFFFFFF,
            self.site,
            self.collective,
            self.op,
            self.dtype,
            self.root,
            self.items,
            self.digest,
        )

    def describe(self) -> str:
        """The call as a person would write it, like ``allreduce(1000 x float32, Sum)``."""
        try:
            what = Collective(self.collective).name.lower()
            arguments = [
                f"{self.items} x {name_of_code(self.dtype)}" if self.items else name_of_code(self.dtype)
            ]
            if self.op != NO_OP:
                arguments.append(f"op={ReduceOp(self.op).name.capitalize()}")
            if self.root != NO_ROOT:
                arguments.append(f"root_rank={self.root}")
        except (ValueError, KeyError):
            return "something this version of ringcomm does not know"
        return f"{what}({', '.join(arguments)})"


def stamp(packed: bytearray, sequence: int, site: int = 0) -> None:
    """Write another sequence number and site into a packed header."""
    _STAMP.pack_into(packed, _STAMP_AT, sequence & 0xFFFFFFFF, site)


def unpack_header(data: Union[bytes, bytearray, memoryview]) -> Header:
    """The header in 40 bytes. Bytes that are no header at all give ``collective=0``."""
    magic, generation, sequence, site, collective, op, dtype, root, items, hashed = _HEADER.unpack(data)
    if magic != _MAGIC:
        return Header(0, 0, 0, NO_OP, 0, NO_ROOT, 0, 0)
    return Header(generation, sequence, collective, op, dtype, root, items, hashed, site)


def digest(name: str, shape: Sequence[int], factors: Tuple[float, float]) -> int:
    """64 bits that differ when name, shape or scale factors do."""
    text = f"{name}\0{tuple(shape)}\0{factors[0]!r}\0{factors[1]!r}".encode()
    return zlib.crc32(text) | (zlib.adler32(text) << 32)


def explain_difference(mine: Header, theirs: Header) -> str:
    """In which respect two calls differ, in words; empty if only their sites do.

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
        return f"they are not the same call ({numbers}, which is {theirs.describe()})"
    for field, words in (
        ("collective", "what to do"),
        ("op", "the reduction"),
        ("dtype", "the element type"),
        ("root", "the root rank"),
        ("items", "the number of elements"),
    ):
        here, there = getattr(mine, field), getattr(theirs, field)
        if here != there:
            if field in ("collective", "op", "dtype", "root"):
                return f"they disagree about {words} ({mine.describe()} here, {theirs.describe()} there)"
            return f"they disagree about {words} ({here} here, {there} there)"
    if mine.digest != theirs.digest:
        return "they disagree about the name, the shape or the scale factors"
    return ""
