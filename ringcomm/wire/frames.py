"""The header in front of every collective's bytes on a link.

It costs no round trip: it is the first 56 bytes of the same stream. A rank that reads another header
than its own call implies detects that the program has diverged, and both calls can be named. The header
says how many elements follow it, and how many are expected in return, so no rank takes the bytes of one
call for those of the next. Last comes the line of the program that makes the call, in which alone it may
differ.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Sequence, Tuple, Union

from ..dtypes import name_of_code
from ..ops import CODECS, WEIGHTED_AVERAGE, Collective, op_name

_HEADER = struct.Struct("<HHIBBBBiQQQQII")
HEADER_BYTES = _HEADER.size
_SEQUENCE = struct.Struct("<I")
_SEQUENCE_AT = 4
_SITE = struct.Struct("<II")
SITE_AT = HEADER_BYTES - _SITE.size
"""Before it are the bytes that must be as expected."""
_LINE = 0xFFFFFFFF
VOTE = 1 << 31
"""The bit of a site that is a vote; see :mod:`ringcomm.collective.placement`. No line has such a number."""
_MAGIC = 0x7C52
NO_OP = 255
NO_ROOT = -1


class Header(NamedTuple):
    """What a rank is doing, in 56 bytes.

    Attributes:
        generation: membership epoch (low 16 bits).
        sequence: how many collectives came before on this context (low 32 bits).
        collective: :class:`~ringcomm.ops.Collective`.
        op: :class:`~ringcomm.ops.ReduceOp`, or ``NO_OP``.
        dtype: code from :mod:`ringcomm.dtypes`.
        codec: place in :data:`ringcomm.ops.CODECS`; 0 where the elements themselves are sent.
        root: root rank, or ``NO_ROOT``.
        items: elements, where all ranks must agree on it; otherwise 0.
        digest: hash of the name, the shape, the scale factors and the list of sizes.
        sends: elements (with a codec: encoded bytes) that go to this peer in this call.
        expects: elements (with a codec: encoded bytes) that are expected from this peer in this call.
        site: the line of the program that makes the call, see
            :func:`ringcomm.collective.call_sites.site_number`; 0 where that says nothing. In it is also the
            bit ``VOTE``. The one field that may differ.
    """

    generation: int
    sequence: int
    collective: int
    op: int
    dtype: int
    root: int
    items: int
    digest: int
    sends: int = 0
    expects: int = 0
    site: int = 0
    codec: int = 0

    def pack(self) -> bytes:
        """The 56 bytes."""
        return _HEADER.pack(
            _MAGIC,
            self.generation & 0xFFFF,
            self.sequence & 0xFFFFFFFF,
            self.collective,
            self.op,
            self.dtype,
            self.codec,
            self.root,
            self.items,
            self.digest,
            self.sends,
            self.expects,
            self.site >> 32,
            self.site & _LINE,
        )

    def turned(self) -> Header:
        """The header that the peer must send if it makes the same call."""
        return self._replace(sends=self.expects, expects=self.sends)

    def describe(self) -> str:
        """The call as a person would write it, like ``allreduce(1000 x float32, Sum)``."""
        try:
            what = Collective(self.collective).name.lower()
            if self.collective == Collective.EXCHANGE:
                return MEASUREMENT
            arguments = [
                f"{self.items} x {name_of_code(self.dtype)}" if self.items else name_of_code(self.dtype)
            ]
            if self.op != NO_OP:
                arguments.append(f"op={op_name(self.op)}")
            if self.root != NO_ROOT:
                arguments.append(f"root_rank={self.root}")
            if self.codec:
                arguments.append(f"compression={CODECS[self.codec]!r}")
        except (ValueError, KeyError, IndexError):
            return "something that this version of ringcomm does not have"
        return f"{what}({', '.join(arguments)})"


MEASUREMENT = "the measurement of links in init()"
"""What messages call the one kind of exchange that no program asks for."""


def stamp(packed: bytearray, sequence: int, site: int = 0) -> None:
    """Write another sequence number and site into a packed header."""
    _SEQUENCE.pack_into(packed, _SEQUENCE_AT, sequence & 0xFFFFFFFF)
    _SITE.pack_into(packed, SITE_AT, site >> 32, site & _LINE)


def packed_site(packed: Union[bytes, bytearray, memoryview]) -> int:
    """The site in a packed header."""
    file, line = _SITE.unpack_from(packed, SITE_AT)
    return int(file) << 32 | int(line)


def unpack_header(data: Union[bytes, bytearray, memoryview]) -> Header:
    """The header in 56 bytes. Bytes that are no header at all give ``collective=0``."""
    magic, generation, sequence, collective, op, dtype, codec, *rest, file, line = _HEADER.unpack(data)
    if magic != _MAGIC:
        return Header(0, 0, 0, NO_OP, 0, NO_ROOT, 0, 0)
    return Header._make((generation, sequence, collective, op, dtype, *rest, file << 32 | line, codec))


def digest(
    name: str, shape: Sequence[int], factors: Tuple[float, float], bounds: Sequence[int] = ()
) -> int:
    """64 bits: the lower half differs when names do, the upper one when shape, scale factors or sizes do."""
    sizes = f"\0{tuple(bounds)}" if bounds else ""
    rest = f"{tuple(shape)}\0{factors[0]!r}\0{factors[1]!r}{sizes}".encode()
    return zlib.crc32(name.encode()) | zlib.crc32(rest) << 32


def explain_difference(mine: Header, theirs: Header) -> str:
    """In which respect two calls differ, in words; empty if only their sites do.

    Args:
        mine: the header that was expected: this rank's own, :meth:`~Header.turned`.
        theirs: the header that came.

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
    both_reduce = mine.collective == theirs.collective
    if both_reduce and (mine.op == WEIGHTED_AVERAGE) is not (theirs.op == WEIGHTED_AVERAGE):
        where = "a weight here, none there" if mine.op == WEIGHTED_AVERAGE else "no weight here, one there"
        return f"only one of the two gives a weight ({where}): all ranks pass weight=... or none does"
    for field, words in (
        ("collective", "what to do"),
        ("op", "the reduction"),
        ("dtype", "the element type"),
        ("codec", "the compression"),
        ("root", "the root rank"),
        ("items", "the number of elements"),
    ):
        here, there = getattr(mine, field), getattr(theirs, field)
        if here != there:
            if field in ("collective", "op", "dtype", "codec", "root"):
                return f"they disagree about {words} ({mine.describe()} here, {theirs.describe()} there)"
            return f"they disagree about {words} ({here} here, {there} there)"
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
