"""Check that all ranks hold bit-identical arrays, with 8 bytes per rank on the network.

Each rank hashes its arrays. One allreduce (Max) of 8 bytes compares the hashes: of the hash, folded to 32
bits, and of its complement. The largest complement belongs to the smallest hash, so the two results are
complements of each other only if all hashes are equal. If not, the ranks exchange the hash of every array (64
bits), and every rank finds the same differing ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .. import api
from ..arrays.operands import flat_view
from ..dtypes import Array
from ..engine.process_sets import GLOBAL_SET
from ..errors import BrokenInvariantError, DesyncError
from ..job.context import Context
from ..ops import ReduceOp
from .process_set import ProcessSet, number_of

Arrays = Union[Mapping[str, Any], Iterable[Any]]


def check_same(arrays: Arrays, process_set: Optional[ProcessSet] = None) -> None:
    """Check that every rank has the same arrays: names, shapes, dtypes and all bits. All ranks call it.

    Example: ``rc.check_same({name: item.numpy() for name, item in model.state_dict().items()})``.

    Args:
        arrays: NumPy arrays: a mapping by name, in the same order on all ranks, or a sequence.
        process_set: the ranks that are compared; by default all ranks of the job.

    Raises:
        DesyncError: some arrays differ; on every rank, with the first such array and the ranks that differ.
        MismatchError: ranks pass different numbers of arrays.
        PeerLostError: a rank ended, or is silent for too long.
    """
    if isinstance(arrays, np.ndarray):
        arrays = [arrays]
    named = arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays)
    compare(api.context(), [(str(name), array) for name, array in named], number_of(process_set))


def compare(context: Context, named: Sequence[Tuple[str, Any]], process_set: int = GLOBAL_SET) -> None:
    """Raise DesyncError if members of a process set hold different arrays; same order on all ranks."""
    members = context.engine.sets.members(process_set)
    if len(members) == 1:
        return
    hashes = np.array([hash_of(name, array) for name, array in named], np.uint64)
    whole = int.from_bytes(hashlib.blake2b(hashes.tobytes(), digest_size=8).digest(), "little")
    folded = (whole ^ whole >> 32) & 0xFFFFFFFF
    vote = np.array([folded, ~folded & 0xFFFFFFFF], np.uint32)
    context.engine.allreduce(
        [vote], ReduceOp.MAX, "ringcomm.check_same", process_set=process_set, urgent=True
    ).wait()
    if int(vote[0]) == ~int(vote[1]) & 0xFFFFFFFF:
        return
    table = np.zeros((len(members), hashes.size), np.uint64)
    table[members.index(context.rank)] = hashes
    context.engine.allreduce(
        [table.reshape(-1)], ReduceOp.SUM, "ringcomm.check_same: ranks, arrays", [table.shape],
        process_set=process_set, urgent=True,
    ).wait()  # fmt: skip
    # A row of zeros is of a rank that has joined.
    rows = {rank: row.tolist() for rank, row in zip(members, table) if row.any()}
    raise difference([name for name, _ in named], rows, {peer.rank: peer.host for peer in context.peers})


def hash_of(name: str, array: Any) -> int:
    """Return a 64-bit hash of an array's name, shape, dtype and bytes."""
    flat, shape = flat_view(array)
    return hash_of_bytes(f"{name} {flat.dtype} {shape}", flat.view(np.uint8) if flat.size else flat)


def hash_of_bytes(head: str, data: Array) -> int:
    """Return a 64-bit hash of ``head`` (name, dtype and shape) and a contiguous array of bytes."""
    found = hashlib.blake2b(head.encode(), digest_size=8)
    found.update(data.data)
    return int.from_bytes(found.digest(), "little")


def difference(
    names: Sequence[str], hashes: Mapping[int, Sequence[int]], hosts: Mapping[int, str]
) -> DesyncError:
    """Return the error for the first array whose hashes, by rank, are not all equal."""
    places = [index for index in range(len(names)) if len({row[index] for row in hashes.values()}) > 1]
    if not places:
        raise BrokenInvariantError("check_same() found a difference between equal arrays")
    first = places[0]
    groups: Dict[int, List[int]] = {}
    for rank in sorted(hashes):
        groups.setdefault(hashes[rank][first], []).append(rank)
    by_size = sorted(groups.values(), key=len, reverse=True)
    minority = sorted(rank for group in by_size[1:] for rank in group)
    tied = len(by_size[0]) == len(by_size[1])
    if tied:
        which = " and ".join(_ranks(group, hosts) for group in by_size[:4]) + " differ from each other"
    else:
        which = f"{_ranks(minority, hosts)} {'differs' if len(minority) == 1 else 'differ'} from the others"
    more = f", and {len(places) - 1} more of {len(names)}" if len(places) > 1 else ""
    return DesyncError(
        f"The ranks no longer hold the same numbers: in {names[first]!r}{more}, {which}. Broadcast "
        "parameters and the optimizer's state when training starts, use the same seed on all ranks for what "
        "must be equal, and change parameters only by what was reduced over all ranks.",
        tensor=names[first],
        ranks=None if tied else tuple(minority),
    )


def _ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({hosts[ranks[0]]})"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', …' if len(ranks) > 8 else ''}"
