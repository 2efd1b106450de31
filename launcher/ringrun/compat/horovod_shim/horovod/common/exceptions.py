"""Horovod's exceptions. The first two are what ringcomm really raises."""

from __future__ import annotations

from ringcomm.errors import HorovodInternalError, HostsUpdatedInterrupt


class HorovodVersionMismatchError(ImportError):
    """There for ``except`` clauses; ringcomm is not tied to the version of a framework."""


__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
