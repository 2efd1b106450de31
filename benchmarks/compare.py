"""ringcomm beside Gloo, Open MPI, MPICH and Horovod, and beside what the machine itself can do.

    python benchmarks/compare.py --output DIR              everything: about half an hour
    python benchmarks/compare.py --output DIR --quick      a few minutes: does it work?
    python benchmarks/compare.py --output DIR --np 2 --collectives allreduce --peers ringcomm gloo
    python benchmarks/compare.py --output DIR --peers ringcomm-tcp gloo ringcomm-tcp@reno gloo@reno

Writes DIR/compare.json (raw times, medians, facts about the machine), compare.md (tables of ratios) and
compare-npN.png. See README.md for how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import cores
import machine
import report
from measure import QUICK, Batch, Collected, Pace, round_robin
from peers.catalog import MPIS, PEERS, Tools, choose

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
KB, MB = 1024, 1_000_000
SIZES = (8, KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
QUICK_SIZES = (8, 64 * KB, MB, 16 * MB)


def size_argument(text: str) -> int:
    """8, 64K (1024s) or 16M (millions)."""
    units = {"K": KB, "M": MB}
    digits = text.upper().rstrip("B")
    return int(digits[:-1]) * units[digits[-1]] if digits[-1:] in units else int(digits)


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """What compare.py and resnet.py have in common."""
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument(
        "--np", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks [2 4]"
    )
    parser.add_argument("--peers", nargs="+", metavar="NAME[@CC]", help=f"of {', '.join(PEERS)}; @reno and "
                        "the like: under that congestion control [all that are installed]")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    parser.add_argument("--rounds", type=int, help="how often every peer has its turn [3]")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for one size in one round [0.3]")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds after which a run is ended [240]")
    parser.add_argument("--bind", action="store_true", help="each rank on a core of its own, like Open MPI")
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="S", help="seconds to wait for quiet [120]"
    )
    for mpi in MPIS:
        variable = f"MPI4PY_{mpi.upper()}"
        parser.add_argument(f"--mpi4py-{mpi}", metavar="DIR", default=os.environ.get(variable),
                            help=f"the mpi4py built for {mpi} [${variable}]")  # fmt: skip


def tools_of(args: argparse.Namespace) -> Tools:
    """Return where the peers are."""
    return Tools({mpi: getattr(args, f"mpi4py_{mpi}") or "" for mpi in MPIS})


def pace_of(args: argparse.Namespace) -> Pace:
    """Return how long to measure."""
    wishes = {"rounds": args.rounds, "budget_s": args.budget, "limit_s": args.limit, "bind": args.bind}
    return replace(QUICK if args.quick else Pace(), **{name: wish for name, wish in wishes.items() if wish})


def quiet(args: argparse.Namespace) -> machine.Facts:
    """Wait for a quiet moment and say so when there is none."""
    found = machine.wait_for_quiet(min(args.wait, 2.0) if args.quick else args.wait)
    if not found["quiet"]:
        seen = f"load {found['load']:.2f}, others use {found['others_cores']} cores"
        print(f"This machine is not quiet ({seen}); measuring all the same, and saying so.", file=sys.stderr)
    return found


def core_states() -> List[str]:
    """Return what cores.py sees now: whether the two cores share a cache."""
    found = cores.measure()
    return [] if found is None else [found.name]


def measure_limits(quick: bool) -> List[Dict[str, Any]]:
    """The machine's limits, measured in a fresh process."""
    command = [sys.executable, str(Path(__file__).with_name("limits.py")), "--json", *["--quick"] * quick]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: List[Dict[str, Any]] = json.loads(done.stdout)
    return found


def batch_of(collective: str, sizes: Sequence[int]) -> Batch:
    """One collective in all sizes, the same for every peer."""
    tasks = [{"kind": "collective", "collective": collective, "bytes": size} for size in sizes]
    return lambda peer: tasks


def parse() -> Tuple[argparse.Namespace, Tuple[int, ...]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    common_arguments(parser)
    parser.add_argument("--sizes", type=size_argument, nargs="+", metavar="BYTES", help="8 64K 16M … "
                        "[8 B to 256 MB]")  # fmt: skip
    parser.add_argument("--collectives", nargs="+", choices=(*COLLECTIVES, "message"),
                        default=COLLECTIVES, metavar="NAME",
                        help=f"of {', '.join(COLLECTIVES)} [all of these]; message: a round "
                        "trip between two ranks, of torch.distributed and MPI")  # fmt: skip
    parser.add_argument("--no-limits", action="store_true", help="do not measure the machine's own limits")
    args = parser.parse_args()
    return args, tuple(args.sizes or (QUICK_SIZES if args.quick else SIZES))


def main() -> int:
    args, sizes = parse()
    tools, pace = tools_of(args), pace_of(args)
    peers, left_out = choose(args.peers, tools)
    for name, reason in left_out.items():
        print(f"without {name}: {reason}", file=sys.stderr)
    data: Dict[str, Any] = {"quiet": quiet(args), "machine": machine.facts(), "pace": asdict(pace)}
    data["left_out"], data["cores"] = left_out, core_states()
    data["limits"] = [] if args.no_limits else measure_limits(args.quick)
    collected = Collected()
    batches = [batch_of(collective, sizes) for collective in args.collectives]
    try:
        for np in args.np:
            round_robin(peers, tools, np, batches, pace, collected)
    finally:  # also what was measured until Ctrl-C
        data["cores"] += core_states()
        data["collected"] = collected.raw()
        text = report.write_comparison(data, args.output)
    print(text)
    return collected.exit_code()


if __name__ == "__main__":
    sys.exit(main())
