"""Horovod's exceptions. ``HorovodInternalError`` and ``HostsUpdatedInterrupt`` are ringcomm's classes."""

from __future__ import annotations

from ringcomm.errors import HorovodInternalError, HostsUpdatedInterrupt


class HorovodVersionMismatchError(ImportError):
    """For ``except`` clauses only; ringcomm does not depend on the version of a framework."""


__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
