"""All-reduces of arrays of rc.empty, which the ranks of a host share, beside ordinary arrays, in turns.

    ringrun -np 2 benchmarks/shared_arrays.py [--rounds 7] [--sizes 1M 4M 16M] [--output FILE] [--quick]

Each rank stays on a core of its own. Prints, for each size, the medians and the ratio of ordinary to shared
(the median over turns), and what benchmarks/cores.py has seen before and after. "8Mx13" is as many arrays
of that size, one after the other: a step's gradients in buckets, which no cache holds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, List

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cores
import machine

import ringcomm as rc
from ringcomm.configuration.parsing import size as parse_bytes

SIZES = ("512K", "1M", "2M", "4M", "8M", "16M", "64M", "8Mx13")
TURN_S = 0.02
KINDS = {"ordinary": np.empty, "shared": rc.empty}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--output", type=Path, help="a file to which the results are added")
    parser.add_argument("--quick", action="store_true", help="a check that it works")
    args = parser.parse_args()
    rc.init()
    states = _states()
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if rc.size() <= len(allowed):
        os.sched_setaffinity(0, {allowed[rc.rank()]})
    rows = [
        compare(size, 2 if args.quick else args.rounds)
        for size in (args.sizes[:1] if args.quick else args.sizes)
    ]
    if allowed:
        os.sched_setaffinity(0, allowed)
    states += _states()
    if rc.rank() == 0:
        print(report(rows, states))
        if args.output is not None:
            add(args.output, {"load": round(os.getloadavg()[0], 1), "cores": states, "rows": rows})
    rc.shutdown()
    return 0


def add(path: Path, start: Dict[str, Any]) -> None:
    """Add a start to a file of results."""
    starts = [*(json.loads(path.read_text())["starts"] if path.exists() else ()), start]
    each = ",\n".join(json.dumps(item) for item in starts)
    path.write_text(f'{{"machine": {json.dumps(machine.facts())},\n "unit": "us", "starts": [\n{each}\n]}}\n')


def _states() -> List[str]:
    """Return what rank 0 sees of the cores, while the others wait."""
    found = cores.measure() if rc.rank() == 0 else None
    rc.barrier()
    return [] if found is None else [found.name]


def compare(text: str, rounds: int) -> Dict[str, Any]:
    """Microseconds per turn of both kinds of arrays, on this rank."""
    size, _, number = text.partition("x")
    kinds = {}
    for kind, make in KINDS.items():
        kinds[kind] = [make(parse_bytes(size) // 4, np.float32) for _ in range(int(number or 1))]
        for array in kinds[kind]:
            array.fill(0.0)
    times: Dict[str, List[float]] = {kind: [] for kind in kinds}
    calls = np.array([0.0])
    for turn in range(-1, rounds):
        for kind, arrays in kinds.items():
            taken = []
            for _ in range(2 + int(calls[0])):
                rc.barrier()
                began_s = time.perf_counter()
                for array in arrays:
                    rc.allreduce_(array, rc.Sum)
                taken.append(time.perf_counter() - began_s)
            if turn >= 0:
                times[kind].append(round(median(taken[1:]) * 1e6, 1))
        if turn < 0:
            calls[0] = min(100.0, max(3.0, TURN_S / taken[-1]))
            rc.broadcast_(calls, 0)
    return {"size": text, "times": times}


def report(rows: List[Dict[str, Any]], states: List[str]) -> str:
    """One row per size."""
    lines = [
        f"{rc.size()} ranks; the cores before and after: {', '.join(states)}; load {os.getloadavg()[0]:.1f}",
        "",
        "| size | ordinary | rc.empty | ratio |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in rows:
        ordinary, shared = row["times"]["ordinary"], row["times"]["shared"]
        ratio = median(one / other for one, other in zip(ordinary, shared))
        cells = [f"{median(times):,.0f} us" for times in (ordinary, shared)]
        lines.append(f"| {row['size']} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
