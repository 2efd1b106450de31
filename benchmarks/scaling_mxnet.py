"""MXNet's own parameter server beside ringcomm's ring and servers: the buckets of benchmarks/scaling.py.

    python3.11 -m venv /tmp/mxnet && /tmp/mxnet/bin/pip install mxnet==1.9.1 numpy==1.23.5
    sudo python benchmarks/scaling_mxnet.py --python /tmp/mxnet/bin/python

A job has a scheduler and servers beside the workers; servers run on the workers' hosts, one or as many as
workers. Hosts are those of benchmarks/scaling.py at 100 Mbit/s. Writes results/scaling/mxnet.json: seconds of
reducing ResNet-50's gradients (a tenth of each), without computation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

from peers import scaling_plan  # noqa: E402

MBIT, ROUNDS, LIMIT_S = 100, 3, 240.0
WORKER = ROOT / "benchmarks" / "peers" / "run_mxnet_kvstore.py"


def run_job(lab: Any, python: str, hosts: List[str], servers: int, buckets: List[int]) -> List[float]:
    """One job with a worker on every host; seconds of each round."""
    shared = {
        "PATH": os.environ["PATH"], "DMLC_PS_ROOT_URI": lab.addresses(hosts[0])[0],
        "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_SERVER": str(servers), "DMLC_NUM_WORKER": str(len(hosts)),
        "DMLC_INTERFACE": lab.iface(hosts[0]), "OMP_NUM_THREADS": "1", "HOME": "/tmp",
    }  # fmt: skip
    command = [python, str(WORKER), json.dumps({"buckets": buckets, "rounds": ROUNDS})]

    def start(host: str, role: str) -> Any:
        variables = [f"{name}={value}" for name, value in {**shared, "DMLC_ROLE": role}.items()]
        return lab.popen(host, ["env", *variables, *command], stdout=-1, stderr=-1)

    others = [start(hosts[0], "scheduler"), *(start(host, "server") for host in hosts[:servers])]
    workers = [start(host, "worker") for host in hosts]
    try:
        outputs = [worker.communicate(timeout=LIMIT_S) for worker in workers]
        found = [line for text, _ in outputs for line in text.splitlines() if line.startswith("RESULT ")]
        if not found:
            raise SystemExit(f"the job has failed:\n{outputs}")
        times: List[float] = json.loads(found[0][len("RESULT ") :])
        return times
    finally:
        for process in [*others, *workers]:
            process.kill()
            process.wait()


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="the interpreter of an environment with MXNet")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "scaling" / "mxnet.json"
    )
    args = parser.parse_args()
    from tests.hosts.netlab import Lab

    names = [f"node{number}" for number in range(1, 1 + max(args.workers))]
    found: List[Dict[str, Any]] = []
    with Lab(*names, no_wlan=True, docker=False) as lab:
        for host in names:
            lab.shape(host, "eth", f"{MBIT}mbit", burst="256kb")
        for workers in args.workers:
            for servers in sorted({1, workers}):
                buckets = [length // 4 * 4 for length in scaling_plan.buckets_for(MBIT, "resnet50")]
                times = run_job(lab, args.python, names[:workers], servers, buckets)
                row = {"mbit": MBIT, "workers": workers, "servers": servers, "bytes": sum(buckets),
                       "seconds": times, "load": os.getloadavg()[0]}  # fmt: skip
                found.append(row)
                print(json.dumps(row), flush=True)
                args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
