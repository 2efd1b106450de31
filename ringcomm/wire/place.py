"""Where a connection was dialled: an address and a port in a form that two ends can compare."""

from __future__ import annotations

import hashlib
import ipaddress
import struct

_PLACE = struct.Struct("!BxH16s")
NOWHERE = bytes(_PLACE.size)
"""The place of a connection that was not dialled, like one of a pair of sockets."""
_UNIX, _IPV4, _IPV6 = 1, 4, 6


def place_of(address: str, port: int) -> bytes:
    """Return the 20 bytes for an address and a port, as dialled or as bound. The address is numeric, or ``@``
    and the name of an abstract Unix socket, of which only a digest is stored.
    """
    if address.startswith("@"):
        return _PLACE.pack(_UNIX, 0, hashlib.sha256(address.encode("utf-8")).digest()[:16])
    numeric = ipaddress.ip_address(address.split("%")[0])
    return _PLACE.pack(_IPV4 if numeric.version == 4 else _IPV6, port, numeric.packed.ljust(16, b"\0"))


def describe_place(place: bytes) -> str:
    """Return a place for people to read."""
    kind, port, packed = _PLACE.unpack(place)
    if kind == _IPV4:
        return f"{ipaddress.IPv4Address(packed[:4])}:{port}"
    if kind == _IPV6:
        return f"[{ipaddress.IPv6Address(packed)}]:{port}"
    return "a Unix socket" if kind == _UNIX else "no address"
