"""Direct exchange block by block: for arrays on devices that copy hardly faster than the network sends.

:func:`.direct.all_reduce` sends all contributions before the first result. Copies from a device run beside
the contributions and copies to it beside the results, so each direction of the copies is idle for a part of
the time. That is hidden where copies are twice as fast as the network; where they are not, it shows.

Here each chunk is cut into blocks, and results of a block follow the contributions of the next one::

    contributions 0, contributions 1, results 0, contributions 2, results 1, ...

So while block k is copied to the device, block k + 1 is on the network and block k + 2 is copied from the
device. Every element is summed as in ``direct``, with the same bits. For arrays in host memory the blocks
gain nothing and cost messages, so this algorithm is used only where the user has chosen it, or in the place
of ``direct`` when all arrays are on devices (:mod:`ringcomm.collective.placement`).

In the cost below a message takes alpha seconds plus beta seconds per element, adding takes gamma seconds per
element, p is the number of ranks, n the number of elements and b the number of blocks.

Source: segmented pipelines are folklore of MPI libraries; UCX and Open MPI copy from devices in this way.
"""

from __future__ import annotations

from typing import List, Tuple

from .direct import MAX_RANKS, all_gather_spans, reduce_scatter_spans
from .registry import Algorithm, register
from .steps import Bounds, Schedule

_MIN_BLOCK_ITEMS = 1 << 18
"""Of all ranks' chunks together: 1 MB of float32. Below, the cost of each copy shows (some 30 us)."""
_MAX_BLOCKS = 32
_MAX_PARTS = 256
"""Blocks times ranks: the time to prepare a schedule grows with the square of its length."""


def blocks_of(count: int, size: int) -> int:
    """Return how many blocks an all-reduce of ``count`` elements is cut into.

    >>> blocks_of(1000, 2), blocks_of(1 << 24, 2), blocks_of(1 << 24, 16)
    (1, 32, 16)
    """
    return max(1, min(count // _MIN_BLOCK_ITEMS, _MAX_BLOCKS, _MAX_PARTS // size))


def all_reduce(rank: int, size: int, bounds: Bounds, blocks: int) -> Schedule:
    """Reduce-scatter and all-gather of each block, one block ahead of each other.

    Args:
        rank: this rank, ``0 <= rank < size``.
        size: number of ranks.
        bounds: ``size + 1`` chunk boundaries in elements; chunks may be empty or uneven.
        blocks: how many parts each chunk is cut into.

    Returns:
        the steps of :func:`.direct.all_reduce` for every block, interleaved.

    Cost: ``(b + 1) alpha + 2 (p - 1)/p n beta + (p - 1)/p n gamma`` for equal chunks; with copies between
    device and host that take less per element, hardly more.
    Source: see the module.

    >>> for step in all_reduce(0, 2, (0, 2, 4), 2): print(step)
    Send(peer=1, start=2, stop=3, buffer=0)
    Recv(peers=(1,), start=0, stop=1, fold=(-1, 1), final=True)
    Send(peer=1, start=3, stop=4, buffer=0)
    Recv(peers=(1,), start=1, stop=2, fold=(-1, 1), final=True)
    Send(peer=1, start=0, stop=1, buffer=0)
    Recv(peers=(1,), start=2, stop=3, fold=(), final=False)
    Send(peer=1, start=1, stop=2, buffer=0)
    Recv(peers=(1,), start=3, stop=4, fold=(), final=False)
    """
    steps: Schedule = []
    for block in range(blocks + 1):
        if block < blocks:
            steps += reduce_scatter_spans(rank, size, _block(bounds, block, blocks))
        if block:
            steps += all_gather_spans(rank, size, _block(bounds, block - 1, blocks))
    return steps


def _block(bounds: Bounds, block: int, blocks: int) -> List[Tuple[int, int]]:
    """Of each rank's chunk the part that belongs to a block."""
    return [
        (start + (stop - start) * block // blocks, start + (stop - start) * (block + 1) // blocks)
        for start, stop in zip(bounds, bounds[1:])
    ]


register(
    Algorithm(
        "allreduce", "pipelined", lambda p: all_reduce(p.rank, p.size, p.bounds, blocks_of(p.count, p.size)),
        single_fold=True, max_ranks=MAX_RANKS, by_name_only=True,
    )
)  # fmt: skip
