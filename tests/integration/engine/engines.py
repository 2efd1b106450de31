"""What tests of engines share: settings, and an operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ringcomm.config import Settings
from ringcomm.ops import Sum

LIMIT_S = 30.0
PLAIN = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0)


def plain(**changes: Any) -> Settings:
    return replace(PLAIN, **changes)


def reduced(context, name, **options):
    """Three times rank + 1, summed up over all ranks."""
    array = np.full(3, context.rank + 1.0)
    context.engine.allreduce([array], Sum, name, **options).wait(LIMIT_S)
    return array.tolist()
