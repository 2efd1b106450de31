"""Reports of ranks as they arrive, for the tests of what shows them."""

from __future__ import annotations

import json
from typing import Any, Dict, Mapping, Sequence

from ringrun.show.history import History

HOSTS = {0: "desk", 1: "jetson1", 2: "jetson2"}


def report(rank: int, elapsed_s: float, **changes: Any) -> bytes:
    """Return what a rank sends; ``changes`` are fields with other values."""
    content: Dict[str, Any] = {
        "type": "numbers", "at": 1.7e9, "rank": rank, "size": 3, "generation": 0, "elapsed_s": elapsed_s,
        "steps": 0, "step_s": 0.0, "mean_step_s": 0.0, "waited_s": 0.0, "peers": {}, "kinds": {},
        "operations": {}, "late": {}, "doing": "", "inside": False, "waits_for": [], "gauges": {},
    }  # fmt: skip
    return json.dumps({**content, **changes}).encode()


def running(
    seconds: int, waited: Sequence[float], slept: Mapping[int, Mapping[int, float]], steps: float = 2.0
) -> History:  # fmt: skip
    """Return the history of a job whose ranks have reported once a second. By rank, `waited` is the share of
    time that it waits, `slept` that for each other rank; `steps` are per second.
    """
    history = History(0.0)
    for second in range(seconds + 1):
        for rank, part in enumerate(waited):
            sent = {other: 1e6 * second for other in range(len(waited)) if other != rank}
            peers = {
                str(other): [int(count), int(count), second * slept.get(rank, {}).get(other, 0.0), 0, 0.0]
                for other, count in sent.items()
            }
            kinds = {"allreduce": [int(steps * second), part * second, int(4e6 * second)]}
            data = report(
                rank, float(second), steps=int(steps * second), waited_s=part * second, peers=peers,
                kinds=kinds, operations={"allreduce(shape (8,), float32, op=Sum)": kinds["allreduce"]},
            )  # fmt: skip
            assert history.take(rank, data, float(second))
    return history


SLOW_2 = running(20, [0.8, 0.8, 0.1], {0: {2: 0.7}, 1: {2: 0.7}, 2: {0: 0.05, 1: 0.05}})
"""Three ranks of which the last one computes longest."""
EQUAL = running(20, [0.3, 0.3, 0.3], {0: {1: 0.1, 2: 0.1}, 1: {0: 0.1, 2: 0.1}, 2: {0: 0.1, 1: 0.1}})
"""Three equal ranks."""
