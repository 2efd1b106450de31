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
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, List, Sequence

from cells import RESULTS
from peers.quotas import Groups, join

ROOT = Path(__file__).resolve().parents[1]
RANK = ROOT / "benchmarks" / "peers" / "unequal_rank.py"
QUOTAS = (0.9, 0.3, 0.3)
RATE = "1gbit"
HOSTS = ("desk", "jetson1", "jetson2")
WORK = {"global_batch": 96, "passes": 800, "gradient_bytes": 256 * 1024}
"""Per step; a sample takes ``passes`` times some 4 microseconds."""
KINDS: Dict[str, Any] = {
    "fast one alone": ([0], ["1"]),
    "equal batches": ([0, 1, 2], ["1", "1", "1"]),
    "balanced batches": ([0, 1, 2], ["measure"]),
}
"""The ranks that take part, and their speeds as ``rc.balanced`` gets them."""
LIMIT_S = 300.0


def train(options: Sequence[str], places: Sequence[str], environ: Dict[str, str], speeds: Sequence[str],
          steps: int) -> List[float]:  # fmt: skip
    """Run a job; return the seconds of each of rank 0's steps.

    Args:
        options: of ringrun, which name the hosts.
        places: control groups that the ranks join; empty if they are in them already.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "ringrun", "--threads", "1", *options, str(RANK)]
        command += ["--result", str(result), "--groups", *places, "--speeds", *speeds, "--steps", str(steps)]
        command += [word for name, value in WORK.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environ,
                              stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S)  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the job failed ({done.returncode}):\n{done.stdout}")
        return json.loads(result.read_text())


def measure(part: str, rounds: int, steps: int) -> Dict[str, Any]:
    """The three kinds in turns: medians of the second half of their steps."""
    step_s: Dict[str, List[float]] = {kind: [] for kind in KINDS}
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    with ExitStack() as stack:
        places = stack.enter_context(Groups(QUOTAS))
        if part == "hosts":
            sys.path.insert(0, str(ROOT))
            from tests.hosts.netlab import Lab

            reason = Lab.unavailable()
            if reason is not None:
                raise SystemExit(f"cannot make hosts here: {reason}")
            lab = stack.enter_context(Lab(*HOSTS, no_wlan=True, docker=False))
            environ.update(lab.environ())
            for name, place in zip(HOSTS, places):
                lab.shape(name, "eth", RATE, burst="256kb")
                join(place, lab.first_process(name))
        for number in range(rounds):
            for kind, (ranks, speeds) in KINDS.items():
                options = ["-np", str(len(ranks))]
                if part == "hosts":
                    options += ["-H", ",".join(HOSTS[rank] for rank in ranks), "-x", "PYTHONPATH"]
                joined = [places[rank] for rank in ranks] if part == "processes" else []
                times = train(options, joined, environ, speeds, steps)
                step_s[kind].append(statistics.median(times[len(times) // 2 :]))
                print(f"  {number + 1}/{rounds} {kind}: {step_s[kind][-1]:.4f} s", flush=True)
    medians = {kind: statistics.median(values) for kind, values in step_s.items()}
    alone, equal, balanced = medians.values()
    return {
        "quotas": QUOTAS, "steps": steps, "rounds": rounds, "work": WORK, "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "step_s": step_s, "median_s": medians,
        "against_alone": alone / balanced, "against_equal": equal / balanced,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("processes", "hosts")
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--results", type=Path, default=RESULTS / "unequal.json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind is run [3]")
    parser.add_argument("--steps", type=int, default=80, help="steps per run [80]")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for part in args.parts:
        print(part, flush=True)
        results[part] = measure(part, *((1, 40) if args.quick else (args.rounds, args.steps)))
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results[part]["median_s"]), flush=True)


if __name__ == "__main__":
    main()
