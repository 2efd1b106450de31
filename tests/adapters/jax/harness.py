"""Runs the checks of ringcomm.jax on several processes, with either way to the host, and with delays."""

from __future__ import annotations

import random
import time
from typing import Any, Dict, Sequence

from tests.adapters import jobs

SUBJECTS = ("collectives", "transformations", "training")
MODULES = [f"tests.adapters.jax.checks_{subject}" for subject in SUBJECTS]


def run_delayed(modules: Sequence[str]) -> Dict[str, str]:
    """On every rank: run checks where each collective starts after a random delay, another on each rank."""
    import ringcomm as rc
    from ringcomm._adapter.graph_callbacks import Batch

    rc.init()
    draw = random.Random(rc.rank())
    submit = Batch._submit

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.choice((0.0, 0.0, 0.001, 0.01)))
        return submit(self, *args, **kwargs)

    Batch._submit = late
    return jobs.run_checks(modules)
