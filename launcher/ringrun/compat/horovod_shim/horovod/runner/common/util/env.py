"""Rank and size from environment variables, before ``hvd.init()``."""

from __future__ import annotations

import os
from typing import Tuple


def get_env_rank_and_size() -> Tuple[int, int]:
    """Rank and size from the launcher's variables; 0 and 1 in a process without a launcher."""
    return int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))
