"""An identifier of this machine, in place of Horovod's module of this name; ringcomm itself does not use it.

Programs that were written for Horovod import it to find out which ranks share a host.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Optional

from ringcomm.transport.nics import machine


def host_hash(salt: Optional[str] = None) -> str:
    """The host's name and a hash that is the same for all processes of this machine.

    Containers of one machine that have networks of their own count as different machines.

    Args:
        salt: is part of what is hashed: calls with different salts have different results. "" is none.

    Returns:
        the hostname up to its first dot, a hyphen and 32 hexadecimal digits.
    """
    text = f"{machine()}-{salt}" if salt else machine()
    return f"{socket.gethostname().split('.')[0]}-{hashlib.md5(text.encode()).hexdigest()}"  # noqa: S324
