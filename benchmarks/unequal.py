"""Three ranks of unequal speed: the fast one alone, and all three with equal and with balanced batches.

    sudo python benchmarks/unequal.py --output DIR            runs each in turns, and writes unequal.json
    python benchmarks/unequal.py --draw FILE                  draws docs/unequal.svg from such a file

Speeds are made by CPU quotas (the cpu controller of cgroups), so ranks really compute, slowly: nothing sleeps
in place of work. Two idle cores are enough: 0.9, 0.3 and 0.3 of one. With --weight the ranks get their quotas
on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "unequal.svg"

QUOTAS = [0.9, 0.3, 0.3]
PERIOD_US = 10000  # short, so that a quota is a speed and not a rhythm
KINDS = ("fast one alone", "equal batches", "balanced batches")

PROGRAM = """
import json, os, sys, time
for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):
    group = f"{root}/{sys.argv[1]}-{os.environ['RANK']}"
    if os.path.isdir(group):
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        break
import numpy as np
import ringcomm as rc

rc.init()
kind, steps, layer = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
speeds = "measure" if kind == "balanced" else [1] * rc.size()
weights = np.random.default_rng(0).standard_normal((layer, layer)).astype(np.float32)
images = np.random.default_rng(1).standard_normal((4096, layer)).astype(np.float32)
data = rc.balanced(len(images), global_batch=96, speeds=speeds)
times, computed, began_s, done = [], [], time.perf_counter(), 0
while done < steps:
    for mine in data:
        part_s = time.perf_counter()
        gradient = np.zeros_like(weights)
        for row in images[mine]:
            for _ in range(400):
                row = np.tanh(weights @ row)
            gradient += np.outer(row, row)
        computed.append(time.perf_counter() - part_s)
        rc.allreduce_(gradient, weight=len(mine))
        times.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        done += 1
        if done == steps:
            break
rows = rc.allgather_object([rc.rank(), times, computed, list(data.shares)])
if rc.rank() == 0:
    print("RESULT " + json.dumps(rows), flush=True)
"""


class Groups:
    """A control group with a CPU quota for each rank; removed at the end."""

    def __init__(self, quotas: Sequence[float], weight: int = 0) -> None:
        self.name = f"ringcomm-unequal-{os.getpid()}"
        first = Path("/sys/fs/cgroup/cpu")
        self._version = 1 if first.is_dir() else 2
        root = first if self._version == 1 else Path("/sys/fs/cgroup")
        self._paths = [root / f"{self.name}-{rank}" for rank in range(len(quotas))]
        for path, quota in zip(self._paths, quotas):
            path.mkdir()
            self.limit(path, quota)
            if weight:
                (path / ("cpu.shares" if self._version == 1 else "cpu.weight")).write_text(str(weight))

    def limit(self, path: Path, quota: float) -> None:
        """Give a group this part of a core."""
        if self._version == 1:
            (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (path / "cpu.cfs_quota_us").write_text(str(int(quota * PERIOD_US)))
        else:
            (path / "cpu.max").write_text(f"{int(quota * PERIOD_US)} {PERIOD_US}")

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *exception: Any) -> None:
        for path in self._paths:
            path.rmdir()


def run(group: str, kind: str, ranks: int, steps: int, layer: int) -> List[Any]:
    """One job; by rank: times of the steps, of computing, and the shares at the end."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        job = [sys.executable, "-m", "ringrun", "-np", str(ranks), "--threads", "1"]
        command = [*job, str(program), group, kind, str(steps), str(layer)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    found = re.search(r"RESULT (.*)", done.stdout)
    if found is None:
        raise SystemExit(f"the job has failed:\n{done.stdout}{done.stderr}")
    print(f"  {kind}: " + (" ".join(re.findall(r"ringrun: (.*(?:->|waited).*)", done.stderr)) or "no line"))
    rows: List[Any] = json.loads(found.group(1))
    return rows


def measure(rounds: int, steps: int, layer: int, weight: int) -> Dict[str, Any]:
    """The median step of each kind, in turns, and what became of shares."""
    settled: Dict[str, List[float]] = {kind: [] for kind in KINDS}
    curves: Dict[str, List[float]] = {}
    last: List[Any] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}")
        for kind, ranks, speeds in zip(KINDS, (1, 3, 3), ("equal", "equal", "balanced")):
            with Groups(QUOTAS, weight) as groups:
                rows = run(groups.name, speeds, ranks, steps, layer)
            settled[kind].append(statistics.median(rows[0][1][steps // 2 :]))
            curves[kind] = rows[0][1]
            last = rows
    medians = {kind: statistics.median(values) for kind, values in settled.items()}
    computed = [statistics.median(row[2][steps // 2 :]) for row in last]
    return {
        "quotas": QUOTAS, "steps": steps, "rounds": rounds, "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "step_s": settled, "median_s": medians, "curves": curves,
        "shares": last[0][3], "spread": (max(computed) - min(computed)) / max(computed),
        "against_alone": medians[KINDS[0]] / medians[KINDS[2]],
        "against_equal": medians[KINDS[1]] / medians[KINDS[2]],
    }  # fmt: skip


def bars(result: Dict[str, Any]) -> Iterator[str]:
    """The picture, line by line."""
    longest = max(result["median_s"].values())
    colours = ("#9aa5b1", "#edae49", "#d1495b")
    space = "http://www.w3.org/2000/svg"
    yield f'<svg xmlns="{space}" width="640" height="190" font-family="sans-serif" font-size="14">'
    yield '<rect width="640" height="190" fill="white"/>'
    quotas = ", ".join(f"{quota:g}" for quota in result["quotas"])
    yield f'<text x="12" y="26">Seconds per step of 96 samples; three ranks with {quotas} of a core</text>'
    for place, (kind, colour) in enumerate(zip(KINDS, colours)):
        seconds, top = result["median_s"][kind], 46 + 44 * place
        width = 380 * seconds / longest
        yield f'<text x="12" y="{top + 20}">{kind}</text>'
        yield f'<rect x="150" y="{top}" width="{width:.1f}" height="30" fill="{colour}"/>'
        yield f'<text x="{158 + width:.1f}" y="{top + 20}">{seconds:.3g} s</text>'
    yield "</svg>"


def main() -> None:
    """Measure, or draw."""
    parser = argparse.ArgumentParser(description="Three ranks of unequal speed.")
    parser.add_argument("--output", type=Path, help="directory for unequal.json")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw docs/unequal.svg from this file")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind is run [3]")
    parser.add_argument("--steps", type=int, default=80, help="steps per run [80]")
    parser.add_argument("--layer", type=int, default=256, help="size of a layer [256]")
    parser.add_argument("--weight", type=int, default=0, help="of the ranks against other processes")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.draw is not None:
        PICTURE.write_text("\n".join(bars(json.loads(args.draw.read_text()))) + "\n")
        print(f"{PICTURE} has been written")
        return
    if args.output is None:
        parser.error("--output or --draw is needed")
    rounds, steps = (1, 40) if args.quick else (args.rounds, args.steps)
    result = measure(rounds, steps, args.layer, args.weight)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "unequal.json").write_text(json.dumps(result, indent=1) + "\n")
    for kind, seconds in result["median_s"].items():
        print(f"{kind:<18} {seconds:.4f} s per step")
    alone, equal = result["against_alone"], result["against_equal"]
    print(f"balanced: {alone:.2f} times the fast one alone, {equal:.2f} times equal batches; compute times "
          f"differ by {100 * result['spread']:.0f} %")  # fmt: skip


if __name__ == "__main__":
    main()
