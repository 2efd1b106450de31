"""How far it scales: the same code as ring and as parameter server, predicted first and then measured.

    sudo python benchmarks/scaling.py [--output DIR] [--rates 100 1000]
                                      [--stages calibrate predict measure …]

Needs root and sshd (see tests/hosts/netlab.py, which makes the hosts). In network namespaces whose links are
shaped:

* ``calibrate``: all-reduces of two sizes by 2, 3 and 4 ranks give the model's parameters
  (``calibration.json``);
* ``predict``: with those alone, all steps of the study are predicted (``predictions.json``);
* ``measure``: the steps are run with up to 16 ranks, some on 4 hosts with 4 ranks each
  (``measured.json``);
* ``draw``: errors of the predictions, and the pictures of docs/scaling.md, from these files.

A step is a computation that sleeps and a list of gradients that is reduced: as ring, through one parameter
server, through servers on half of the workers' hosts, and through servers on further hosts. At 100 Mbit/s
each gradient has a tenth of its length (VGG-16: a twentieth), so that a step takes as long as with whole
gradients at 1 Gbit/s (2 Gbit/s). Bytes are those that the kernel counts on each host's interface.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

from peers import scaling_plan  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "scaling"
STAGES = ("calibrate", "predict", "measure", "draw")
LIMIT_S = 1500.0

Task = Dict[str, Any]


def run_job(lab: Any, hosts: Sequence[str], slots: int, tasks: Sequence[Task]) -> List[Task]:
    """One job on these hosts; the records of its tasks."""
    with tempfile.TemporaryDirectory(prefix="ringscale-") as folder:
        plan, output = Path(folder) / "plan.json", Path(folder) / "output.json"
        plan.write_text(json.dumps({"iface": lab.iface(hosts[0]), "tasks": list(tasks)}))
        worker = [str(ROOT / "benchmarks" / "peers" / "scaling_rank.py"), str(plan), str(output)]
        size = len(hosts) * slots
        listed = ",".join(f"{host}:{slots}" for host in hosts)
        environ = {**os.environ, "PATH": lab.environ()["PATH"], "PYTHONPATH": str(ROOT),
                   "GLOO_SOCKET_IFNAME": lab.iface(hosts[0]), "OMP_NUM_THREADS": "1"}  # fmt: skip
        launcher = [sys.executable, "-m", "ringrun", "--threads", "1", "-np", str(size), "-H", listed]
        command = [*launcher, "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME", *worker]
        done = subprocess.run(command, env=environ, timeout=LIMIT_S, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the job has failed:\n{done.stdout}{done.stderr}")
        found: List[Task] = json.loads(output.read_text())
        return found


def run_all(tasks: Sequence[Task], output: Path) -> None:
    """Run tasks, grouped into jobs; results are written after each job."""
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    jobs: Dict[Any, List[Task]] = {}
    for task in tasks:
        job = (task["mbit"], task["hosts"], task["slots"], task["method"] == "gloo")
        jobs.setdefault(job, []).append(task)
    names = [f"node{number}" for number in range(1, 1 + max(task["hosts"] for task in tasks))]
    found: List[Task] = json.loads(output.read_text()) if output.exists() else []
    done = {scaling_plan.key_of(task) for task in found}
    with Lab(*names, no_wlan=True, docker=False) as lab:
        for (mbit, hosts, slots, _), members in jobs.items():
            members = [task for task in members if scaling_plan.key_of(task) not in done]
            if not members:
                continue
            for host in names[:hosts]:
                lab.shape(host, "eth", f"{mbit}mbit", burst="256kb")
            started = time.monotonic()
            found += run_job(lab, names[:hosts], slots, members)
            output.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")
            took_s, load = time.monotonic() - started, os.getloadavg()[0]
            print(f"{mbit} Mbit/s, {hosts} hosts x {slots}: {len(members)} tasks in {took_s:.0f} s, "
                  f"load {load:.1f}", flush=True)  # fmt: skip


def main() -> int:
    """Run the stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 1000], metavar="MBIT")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--ranks", type=int, nargs="+", help="only these numbers of workers")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if "calibrate" in args.stages:
        run_all(scaling_plan.calibration_tasks(args.rates), args.output / "calibration.json")
    study = [
        task
        for task in scaling_plan.study_tasks(args.rates)
        if not args.ranks or task["workers"] in args.ranks
    ]
    if "predict" in args.stages:
        scaling_plan.predict(study, args.output)
    if "measure" in args.stages:
        run_all(study, args.output / "measured.json")
    if "draw" in args.stages:
        from peers import scaling_figures

        scaling_figures.draw(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
