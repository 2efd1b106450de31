"""What tests of engines share: settings, and an operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ringcomm.config import Settings

LIMIT_S = 30.0
PLAIN = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0)


def plain(**changes: Any) -> Settings:
    return replace(PLAIN, **changes)
