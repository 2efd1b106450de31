"""The output of a host discovery script: which hosts are available now, and with how many slots. Pure.

The script is the user's, for an elastic job (``--host-discovery-script``). A slot is room for one rank. A
thread runs it again and again (:class:`ringrun.job.discovery.Discovery`); what follows from the hosts is
decided in :mod:`.membership`.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec, parse_host

MAX_HOSTS = 1024
"""More hosts than that in one output are an error of the script."""


def host_key(spec: HostSpec) -> str:
    """The name under which a host is compared with others: ``user@name`` in lower case."""
    return spec.target.lower()


def parse_discovered(text: str, slots: int = 1) -> List[HostSpec]:
    """Parse what a discovery script has written: a line ``host`` or ``host:slots`` for each host.

    Args:
        text: its standard output; empty lines have no meaning, and no line at all means no host.
        slots: the number of slots of a host without one.

    Returns:
        the hosts in the order of the lines; a repeated line counts once.

    Raises:
        ConfigError: a line has another form, a host occurs twice with different slots, or there are too many.
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
    """The results of a script that runs repeatedly: the last valid one counts.

    Attributes:
        succeeded: whether any run has succeeded; until then a failure ends the job.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._problem = ""
        self.succeeded = False

    def succeed(self, output: str) -> Tuple[Sequence[HostSpec], str]:
        """A run has ended with exit code 0.

        Args:
            output: what it has written.

        Returns:
            the hosts, and a line for the user: that the script works again after failures, or "".

        Raises:
            ConfigError: the output is not valid: treat it as a failure.
        """
        hosts = parse_discovered(output, self._slots)
        text = "the discovery script works again" if self._problem else ""
        self.succeeded, self._problem = True, ""
        return hosts, text

    def fail(self, why: str) -> str:
        """A run has failed, or its output is not valid.

        Args:
            why: the reason.

        Returns:
            a line for the user, or "" if the same problem has been reported by the previous run.
        """
        repeated, self._problem = why == self._problem, why
        return "" if repeated else f"the discovery script failed; its last hosts remain: {why}"
