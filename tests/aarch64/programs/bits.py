"""Every collective with every element type, reduction and codec: compare the bits of all ranks.

``bits.py FILE``: rank 0 writes a digest of every result to FILE, as JSON: {case: digest}.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Dict, List

import numpy as np

import ringcomm as rc
from ringcomm.ops import CODECS
from tests.support.reference import all_dtypes, contributions, hard_bits, ops_for

COUNTS = (1, 7, 50_001)
results: Dict[str, str] = {}


def keep(case: str, result: np.ndarray) -> None:
    results[case] = hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()[:16]


def reductions(kind: str, own: np.ndarray, case: str) -> None:
    """All reductions of one contribution per rank."""
    dtype = own.dtype
    for op in ops_for(dtype):
        name = f"{kind} {case} {op.name}"
        keep(f"{name} allreduce", rc.allreduce(own, op=op))
        keep(f"{name} async", rc.synchronize(rc.allreduce_async(own, name=name, op=op)))
        shares = rc.reducescatter(np.concatenate([own] * rc.size()), op=op)
        keep(f"{name} reducescatter", rc.allgather(shares))
    if dtype.kind != "b":
        keep(f"{kind} {case} scaled", rc.allreduce(own, op=rc.Sum, prescale_factor=0.3, postscale_factor=1.7))
        for factor in (0.0, float("inf"), float("nan")):  # 0 times infinity is NaN
            keep(f"{kind} {case} scaled by {factor}", rc.allreduce(own, op=rc.Sum, postscale_factor=factor))
            keep(f"{kind} {case} prescaled by {factor}", rc.allreduce(own, op=rc.Sum, prescale_factor=factor))
    if dtype.kind not in "biu":
        keep(f"{kind} {case} weighted", rc.allreduce(own, weight=1.0 + rc.rank()))
        for codec in CODECS[1:]:
            for op in (rc.Sum, rc.Average):
                keep(f"{kind} {case} {op.name} {codec}", rc.allreduce(own, op=op, compression=codec))
    if dtype.kind == "f" or dtype.name == "bfloat16":
        keep(f"{kind} {case} adasum", rc.allreduce(own, op=rc.Adasum))


def common_dtypes() -> List[np.dtype]:
    """The element types of all ranks: some hosts have no bfloat16."""
    found = rc.allgather_object([dtype.name for dtype in all_dtypes()])
    return [dtype for dtype in all_dtypes() if all(dtype.name in names for names in found)]


def movements(own: np.ndarray, case: str) -> None:
    """The collectives that only move data."""
    keep(f"{case} allgather", rc.allgather(own[: own.size - rc.rank()]))
    for root in range(rc.size()):
        keep(f"{case} broadcast from {root}", rc.broadcast(own, root_rank=root))
    keep(f"{case} alltoall", rc.allgather(rc.alltoall(np.concatenate([own] * rc.size()))))


def main() -> None:
    # What is measured decides where a codec rounds.
    settings = rc.Settings.from_environment()
    rc.init(settings=replace(settings, measure=False, algorithm=os.environ.get("ALGORITHM", "")))
    rank, size = rc.rank(), rc.size()
    with np.errstate(all="ignore"):
        for dtype in common_dtypes():
            for count in COUNTS:
                own = contributions(dtype, size, count)[rank]
                reductions("numbers", own, f"{dtype.name} {count}")
                if dtype.kind not in "biu":
                    reductions("hard", hard_bits(dtype, count, (count, rank)), f"{dtype.name} {count}")
            movements(contributions(dtype, size, COUNTS[1])[rank], dtype.name)
    value = rc.broadcast_object({"array": np.arange(5.0), "scalar": np.float32(3)} if rank == 0 else None)
    assert value["array"].tolist() == [0, 1, 2, 3, 4] and value["scalar"] == 3
    machines = rc.allgather_object((platform.machine(), np.__version__.split(".")[0]))
    everything = rc.allgather_object(results)
    print("is", *machines[rank], flush=True)
    if rank == 0:
        differ = [case for case in results if len({str(other[case]) for other in everything}) > 1]
        print(len(results), "results,", len(differ), "differ:", "; ".join(differ[:20]), flush=True)
        Path(sys.argv[1]).write_text(json.dumps(results))
    rc.shutdown()


main()
