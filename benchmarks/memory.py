"""How much memory a rank needs beside the arrays of its program.

    python benchmarks/memory.py [--ranks 2 8 64] [--output results]

Every rank of a job on this machine notes its memory after importing NumPy, after ``init()``, and after
reductions of an array of 16 MiB, and the memory of the agent that has started it. Connections go over TCP, as
between boards of one rank each; with ``--transport auto`` ranks share memory. Prints means of all ranks,
without the array, and writes memory.json. RSS counts what processes of one host share for each of them, PSS
divides it among them; the RSS after reductions is the highest until then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]

from benchmarks.machine import facts  # noqa: E402

ITEMS = 4 * 1024 * 1024
PROGRAM = f"""
import os
import resource

import numpy as np

def memory(process="self"):
    with open(f"/proc/{{process}}/smaps_rollup") as file:
        found = dict(line.split(":") for line in file if line.count(":") == 1)
    return [int(found[name].split()[0]) * 1024 for name in ("Rss", "Pss")]

own = np.ones({ITEMS}, np.float32)
own @ own
begin = memory()
import ringcomm as rc
rc.init()
rc.barrier()
started = memory()
for _ in range(5):
    rc.allreduce_(own)
    rc.synchronize(rc.allreduce_async_(own, name="large"))
    rc.allreduce(own[:1000])
rc.barrier()
reduced = memory()
reduced[0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rows = rc.allgather_object([begin, started, reduced, memory(os.getppid())])
if rc.rank() == 0:
    import json
    print("ROWS", json.dumps(rows), flush=True)
rc.shutdown()
"""


def measured(ranks: int, transport: str) -> Dict[str, float]:
    """Run a job; means in MB by ``STEP_rss`` and ``STEP_pss``, of the process or what a step adds."""
    command = [sys.executable, "-m", "ringrun", "-np", str(ranks), "--transport", transport, "--quiet"]
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True, timeout=600,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    rows: List[List[List[int]]] = json.loads(done.stdout.split("ROWS ")[1].splitlines()[0])
    found: Dict[str, float] = {"ranks": ranks}
    for place, kind in enumerate(("rss", "pss")):
        begin, started, reduced, agent = (
            statistics.mean(row[step][place] for row in rows) / 1e6 for step in range(4)
        )
        steps = {
            "numpy": begin - 4 * ITEMS / 1e6, "init": started - begin, "reductions": reduced - started,
            "all": reduced - 4 * ITEMS / 1e6, "agent": agent,
        }  # fmt: skip
        found.update({f"{name}_{kind}": round(value, 1) for name, value in steps.items()})
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = [measured(ranks, options.transport) for ranks in options.ranks]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    found = {"machine": facts(), "transport": options.transport, "array_bytes": 4 * ITEMS, "rows": rows}
    name = "memory" if options.transport == "tcp" else f"memory_{options.transport}"
    (options.output / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
