"""Horovod's exceptions. The first is what ringcomm really raises."""

from __future__ import annotations

from ringcomm import errors

HorovodInternalError = errors.HorovodInternalError


class _HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went; ``skip_sync`` says that none came."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


HostsUpdatedInterrupt = getattr(errors, "HostsUpdatedInterrupt", _HostsUpdatedInterrupt)


class HorovodVersionMismatchError(ImportError):
    """There for ``except`` clauses; ringcomm is not tied to the version of a framework."""
