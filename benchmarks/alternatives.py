"""The default beside every transport and algorithm that could have been chosen instead, in many starts.

    python benchmarks/alternatives.py [--np 2 4] [--starts 30] [--sizes 8 64K 1M] [--output FILE] [--quick]

Each start opens one job for the default and for each alternative, with fresh processes, and they take turns
as in transports.py. Between turns the two ranks look whether their cores share a cache (cores.py): on a
virtual machine that changes within seconds, and with it the best way between two ranks. A turn that began and
ended in the same state counts for that state, all others for neither.

Prints a table for each number of ranks and state: the default's time, the best alternative's, and the median
of their ratios in the starts that met the state; then the lines in which the default needs more than 1.1
times as long. With ``--show FILE`` the tables of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import cores
import machine
from transports import DEFAULT, GRADIENTS, measure, parse_bytes

SIZES = ("8", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M")
ALTERNATIVES = ("shm", "memory", "unix", "tcp", "direct", "ring", "doubling", "one_shot")
MAX_RATIO = 1.1
ROUNDS = 5


class Line(NamedTuple):
    """One size in one state: seconds, and how the default compares.

    Attributes:
        best: the alternative that is the fastest beside the default in the same starts.
        ratio: the default's time over its; the median over starts.
        starts: in how many starts it was measured.
    """

    ranks: int
    state: str
    task: str
    default_s: float
    best: str
    best_s: float
    ratio: float
    starts: int


def main() -> int:
    args = _arguments()
    if args.show is not None:
        starts = json.loads(args.show.read_text())["starts"]
    else:
        sizes = SIZES[:3] if args.quick else args.sizes
        starts = run(args.np, 1 if args.quick else args.starts, sizes, args.alternatives)
        if args.output is not None:
            each = ",\n".join(json.dumps(start) for start in starts)
            args.output.write_text(f'{{"machine": {json.dumps(machine.facts())}, "starts": [\n{each}\n]}}\n')
    print(report(starts))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--np", type=int, nargs="+", default=[2])
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--alternatives", nargs="+", default=ALTERNATIVES)
    parser.add_argument("--output", type=Path, help="a file for the results, as benchmarks/results has it")
    parser.add_argument("--show", type=Path, help="print the tables of such a file, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="a check that it works")
    return parser.parse_args()


def run(
    ranks: Sequence[int], starts: int, sizes: Sequence[str], alternatives: Sequence[str]
) -> List[Dict[str, Any]]:
    """All starts, with seconds: for each name the median of its turns."""
    tasks = [*map(parse_bytes, sizes), GRADIENTS]
    found = []
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        for number in range(starts):
            for count in ranks:
                began_s = time.monotonic()
                file.truncate(0)
                file.truncate(cores.MAPPED_BYTES)
                watched = file.name if 1 < count <= len(os.sched_getaffinity(0)) else ""
                rows = measure(count, (DEFAULT, *alternatives), tasks, ROUNDS, watched)
                found.append({"ranks": count, "times": {row["task"]: _by_state(row) for row in rows}})
                took_s = time.monotonic() - began_s
                print(f"start {number + 1}, {count} ranks: {took_s:.0f} s", file=sys.stderr, flush=True)
    return found


def _by_state(row: Dict[str, Any]) -> Dict[str, Dict[str, float]]:
    """The median of the turns in each state, by state and name."""
    turns: Dict[str, Dict[str, List[float]]] = {}
    for name, times in row["times"].items():
        for state, seconds in zip(row["states"][name], times):
            turns.setdefault(state, {}).setdefault(name, []).append(seconds)
    return {
        state: {name: float(f"{median(each):.4g}") for name, each in names.items()}
        for state, names in turns.items()
        if state
    }


def lines(starts: Sequence[Dict[str, Any]]) -> Iterator[Line]:
    """Return what was found for each number of ranks, state and size."""
    groups: Dict[Any, List[Dict[str, float]]] = {}
    for start in starts:
        for task, states in start["times"].items():
            for state, times in states.items():
                if DEFAULT in times:
                    groups.setdefault((start["ranks"], state, task), []).append(times)
    tasks = list(dict.fromkeys(task for start in starts for task in start["times"]))
    order = sorted(groups, key=lambda group: (group[0], group[1], tasks.index(group[2])))
    for (ranks, state, task), found in ((group, groups[group]) for group in order):
        # Ratios within a start: what slows one of them slows the other.
        ratios: Dict[str, List[float]] = {}
        for times in found:
            for name, seconds in times.items():
                ratios.setdefault(name, []).append(times[DEFAULT] / seconds)
        del ratios[DEFAULT]
        best = max(ratios, key=lambda name: median(ratios[name]))
        default_s = median(times[DEFAULT] for times in found)
        best_s = median(times[best] for times in found if best in times)
        yield Line(ranks, state, task, default_s, best, best_s, median(ratios[best]), len(ratios[best]))


def report(starts: Sequence[Dict[str, Any]]) -> str:
    """All tables, and where the default is behind."""
    text, behind, head = [], [], None
    for line in lines(starts):
        if head != (line.ranks, line.state):
            head = (line.ranks, line.state)
            text += ["", f"{line.ranks} ranks, cores with {line.state}", ""]
            text += ["| size | starts | default | best alternative | default / best |", f"|{' --- |' * 5}"]
        cells = f"{_time(line.default_s)} | {_time(line.best_s)} ({line.best}) | {line.ratio:.2f}"
        text.append(f"| {line.task} | {line.starts} | {cells} |")
        if line.ratio > MAX_RATIO:
            behind.append(f"{line.ranks} ranks, {line.state}, {line.task}: {line.ratio:.2f} x {line.best}")
    text += ["", f"The default is more than {MAX_RATIO - 1:.0%} behind its best alternative:"]
    return "\n".join([*text, *(behind or ["nowhere"])]).strip()


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


if __name__ == "__main__":
    sys.exit(main())
