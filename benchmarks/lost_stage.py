"""Seconds from the loss of a pipeline's stage to the error that names it, by rank, on three hosts.

    sudo python benchmarks/lost_stage.py [--kills 10] [--cuts 3] [--output FILE]

The hosts are network namespaces of this machine with links of 100 Mbit/s. A pipeline of three stages trains
on them (tests/hosts/programs/stage.py, started by ringrun). Its middle stage is killed (kill -9), or the link
of its host goes down, which no message announces: then ``--dead-after`` decides, 2 s and the default of 30 s.
With --output also FILE, in JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[1]
for place in (str(ROOT), str(ROOT / "launcher"), str(Path(__file__).resolve().parent)):
    if place not in sys.path:
        sys.path.insert(0, place)

import machine  # noqa: E402 - it needs the path

from tests.hosts.enduring import HOSTS, cut_stage, endure, kill_stage, stage_program  # noqa: E402
from tests.hosts.netlab import Lab  # noqa: E402

RATE = "100mbit"
Seconds = Dict[str, List[float]]


def measure(lab: Lab, fault: str, dead_after_s: float, rounds: int) -> Seconds:
    """Lose a stage so many times; the seconds of each rank that got the error."""
    found: Seconds = {}
    for _ in range(rounds):
        for host in HOSTS:
            lab.shape(host, "eth", RATE)
        strike = kill_stage if fault == "killed" else cut_stage
        with tempfile.TemporaryDirectory() as folder:
            seen = endure(lab, Path(folder), stage_program(folder), strike, dead_after_s, limit_s=120.0)
        if {error["rank"] for error in seen.errors.values()} != {1}:
            raise SystemExit(f"the lost stage was not named: {seen.errors}")
        for rank, took in seen.took_s().items():
            found.setdefault(f"rank {rank}", []).append(round(took, 3))
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="stages that are killed [10]")
    parser.add_argument("--cuts", type=int, default=3, help="links that go down, with each limit [3]")
    parser.add_argument("--output", type=Path, help="a file for the result")
    args = parser.parse_args()
    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    cases = [("killed", 30.0, args.kills), ("link down", 2.0, args.cuts), ("link down", 30.0, args.cuts)]
    results = []
    print(f"{'stage':10} {'dead after':>10}  seconds, median and longest")
    with Lab(no_wlan=True, docker=False) as lab:
        for fault, dead_after_s, rounds in cases:
            seconds = measure(lab, fault, dead_after_s, rounds)
            results.append({"fault": fault, "dead_after_s": dead_after_s, "seconds": seconds})
            texts = [f"{rank}: {statistics.median(s):.2f}, {max(s):.2f}" for rank, s in seconds.items()]
            print(f"{fault:10} {dead_after_s:8g} s  {'; '.join(texts)}", flush=True)
    if args.output is not None:
        facts = {"machine": machine.facts(), "link": RATE, "results": results}
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
