"""The default beside every transport and algorithm that could have been chosen instead, in many starts.

    python benchmarks/alternatives.py [--np 2 4] [--starts 30] [--sizes 8 64K 1M] [--output FILE] [--quick]

Each start opens one job for the default and for each alternative, with fresh processes, and they take turns
as in transports.py. Before and after it benchmarks/cores.py looks whether the two cores share a cache: on a
virtual machine that changes, and with it the best way between two ranks. A start in which both looks saw the
same counts for that state, all others for neither.

Prints a table for each number of ranks and state: the default's time, the best alternative's, and the median
of their ratios in the starts; then the lines in which the default needs more than 1.1 times as long. With
``--show FILE`` the tables of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import sys
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
CHANGED = "another state before than after"
ROUNDS = 3


class Line(NamedTuple):
    """One size in one state: seconds, and how the default compares.

    Attributes:
        best: the alternative with the smallest median.
        ratio: the default's time over that of the best alternative; the median over starts.
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
    for number in range(starts):
        for count in ranks:
            began_s, before = time.monotonic(), cores.measure()
            rows = measure(count, (DEFAULT, *alternatives), tasks, ROUNDS)
            after = cores.measure()
            times = {
                row["task"]: {name: float(f"{median(each):.4g}") for name, each in row["times"].items()}
                for row in rows
            }
            looks = [None if look is None else look._asdict() for look in (before, after)]
            found.append({"ranks": count, "cores": looks, "times": times})
            took_s = time.monotonic() - began_s
            said = f"start {number + 1}, {count} ranks: {took_s:.0f} s, {state_of(found[-1])}"
            print(said, file=sys.stderr, flush=True)
    return found


def state_of(start: Dict[str, Any]) -> str:
    """The state of the cores in a start."""
    names = {cores.State(**look).name for look in start["cores"] if look is not None}
    return CHANGED if len(names) > 1 else names.pop() if names else "one core"


def lines(starts: Sequence[Dict[str, Any]]) -> Iterator[Line]:
    """What was found for each number of ranks, state and size."""
    groups: Dict[Any, List[Dict[str, float]]] = {}
    for start in starts:
        for task, times in start["times"].items():
            groups.setdefault((start["ranks"], state_of(start), task), []).append(times)
    for (ranks, state, task), found in sorted(groups.items(), key=lambda item: item[0][:2]):
        if state == CHANGED:
            continue
        medians = {name: median(times[name] for times in found) for name in found[0]}
        default_s = medians.pop(DEFAULT)
        best = min(medians, key=lambda name: medians[name])
        # Ratios within a start: what slows one of them slows the other.
        share = median(times[DEFAULT] / times[best] for times in found)
        yield Line(ranks, state, task, default_s, best, medians[best], share, len(found))


def report(starts: Sequence[Dict[str, Any]]) -> str:
    """All tables, and where the default is behind."""
    text, behind, head = [], [], None
    for line in lines(starts):
        if head != (line.ranks, line.state):
            head = (line.ranks, line.state)
            text += ["", f"{line.ranks} ranks, cores with {line.state}, {line.starts} starts", ""]
            text += ["| size | default | best alternative | default / best |", "| --- | --- | --- | --- |"]
        cells = f"{_time(line.default_s)} | {_time(line.best_s)} ({line.best}) | {line.ratio:.2f}"
        text.append(f"| {line.task} | {cells} |")
        if line.ratio > MAX_RATIO:
            behind.append(f"{line.ranks} ranks, {line.state}, {line.task}: {line.ratio:.2f} x {line.best}")
    changed = sum(state_of(start) == CHANGED for start in starts)
    text += ["", f"{changed} of {len(starts)} starts began in one state and ended in another."]
    text += ["", f"The default is more than {MAX_RATIO - 1:.0%} behind its best alternative:"]
    return "\n".join([*text, *(behind or ["nowhere"])]).strip()


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


if __name__ == "__main__":
    sys.exit(main())
