"""What the environment says about a process, before ``hvd.init()``."""

from __future__ import annotations

import os
from typing import Tuple


def get_env_rank_and_size() -> Tuple[int, int]:
    """Rank and size as the launcher has set them; of a process alone if there was none."""
    return int(os.environ.get("HOROVOD_RANK", "0")), int(os.environ.get("HOROVOD_SIZE", "1"))
