"""What a rank does that connects through a given store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def meet(connection: Any, rank: int, size: int, port: int, later: bool) -> None:
    """Sum ones, and send the sum or the error; if `later`, wait for a message and sum in another group."""
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401
    from ringcomm.errors import RingcommError

    def total(group: Any) -> str:
        ones = torch.ones(1000, dtype=torch.float64)
        dist.all_reduce(ones, group=group)
        return f"sum {float(ones[0])}"

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    try:
        dist.init_process_group(
            "ringcomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        connection.send(total(None))
        if later:
            connection.recv()
            connection.send(total(dist.new_group(list(range(size)))))
        dist.destroy_process_group()
    except RingcommError as problem:
        connection.send(f"{type(problem).__name__} {problem}")
