"""Runs the checks of ringcomm.jax on several processes, and with delays."""

from __future__ import annotations

import random
import time
from typing import Any, Dict, Sequence

from tests.adapters import jobs

SUBJECTS = ("collectives", "transformations", "training", "programs")
MODULES = [f"tests.adapters.jax.checks_{subject}" for subject in SUBJECTS]


def run_delayed(modules: Sequence[str]) -> Dict[str, str]:
    """On every rank: run checks where each collective starts after a random delay, another on each rank."""
    import ringcomm as rc
    from ringcomm._adapter.graph_callbacks import Batch
    from ringcomm.jax.host_call import HostCall

    rc.init()
    draw = random.Random(rc.rank())

    def delay(kind: Any, method: str) -> None:
        prompt = getattr(kind, method)

        def late(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.choice((0.0, 0.0, 0.001, 0.01)))
            return prompt(self, *args, **kwargs)

        setattr(kind, method, late)

    delay(Batch, "_submit")  # of calls outside of programs
    delay(HostCall, "run")
    return jobs.run_checks(modules)
