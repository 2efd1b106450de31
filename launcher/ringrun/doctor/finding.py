"""One problem that an examination has found, and its remedy. Pure."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

BAD, SLOW, NOTE = "bad", "slow", "note"
LEVELS = (BAD, SLOW, NOTE)


class Finding(NamedTuple):
    """One problem.

    Attributes:
        level: ``bad`` if jobs fail or hang, ``slow`` if they are slower than they could be; ``note`` if it is
            worth a look, but nothing to repair: that is no problem, and the exit code is 0.
        check: the name of the check, one of :data:`CHECKS`.
        hosts: the hosts' indices.
        text: what is wrong, with the numbers.
        remedy: what to do, with the command.
    """

    level: str
    check: str
    hosts: Tuple[int, ...]
    text: str
    remedy: str


CHECKS = ("login", "software", "addresses", "network", "links", "cpu", "memory", "limits")
"""The columns of the report."""


def is_usable(iface: Dict[str, Any]) -> bool:
    """Return whether an interface may connect hosts. Other hosts usually have those of containers, too."""
    return not str(iface["name"]).startswith(("docker", "br-", "virbr", "veth", "lxc", "cni"))
