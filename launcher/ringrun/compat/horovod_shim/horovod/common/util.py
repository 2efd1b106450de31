"""Functions that Horovod's own tests import from here."""

from __future__ import annotations

import re
from typing import List


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least ``major.minor.patch``; suffixes do not count."""
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> List[int]:
    return [int(number) for number in re.findall(r"(?:^|\.)(\d+)", version.partition("+")[0])[:3]]
