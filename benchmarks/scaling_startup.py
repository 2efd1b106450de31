"""What a job's start costs as a function of the number of ranks: measured on one machine, counted beyond.

    python benchmarks/scaling_startup.py [--ranks 2 4 8 16 32 64] [--counted 64 256 1000] [--output FILE]

Measured, with all ranks on this machine: seconds in ``init()``, resident memory (a rank's own, and what it
shares with other ranks), open descriptors and threads of each rank. Counted, without processes: the
rendezvous' state machine is fed with the messages of so many ranks (4 per host), and what it sends is
encoded: messages, bytes and processor time of that one process, and the most that one rank passes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(ROOT / "launcher")):
    if _place not in sys.path:
        sys.path.insert(0, _place)
RESULTS = ROOT / "benchmarks" / "results" / "scaling" / "startup.json"
SLOTS = 4

PROGRAM = """
import os, resource, threading, time
began = time.perf_counter()
import numpy, ringcomm as rc
imported = time.perf_counter()
rc.init()
ready = time.perf_counter()
status = open("/proc/self/status").read()
memory = [int(status.split(name + ":")[1].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")]
row = [ready - imported, *memory, len(os.listdir("/proc/self/fd")), threading.active_count()]
rows = rc.allgather_object(row)
if rc.rank() == 0:
    import json
    print("RESULT " + json.dumps(rows), flush=True)
rc.shutdown()
"""


def measured(ranks: int) -> Dict[str, Any]:
    """One job on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "start.py"
        program.write_text(PROGRAM)
        job = [sys.executable, "-m", "ringrun", "-np", str(ranks), "--oversubscribe", "--threads", "1"]
        job += ["--start-timeout", "300", str(program)]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
        started_s = time.monotonic()
        done = subprocess.run(job, env=environ, capture_output=True, text=True, timeout=400, cwd=folder)
        whole_s = time.monotonic() - started_s
    found = re.search(r"RESULT (.*)", done.stdout)
    if found is None:
        raise SystemExit(f"the job has failed:\n{done.stdout}{done.stderr}")
    columns = list(zip(*json.loads(found.group(1))))
    return {
        "ranks": ranks, "job_s": round(whole_s, 2), "init_s": round(max(columns[0]), 3),
        "own_mb": round(max(columns[1]) / 1e6, 1), "shared_mb": round(max(columns[2]) / 1e6, 1),
        "descriptors": max(columns[3]), "threads": max(columns[4]), "load": os.getloadavg()[0],
    }  # fmt: skip


def counted(ranks: int) -> Dict[str, Any]:
    """Return what the rendezvous of so many ranks receives and sends, and what ranks pass on."""
    from tests.unit.rendezvous.large import started

    job = started(*[SLOTS] * (ranks // SLOTS))
    received, sent = sum(job.received.values()), sum(job.sent.values())
    return {
        "ranks": len(job.seats), "messages": job.messages, "received_mb": round(received / 1e6, 2),
        "sent_mb": round(sent / 1e6, 2), "sent_by_type": dict(job.sent),
        "received_by_type": dict(job.received),
        "passed_on_mb": round(max(job.passed_on.values(), default=0) / 1e6, 2),
        "processor_s": round(job.rendezvous_s, 3), "rank_processor_s": round(max(job.rank_s.values()), 3),
        "links_per_rank": 3 * (len(job.seats) - 1),
    }  # fmt: skip


def main() -> None:
    """Measure, count, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--counted", type=int, nargs="*", default=[64, 256, 1000])
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    results: Dict[str, List[Dict[str, Any]]] = {"measured": [], "counted": []}
    if args.output.exists():
        results.update(json.loads(args.output.read_text()))
    kinds: Tuple[Tuple[str, List[int], Any], ...] = (
        ("counted", args.counted, counted), ("measured", args.ranks, measured),
    )  # fmt: skip
    for kind, numbers, work in kinds:
        for ranks in numbers:
            row = work(ranks)
            others = [item for item in results[kind] if item["ranks"] != ranks]
            results[kind] = sorted([*others, row], key=lambda item: item["ranks"])
            print(kind, json.dumps(row), flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
