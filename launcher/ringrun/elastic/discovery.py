"""The output of a host discovery script: available hosts with their numbers of slots. Pure.

The script is the user's, for an elastic job (``--host-discovery-script``). A slot is room for one rank. A
thread runs it repeatedly (:class:`ringrun.job.discovery.Discovery`); :mod:`.membership` decides what follows.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec, parse_host

MAX_HOSTS = 1024
"""More hosts in one output are an error of the script."""


def host_key(spec: HostSpec) -> str:
    """Return the name under which hosts are compared: ``user@name`` in lower case."""
    return spec.target.lower()


def parse_discovered(text: str, slots: int = 1) -> List[HostSpec]:
    """Parse a discovery script's output: a line ``host`` or ``host:slots`` for each host, `slots` where it
    has none. Empty and repeated lines do not count. ConfigError for another form, different slots of one
    host, or too many hosts.
    """
    found: Dict[str, HostSpec] = {}
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        where = f"line {number} of the discovery script's output"
        spec = parse_host(line, where)
        spec = spec._replace(slots=slots if spec.slots is None else spec.slots)
        other = found.setdefault(host_key(spec), spec)
        if other.slots != spec.slots:
            raise ConfigError(
                f"{where}: {spec.target} has {spec.slots} slots here and {other.slots} in an earlier line."
            )
        if len(found) > MAX_HOSTS:
            raise ConfigError(f"{where}: more than {MAX_HOSTS} hosts.")
    return list(found.values())


class DiscoveredHosts:
    """The results of a script that runs repeatedly; the last valid one counts."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._problem = ""
        self.succeeded = False  # until then a failure ends the job

    def succeed(self, output: str) -> Tuple[Sequence[HostSpec], str]:
        """Take the output of a run with exit code 0; return the hosts, and a line for the user after
        failures, or "". ConfigError if the output is not valid: treat it as a failure.
        """
        hosts = parse_discovered(output, self._slots)
        text = "the discovery script works again" if self._problem else ""
        self.succeeded, self._problem = True, ""
        return hosts, text

    def fail(self, why: str) -> str:
        """Take the reason of a failed run; return a line for the user, or "" for a repeated reason."""
        repeated, self._problem = why == self._problem, why
        return "" if repeated else f"the discovery script failed; its last hosts remain: {why}"
