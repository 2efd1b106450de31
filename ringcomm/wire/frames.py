"""The header in front of every collective's bytes on a link.

It costs no round trip: it is the first 64 bytes of the same stream. A rank that reads another header than its
own call implies detects that the program has diverged, and both calls can be named. The header has the number
of elements that follow it, and of those expected in return, so no rank takes the bytes of one call for those
of the next.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Sequence, Tuple, Union

_HEADER = struct.Struct("<HHIBBBBiQQQQ16x")
HEADER_BYTES = _HEADER.size
"""A cache line, so that numbers behind it in shared memory are aligned: unaligned ones take longer to add."""
_SEQUENCE = struct.Struct("<I")
_SEQUENCE_AT = 4
_MAGIC = 0x7C52
NO_OP = 255
NO_ROOT = -1


class Header(NamedTuple):
    """The call of a rank, in 64 bytes."""

    generation: int  # membership epoch (low 16 bits)
    sequence: int  # collectives before it on this context (low 32 bits)
    collective: int  # :class:`~ringcomm.ops.Collective`
    op: int  # :class:`~ringcomm.ops.ReduceOp`, or ``NO_OP``
    dtype: int  # code from :mod:`ringcomm.dtypes`
    root: int  # or ``NO_ROOT``
    items: int  # elements, where all ranks must agree on it; otherwise 0
    digest: int  # of the name, the shape, the scale factors and the list of sizes
    sends: int = 0  # elements (with a codec: encoded bytes) to this peer in this call
    expects: int = 0  # the same from this peer
    codec: int = 0  # place in :data:`ringcomm.ops.CODECS`; 0: the elements themselves are sent

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        generation, sequence, *rest, codec = self
        collective, op, dtype, *numbers = rest
        first = generation & 0xFFFF, sequence & 0xFFFFFFFF, collective, op, dtype, codec
        return _HEADER.pack(_MAGIC, *first, *numbers)

    def turned(self) -> Header:
        """Return the header that the peer must send if it makes the same call."""
        return self._replace(sends=self.expects, expects=self.sends)


def stamp(headers: Sequence[bytearray], sequence: int) -> None:
    """Write another sequence number into packed headers."""
    for packed in headers:
        _SEQUENCE.pack_into(packed, _SEQUENCE_AT, sequence & 0xFFFFFFFF)


def unpack_header(data: Union[bytes, bytearray, memoryview]) -> Header:
    """Return the header in 64 bytes; ``collective`` is 0 if they are not a header."""
    magic, generation, sequence, collective, op, dtype, codec, *rest = _HEADER.unpack(data)
    if magic != _MAGIC:
        return Header(0, 0, 0, NO_OP, 0, NO_ROOT, 0, 0)
    return Header._make((generation, sequence, collective, op, dtype, *rest, codec))


def digest(name: str, shape: Sequence[int], factors: Tuple[float, float], bounds: Sequence[int] = ()) -> int:
    """Return 64 bits: the lower half differs with the name, the upper with shape, scale factors or sizes."""
    sizes = f"\0{tuple(bounds)}" if bounds else ""
    rest = f"{tuple(shape)}\0{factors[0]!r}\0{factors[1]!r}{sizes}".encode()
    return zlib.crc32(name.encode()) | zlib.crc32(rest) << 32
