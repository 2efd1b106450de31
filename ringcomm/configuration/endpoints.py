"""``host:port`` as text, and the other way round."""

from __future__ import annotations

from typing import Tuple

from ..errors import ConfigError


def parse_endpoint(text: str) -> Tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as (host, port).

    Raises:
        ConfigError: it is neither.
    """
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
    """The inverse of :func:`parse_endpoint`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
