"""The hosts that a configuration file of ssh names. Pure."""

from __future__ import annotations

import re
import shlex
from typing import List, Tuple

from .hosts import is_host_name

_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)")


def hosts_and_includes(text: str) -> Tuple[List[str], List[str]]:
    """Return the names after ``Host``, without patterns, and the paths after ``Include``."""
    hosts: List[str] = []
    includes: List[str] = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found or found[1].lower() not in ("host", "include"):
            continue
        try:
            words = shlex.split(found[2], comments=True)
        except ValueError:
            continue  # an open quote
        if found[1].lower() == "include":
            includes += words
        else:
            hosts += [word for word in words if is_host_name(word) and word not in hosts]
    return hosts, includes
