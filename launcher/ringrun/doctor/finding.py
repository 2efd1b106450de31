"""One problem that an examination has found, and its remedy. Pure."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

BAD, SLOW, NOTE = "bad", "slow", "note"
LEVELS = (BAD, SLOW, NOTE)


class Finding(NamedTuple):
    """One problem, with the numbers in its text and the command in its remedy. The level is ``bad`` if jobs
    fail or hang, ``slow`` if they are slower than possible, ``note`` for a hint (exit code 0).
    """

    level: str
    check: str  # one of CHECKS
    hosts: Tuple[int, ...]  # indices
    text: str
    remedy: str


CHECKS = ("login", "software", "addresses", "network", "links", "cpu", "memory", "limits")
"""The columns of the report."""


def is_usable(iface: Dict[str, Any]) -> bool:
    """Return whether an interface may connect hosts; other hosts usually have the same ones of containers."""
    return not str(iface["name"]).startswith(("docker", "br-", "virbr", "veth", "lxc", "cni"))
