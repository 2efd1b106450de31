"""Horovod's exceptions. ringcomm raises the first two."""

from __future__ import annotations

from ringcomm.errors import HorovodInternalError, HostsUpdatedInterrupt


class HorovodVersionMismatchError(ImportError):
    """Exists for ``except`` clauses; never raised: ringcomm is not built for one framework version."""


__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
