"""Everything that docs/performance.md shows, measured in one go and taken into benchmarks/results.

    sudo python benchmarks/performance.py --output DIR             about an hour; nothing else may run
    python benchmarks/performance.py --output DIR --only one ddp   some of it
    python benchmarks/performance.py --take DIR                    only take what DIR has

README.md describes the peers and how to install them; links are shaped as root. Afterwards
``benchmarks/tables.py --pictures`` makes the tables and pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

from cells import RESULTS
from cores import SEPARATE, SHARED
from measure import Sample
from performance_tables import ONE_HOST

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MPI = ("openmpi", "openmpi-tcp", "mpich")
COMPARED: Dict[str, Tuple[str, ...]] = {
    "one": ("--np", "2", "--rounds", "12", "--bind", "--collectives", "allreduce", "--peers", "ringcomm",
            "ringcomm-shared", "ringcomm-shm", "ringcomm-tcp", "gloo", *MPI, "mpich-tcp", "mlx"),
    "others": ("--np", "2", "--rounds", "3", "--bind", "--no-limits", "--sizes", "8", "16K", "1M", "16M",
               "--collectives", "broadcast", "allgather", "reducescatter", "alltoall", "--peers", "ringcomm",
               "ringcomm-tcp", "gloo", *MPI),
    "four": ("--np", "4", "--rounds", "3", "--no-limits", "--collectives", "allreduce", "--sizes", "8", "16K",
             "256K", "1M", "16M", "64M", "--peers", "ringcomm", "ringcomm-tcp", "gloo", *MPI),
    "congestion": ("--np", "2", "--rounds", "5", "--bind", "--no-limits", "--collectives", "allreduce",
                   "--sizes", "64K", "1M", "16M", "64M",
                   "--peers", "ringcomm-tcp", "gloo", "ringcomm-tcp@reno", "gloo@reno"),
}  # fmt: skip
"""Runs of compare.py; the options of each."""
STEPS = ("--np", "2", "--rounds", "5", "--bind",
         "--peers", "ringcomm", "ringcomm-shared", "ringcomm-tcp", "gloo", *MPI)  # fmt: skip
"""The options of resnet.py."""
OTHERS = {"ddp": "ddp", "links": "links", "loopback": "loopback.json", "alternatives": "alternatives.json",
          "shared_arrays": "shared_arrays.json"}  # fmt: skip
"""The other benchmarks, and what each is given as its output."""


STATES = {"one": {"one": SHARED, "separate": SEPARATE}}
"""Runs of which each state of the cores is a run by itself in the results."""
STARTS = {"shared_arrays": 5}
"""Benchmarks that add a start to their results each time."""


def commands(output: Path) -> Dict[str, List[str]]:
    """Every run by name, in the order in which they are made."""
    found = {
        name: ["compare.py", *options, "--output", str(output / name)] for name, options in COMPARED.items()
    }
    found["resnet"] = ["resnet.py", *STEPS, "--output", str(output / "resnet")]
    found.update({name: [f"{name}.py", "--output", str(output / file)] for name, file in OTHERS.items()})
    found["shared_arrays"][:0] = ["-m", "ringrun", "-np", "2"]
    return found


def _rounds(samples: List[Dict[str, Any]], count: int) -> List[Optional[float]]:
    """The median of each round, in seconds; None for a round that failed, or met another state."""
    by_round = {item["round"]: Sample(**item).median_s for item in samples}
    return [by_round.get(number) for number in range(count)]


def _by_name(data: Dict[str, Any], task: str, state: str = "") -> Dict[str, Dict[str, List[Optional[float]]]]:
    """Rounds by what was measured and by peer; those in one state of the cores, if one is given."""
    grouped: Dict[str, Dict[str, List[Dict[str, Any]]]] = {}
    samples = data["collected"]["samples"]
    count = 1 + max(sample["round"] for sample in samples)
    for sample in samples:
        if state and state != sample["state"]:
            continue
        name = task.format(np=sample["np"], **sample["task"])
        grouped.setdefault(name, {}).setdefault(sample["peer"], []).append(sample)
    return {
        name: {peer: _rounds(each, count) for peer, each in peers.items()} for name, peers in grouped.items()
    }


def _peers(seconds: Dict[str, Dict[str, List[Optional[float]]]]) -> Set[str]:
    return {peer for times in seconds.values() for peer in times}


def _source(data: Dict[str, Any]) -> str:
    machine = data["machine"]
    return f"{machine['when']}, {machine['cpu']}, {machine['cores']} cores; seconds: the median of each round"


def take(directory: Path) -> List[str]:
    """Take the results of a directory into benchmarks/results, in place of those of the same runs.

    Returns:
        the names of the runs that were taken. Of ``one`` there are two: what was measured while the cores
        shared a cache, and ``separate``, while they shared none, if all peers met that state.
    """
    path = RESULTS / f"{ONE_HOST}.json"
    found: Dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    taken = []
    for name in COMPARED:
        file = directory / name / "compare.json"
        if file.exists():
            data = json.loads(file.read_text())
            for run, state in STATES.get(name, {name: ""}).items():
                seconds = _by_name(data, "{np} {collective} {bytes}", state)
                if _peers(seconds) == _peers(_by_name(data, "{np} {collective} {bytes}")):
                    found["runs"][run] = {
                        "source": _source(data), "cores": data["machine"]["cores"], "state": state,
                        "limits": data["limits"], "seconds": seconds,
                    }  # fmt: skip
                    taken.append(run)
    file = directory / "resnet" / "resnet.json"
    if file.exists():
        data = json.loads(file.read_text())
        rounds = {
            f"{peer}, {mode}": times
            for mode, peers in _by_name(data, "{mode}").items() for peer, times in peers.items()
        }  # fmt: skip
        found["resnet50"] = {"source": _source(data), "rounds": rounds}
        taken.append("resnet")
    path.write_text(json.dumps(found, indent=1) + "\n")
    return [*taken, *_take_others(directory)]


def _take_others(directory: Path) -> List[str]:
    taken = []
    for name, file in OTHERS.items():
        found = directory / file if file.endswith(".json") else directory / file / f"{name}.json"
        if not found.exists():
            continue
        taken.append(name)
        data = json.loads(found.read_text())
        data.get("machine", {}).pop("command", None)  # it has a directory of this machine
        kept = _link_rows(data) if name == "links" else data
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return taken


def _link_rows(data: Dict[str, Any]) -> Dict[str, Any]:
    """The rounds of links.py, by network and size, with the bound."""
    bounds = {(row["network"], row["bytes"]): row["bound_s"] for row in data["summary"]}
    rows = [
        {"network": network, "bytes": size, "bound_s": bounds[network, size], "seconds": peers}
        for (network, size), peers in (
            ((name.split()[0], int(name.split()[1])), peers)
            for name, peers in _by_name(data, "{network} {bytes}").items()
        )
    ]
    return {"source": _source(data), "line": data["line"], "rows": rows}


def main() -> int:
    """Run, and take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where all runs write to")
    parser.add_argument("--only", nargs="+", choices=list(commands(Path())), metavar="NAME",
                        help=f"of {', '.join(commands(Path()))} [all]")  # fmt: skip
    parser.add_argument("--take", type=Path, metavar="DIR", help="take what is there, and run nothing")
    args = parser.parse_args()
    if (args.output is None) == (args.take is None):
        parser.error("give one of --output DIR and --take DIR")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
        for name, command in commands(args.output.resolve()).items():
            for _ in range(STARTS.get(name, 1) if args.only is None or name in args.only else 0):
                print(f"== {name}: {' '.join(command)}", flush=True)
                subprocess.run([sys.executable, *command], cwd=HERE, env=environ, check=True)
    print(f"taken: {', '.join(take(args.take or args.output))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
