"""Discovery of hosts, for programs that call it themselves; ``ringrun`` runs scripts on its own."""

from __future__ import annotations

import threading
from typing import Dict, Optional

from ringcomm.errors import ConfigError
from ringrun.elastic.job import SCRIPT_LIMIT_S, parse_discovered, run_script


class HostDiscovery:
    """Base class of what finds the available hosts."""

    def find_available_hosts_and_slots(self) -> Dict[str, int]:
        """The available hosts with their numbers of slots."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Runs a command that prints the available hosts; hosts without a number have `slots` (None: 1)."""

    def __init__(self, discovery_script: str, slots: Optional[int] = None) -> None:
        self._script, self._slots = discovery_script, slots or 1

    def find_available_hosts_and_slots(self) -> Dict[str, int]:
        """Return the hosts that the script prints, in its order; RuntimeError if it fails."""
        output = self._execute_discovery_script()
        try:
            return {spec.target: spec.slots or 1 for spec in parse_discovered(output, self._slots)}
        except ConfigError as problem:
            raise RuntimeError(f"Failed to execute discovery script: {problem}") from None

    def _execute_discovery_script(self) -> str:
        """Return the script's output. Subclasses of Horovod's class replace it, so it has Horovod's name."""
        try:
            return run_script(self._script, SCRIPT_LIMIT_S, threading.Event())
        except ConfigError as problem:
            raise RuntimeError(f"Failed to execute discovery script: {problem}") from None


class FixedHosts(HostDiscovery):
    """Hosts that a program sets, with their numbers of slots."""

    def __init__(self, host_slots: Dict[str, int]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> Dict[str, int]:
        """The hosts that were set last."""
        return self._host_slots

    def set(self, host_slots: Dict[str, int]) -> None:
        """Set the hosts."""
        self._host_slots = host_slots
