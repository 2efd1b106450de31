"""The header in front of every collective's bytes on a link.

It costs no round trip: it is the first 64 bytes of the same stream. A rank that reads another header
than its own call implies detects that the program has diverged, and both calls can be named. The header
says how many elements follow it, and how many are expected in return, so no rank takes the bytes of one
call for those of the next. Last comes the line of the program that makes the call, in which alone it may
differ.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Sequence, Tuple, Union

_HEADER = struct.Struct("<HHIBBBBiQQQQ8xII")
HEADER_BYTES = _HEADER.size
"""A cache line, so that numbers behind it in shared memory are aligned: unaligned ones take longer to add."""
_SEQUENCE = struct.Struct("<I")
_SEQUENCE_AT = 4
_SITE = struct.Struct("<II")
SITE_AT = HEADER_BYTES - _SITE.size
"""Before it are the bytes that must be as expected."""
_LINE = 0xFFFFFFFF
_MAGIC = 0x7C52
NO_OP = 255
NO_ROOT = -1


class Header(NamedTuple):
    """What a rank is doing, in 64 bytes.

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
            :func:`ringcomm.collective.call_sites.site_number`; 0 where that says nothing. The one field that
            may differ.
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
        """The 64 bytes."""
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


def stamp(packed: bytearray, sequence: int, site: int = 0) -> None:
    """Write another sequence number and site into a packed header."""
    _SEQUENCE.pack_into(packed, _SEQUENCE_AT, sequence & 0xFFFFFFFF)
    _SITE.pack_into(packed, SITE_AT, site >> 32, site & _LINE)


def packed_site(packed: Union[bytes, bytearray, memoryview]) -> int:
    """The site in a packed header."""
    file, line = _SITE.unpack_from(packed, SITE_AT)
    return int(file) << 32 | int(line)


def unpack_header(data: Union[bytes, bytearray, memoryview]) -> Header:
    """The header in 64 bytes. Bytes that are no header at all give ``collective=0``."""
    magic, generation, sequence, collective, op, dtype, codec, *rest, file, line = _HEADER.unpack(data)
    if magic != _MAGIC:
        return Header(0, 0, 0, NO_OP, 0, NO_ROOT, 0, 0)
    return Header._make((generation, sequence, collective, op, dtype, *rest, file << 32 | line, codec))


def digest(name: str, shape: Sequence[int], factors: Tuple[float, float], bounds: Sequence[int] = ()) -> int:
    """64 bits: the lower half differs when names do, the upper one when shape, scale factors or sizes do."""
    sizes = f"\0{tuple(bounds)}" if bounds else ""
    rest = f"{tuple(shape)}\0{factors[0]!r}\0{factors[1]!r}{sizes}".encode()
    return zlib.crc32(name.encode()) | zlib.crc32(rest) << 32
