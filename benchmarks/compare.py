"""ringcomm beside Gloo, Open MPI and MPICH within a host, and beside what the machine itself can do.

    python benchmarks/compare.py                           all that docs/performance.md shows: half an hour
    python benchmarks/compare.py --quick --output FILE     a few minutes: does it work?
    python benchmarks/compare.py --only one --peers ringcomm gloo --sizes 8 1M --output FILE

Runs: ``one`` (all-reduces, 2 ranks), ``four`` (4 ranks), ``others`` (other collectives) and ``gradients``
(ResNet-50's, in the ways of :mod:`peers.steps`). Each replaces its own in the file, by default
benchmarks/results/one_host.json. See README.md for how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import machine
from cells import RESULTS, duration, median, size_text
from measure import QUICK, Pace, Seconds, in_turns
from peers.catalog import PEERS, Peer, choose

KB, MB = 1024, 1_000_000
SIZES = (8, KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
QUICK_SIZES = (8, 64 * KB, MB)
OWN = ("ringcomm", "ringcomm-shared", "ringcomm-shm", "ringcomm-tcp", "gloo")
MPI = ("openmpi", "openmpi-tcp", "mpich")


class Plan(NamedTuple):
    """One run: its number of ranks, rounds and peers, and what they do."""

    np: int
    rounds: int
    peers: Tuple[str, ...]
    collectives: Tuple[str, ...]
    sizes: Tuple[int, ...] = SIZES


RUNS = {
    "one": Plan(2, 12, (*OWN, *MPI, "mpich-tcp"), ("allreduce",)),
    "four": Plan(4, 3, ("ringcomm", "ringcomm-tcp", "gloo", *MPI), ("allreduce",),
                 (8, 16 * KB, 256 * KB, MB, 16 * MB, 64 * MB)),
    "others": Plan(2, 3, ("ringcomm", "ringcomm-tcp", "gloo", *MPI),
                   ("broadcast", "allgather", "reducescatter", "alltoall"), (8, 16 * KB, MB, 16 * MB)),
    "gradients": Plan(2, 5, ("ringcomm", "ringcomm-shared", "ringcomm-tcp", "gloo", *MPI), ()),
}  # fmt: skip
MODES: Dict[str, Tuple[str, ...]] = {
    "run_ringcomm.py": ("per-tensor", "grouped", "one-bucket", "small-buckets-view"),
    "run_gloo.py": ("per-tensor", "ddp-buckets", "ddp-buckets-view", "small-buckets-view"),
    "run_mpi.py": ("per-tensor", "ddp-buckets", "ddp-buckets-view", "small-buckets-view"),
}  # fmt: skip
"""How each kind of peer reduces ResNet-50's gradients."""


def size_argument(text: str) -> int:
    """8, 64K (1024s) or 16M (millions)."""
    units = {"K": KB, "M": MB}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def measure_limits(quick: bool) -> List[Dict[str, Any]]:
    """The machine's limits, measured in a fresh process."""
    command = [sys.executable, str(Path(__file__).with_name("limits.py")), "--json", *["--quick"] * quick]
    found: List[Dict[str, Any]] = json.loads(subprocess.run(command, stdout=-1, text=True, check=True).stdout)
    return found


def run(plan: Plan, pace: Pace, wanted: Optional[Sequence[str]]) -> Tuple[Seconds, bool]:
    """All peers of a run in turns; those that are missing are left out."""
    peers, left_out = choose([name for name in wanted or plan.peers if name in plan.peers])
    for name, reason in left_out.items():
        print(f"without {name}: {reason}", file=sys.stderr)

    def tasks(peer: Peer) -> List[Dict[str, Any]]:
        if not plan.collectives:
            return [{"kind": "step", "mode": mode} for mode in MODES[peer.worker]]
        return [
            {"kind": "collective", "collective": name, "bytes": size}
            for name in plan.collectives for size in plan.sizes
        ]  # fmt: skip

    label = "{np} {collective} {bytes}" if plan.collectives else "{mode}"
    return in_turns(peers, plan.np, tasks, label, pace)


def show(seconds: Seconds) -> None:
    """Print medians."""
    for name, peers in seconds.items():
        words = name.split()
        label = f"{words[1]}, {words[0]} ranks, {size_text(int(words[2]))}" if len(words) == 3 else name
        print(f"{label}: " + ", ".join(f"{peer} {duration(median(times))}" for peer, times in peers.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "one_host.json", metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=tuple(RUNS), metavar="RUN")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), metavar="NAME",
                        help=f"of {', '.join(PEERS)}")  # fmt: skip
    parser.add_argument("--sizes", type=size_argument, nargs="+", metavar="BYTES", help="8 64K 16M …")
    parser.add_argument("--rounds", type=int, help="how often every peer has its turn")
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    parser.add_argument("--wait", type=float, default=120.0, metavar="S", help="seconds to wait for quiet")
    args = parser.parse_args()
    if not machine.wait_for_quiet(0.0 if args.quick else args.wait):
        print("This machine is not quiet; measuring all the same.", file=sys.stderr)
    results = json.loads(args.output.read_text()) if args.output.exists() else {"runs": {}}
    facts, code = machine.facts(), 0
    for name in args.only:
        plan = RUNS[name]
        if args.sizes or args.quick:
            plan = plan._replace(sizes=tuple(args.sizes or QUICK_SIZES))
        pace = replace(QUICK if args.quick else Pace(), bind=plan.np == 2)
        pace = replace(pace, rounds=args.rounds or (1 if args.quick else plan.rounds))
        seconds, good = run(plan, pace, args.peers)
        code = max(code, int(not good))
        source = f"{facts['when']}, {facts['cpu']}, {facts['cores']} cores; seconds: the median of each round"
        if name == "gradients":
            results["resnet50"] = {"source": source, "rounds": {
                f"{peer}, {mode}": times for mode, each in seconds.items() for peer, times in each.items()
            }}  # fmt: skip
        else:
            limits = measure_limits(args.quick) if name == "one" else []
            results["runs"][name] = {
                "source": source, "cores": facts["cores"], "limits": limits, "seconds": seconds,
            }  # fmt: skip
        show(seconds)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
