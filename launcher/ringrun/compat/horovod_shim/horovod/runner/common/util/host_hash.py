"""An identifier of this machine."""

from __future__ import annotations

import hashlib
import socket
from typing import Optional

from ringcomm.transport.nics import machine


def host_hash(salt: Optional[str] = None) -> str:
    """The host's name and a hash that is the same for all processes of this machine.

    Args:
        salt: is part of what is hashed.
    """
    text = machine() if salt is None else f"{machine()}-{salt}"
    return f"{socket.gethostname().split('.')[0]}-{hashlib.md5(text.encode()).hexdigest()}"  # noqa: S324
