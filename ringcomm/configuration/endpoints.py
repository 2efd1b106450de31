"""Addresses as text: ``host:port``, and whether an address leads to this machine only."""

from __future__ import annotations

import ipaddress
from typing import Optional, Tuple, Union

from ..errors import ConfigError

Numeric = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


def parse_endpoint(text: str) -> Tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``; ConfigError if it is neither."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: which colon starts the port is a guess
    if not host or not colon or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not an address: write host:port, or [address]:port for IPv6.")
    return host, int(port)


def format_endpoint(address: str, port: int) -> str:
    """Return ``host:port``, the inverse of :func:`parse_endpoint`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def numeric(host: str) -> Optional[Numeric]:
    """Return the address without its scope, IPv4-mapped ones as IPv4; None for a name."""
    try:
        address: Numeric = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address, means this machine only."""
    address = numeric(host)
    return host == "localhost" if address is None else address.is_loopback
