"""The rank and size in a process's environment, before ``hvd.init()``."""

from __future__ import annotations

import os
from typing import Tuple


def get_env_rank_and_size() -> Tuple[int, int]:
    """The rank and size that the launcher has set; 0 and 1 without a launcher."""
    return int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))
