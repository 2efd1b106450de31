"""Reading another process's memory on Linux: ``process_vm_readv``, without a copy in between.

The system permits it between processes of one user (unless a container or a security module
forbids it). It is a plain system call, reached through ctypes; nothing is compiled and nothing
stays behind when a process dies.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Optional

import numpy as np


class _Span(ctypes.Structure):
    """C's ``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _find() -> Optional[Any]:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return function


_readv = _find()


def available() -> bool:
    """Whether this system has the call at all."""
    return _readv is not None


def address_of(view: memoryview) -> int:
    """Where a contiguous view's bytes lie in this process."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class PeerMemory:
    """The memory of one other process of this machine.

    Args:
        pid: its number, as this process sees it.
    """

    __slots__ = ("_local", "_remote", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._local = _Span()
        self._remote = _Span()

    def read(self, address: int, into: memoryview) -> int:
        """Copy bytes from ``address`` over there into the view.

        Returns:
            how many bytes were copied; fewer than asked for if the rest is not mapped.

        Raises:
            OSError: the process is gone, or the system forbids it.
        """
        if _readv is None:
            raise OSError("this system cannot read another process's memory")
        local, remote = self._local, self._remote
        local.base, local.length = address_of(into), into.nbytes
        remote.base, remote.length = address, into.nbytes
        count = _readv(self.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(count)
