"""Ranks of unequal speed: the fast one alone, and all three with equal and with balanced batches.

    sudo python benchmarks/unequal.py processes hosts     measures these parts

Results are in benchmarks/results/unequal.json; each part replaces its own.

* ``processes``: three processes with 0.9, 0.3 and 0.3 of a core;
* ``hosts``: the same on three hosts of namespaces with links of 1 Gbit/s.

Speeds are made by CPU quotas (the cpu controller of cgroups), so ranks really compute, slowly: nothing sleeps
in place of work. Two idle cores are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any, Dict, List

from peers.unequal_jobs import Machines, Work, hosts, on_hosts, processes, settled

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "unequal.json"

QUOTAS = [0.9, 0.3, 0.3]
RATE = "1gbit"
HOSTS = ("desk", "jetson1", "jetson2")
KINDS = ("fast one alone", "equal batches", "balanced batches")

def compare(machines: Machines, rounds: int, steps: int, work: Work) -> Dict[str, Any]:
    """The three kinds in turns: medians of the second half of their steps, and what became of shares."""
    step_s: Dict[str, List[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind, chosen, speeds in zip(KINDS, ([0], [0, 1, 2], [0, 1, 2]), ([1], [1, 1, 1], "measure")):
            run = machines.train(chosen, speeds, steps, work)
            step_s[kind].append(statistics.median(settled(run.times[0])))
            said = " | ".join(run.lines)
            print(f"  {number + 1}/{rounds} {kind}: {step_s[kind][-1]:.4f} s {said}", flush=True)
    return with_medians({
        "quotas": QUOTAS, "steps": steps, "rounds": rounds, "work": work._asdict(),
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "step_s": step_s,
    })  # fmt: skip


def with_medians(found: Dict[str, Any]) -> Dict[str, Any]:
    """Return what :func:`compare` has measured, with medians over its rounds."""
    medians = {kind: statistics.median(values) for kind, values in found["step_s"].items()}
    alone, equal, balanced = (medians[kind] for kind in KINDS)
    figures = {"against_alone": alone / balanced, "against_equal": equal / balanced}
    return {**found, "median_s": medians, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("processes", "hosts")
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind is run [3]")
    parser.add_argument("--steps", type=int, default=80, help="steps per run [80]")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    rounds, steps = (1, 40) if args.quick else (args.rounds, args.steps)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for part in args.parts:
        print(part, flush=True)
        if part == "processes":
            with processes(QUOTAS) as machines:
                results[part] = compare(machines, rounds, steps, Work())
        else:
            with hosts(HOSTS) as lab, on_hosts(lab, QUOTAS, [RATE] * 3) as machines:
                results[part] = {**compare(machines, rounds, steps, Work()), "rate": RATE}
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results[part]["median_s"]), flush=True)


if __name__ == "__main__":
    main()
