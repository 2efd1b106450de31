"""Process groups whose ranks are threads of this process, with real links and a real rendezvous."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence

import torch.distributed as dist

from ringcomm.torch.distributed import ProcessGroupRingcomm

LIMIT = timedelta(seconds=90)


def on_ranks(
    function: Callable[[ProcessGroupRingcomm], Any], size: int, ranks: Optional[Sequence[int]] = None
) -> List[Any]:
    """Call ``function(group)`` on every rank of a new group, each in a thread; return the results in rank
    order. `ranks` are their numbers in the whole job.
    """
    store = dist.HashStore()
    numbers = list(range(size)) if ranks is None else list(ranks)

    def work(rank: int) -> Any:
        group = ProcessGroupRingcomm(store, rank, numbers, LIMIT, "test", False)
        try:
            return function(group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
