"""What a worker is told about changes of the hosts."""

from __future__ import annotations

from enum import IntFlag


class HostUpdateResult(IntFlag):
    """How the available hosts have changed: ``update_res`` of ``State.on_hosts_updated``."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
