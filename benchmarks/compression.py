"""What compression gains on slow links: hosts made of namespaces, their links shaped to a given speed.

    python benchmarks/compression.py [--rates 1000 100] [--np 3] [--rounds 3] [--backward 1.0] [--scale 1.0]
                                     [--only allreduce steps auto overlap exposed] [--variants WORD ...]
                                     [--output DIR]

Needs root and sshd (see tests/hosts/netlab.py, which makes the hosts), and PyTorch. For every link rate
(in Mbit/s) all variants take turns in the same processes:

* an all-reduce of as many float32 as ResNet-50 has gradients (102 MB): ringcomm without and with each codec,
  and Gloo;
* a training step with ResNet-50's 161 gradients, which become ready one after the other during a backward
  pass of ``--backward`` seconds (it sleeps: the ranks here share the cores, machines do not):
  DistributedDataParallel over Gloo, without and with PyTorch's hooks for bf16 and PowerSGD, ringcomm's
  DistributedOptimizer with each compression, LocalSGD with 16 local steps (the mean of 16; streaming: in four
  fragments whose reductions run during four local steps each), and no communication at all;
* with ``--only auto``: for each ``--backward`` the same step with ``compression="auto"`` (its first steps
  are those without compression, the last ones those after the choice) beside bf16 and int8, and what the
  choice predicted for each;
* with ``--only overlap``: steps with a forward pass of ``--forward`` seconds, without and with CrossBarrier;
  here every layer's pass takes equally long;
* with ``--only exposed``: what of an exchange with int8 a step is longer by, and what its threads did.

Prints medians, and with --output writes DIR/compression.json: time per step by
link rate, one line per variant.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

from peers.compressed_steps import Step, all_reduces, choices, exposed, overlaps, training_steps  # noqa: E402

Times = Dict[str, List[float]]


def timed(step: Step, rounds: int, warm_up: int, processor: List[float]) -> List[float]:
    """Seconds of each call, from a common start; ``processor`` gets this rank's processor time of each."""
    import ringcomm as rc

    times: List[float] = []
    for number in range(-warm_up, rounds):
        rc.barrier()
        started, worked = time.perf_counter(), time.process_time()
        step()
        worked = time.process_time() - worked
        rc.barrier()
        if number >= 0:
            times.append(time.perf_counter() - started)
            processor.append(worked)
    means: List[float] = getattr(step, "means", [])
    return means[-rounds:] if means else times


def work(args: argparse.Namespace) -> None:
    """Be one rank."""
    import gc
    import warnings

    import torch
    import torch.distributed as dist

    import ringcomm as rc
    import ringcomm.torch as hvd

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rc.rank(), world_size=rc.size())
    gloo = dist.group.WORLD
    processor: Times = {}
    results: Dict[str, Times] = {"processor": processor}
    if "allreduce" in args.only:
        steps = all_reduces(args.scale, gloo)
        found: Times = {name: [] for name in steps}
        for number in range(-1, args.rounds):
            for name, step in steps.items():
                busy: List[float] = []
                seconds = timed(step, 1, 0, busy)
                if number >= 0:
                    found[name] += seconds
                    processor.setdefault(f"allreduce {name}", []).extend(busy)
        results["allreduce"] = found
        del steps
    if "steps" in args.only:
        results["steps"] = {}
        for name, make in training_steps(args.scale, args.backward[0], gloo).items():
            if args.variants and not any(word in name for word in args.variants):
                continue
            gc.collect()
            warm_up = 2 if "PowerSGD" in name else 1
            own = processor.setdefault(f"steps {name}", [])
            results["steps"][name] = timed(make(), args.rounds, warm_up, own)
    if "auto" in args.only:
        results["auto"] = [choices(args.scale, backward_s, args.rounds) for backward_s in args.backward]  # type: ignore[assignment]
    if "overlap" in args.only:
        steps_s = overlaps(args.scale, args.backward[0], args.forward, args.rounds)
        results["overlap"] = {"forward_s": args.forward, "backward_s": args.backward[0], **steps_s}  # type: ignore[dict-item]
    if "exposed" in args.only:
        parts = exposed(args.scale, args.backward[0], args.rounds)
        results["exposed"] = {"ranks": args.np, "backward_s": args.backward[0], **parts}  # type: ignore[dict-item]
    if rc.rank() == 0:
        Path(args.result).write_text(json.dumps(results))


def measure(args: argparse.Namespace) -> List[Dict[str, Any]]:
    """All link rates, one after the other."""
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    names = [f"node{number}" for number in range(1, args.np + 1)]
    found = []
    with Lab(*names, no_wlan=True, docker=False) as lab, tempfile.TemporaryDirectory() as folder:
        for rate in args.rates:
            for host in names:
                lab.shape(host, "eth", f"{rate}mbit", burst="256kb")
            store, result = Path(folder) / f"store{rate}", Path(folder) / f"result{rate}"
            worker = [
                sys.executable, __file__, "--work", "--store", str(store), "--result", str(result),
                "--rounds", str(args.rounds), "--backward", *map(str, args.backward),
                "--np", str(args.np), "--scale", str(args.scale), "--forward", str(args.forward),
                "--only", *args.only, "--variants", *args.variants,
            ]  # fmt: skip
            hosts = ["-np", str(args.np), "-H", ",".join(names)]
            launcher = [sys.executable, "-m", "ringrun", "--threads", "1", *hosts]
            environ = {**os.environ, "PATH": lab.environ()["PATH"], "PYTHONPATH": str(ROOT),
                       "GLOO_SOCKET_IFNAME": lab.iface(names[0]), "OMP_NUM_THREADS": "1"}  # fmt: skip
            command = [*launcher, "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME", *worker]
            subprocess.run(command, env=environ, check=True, timeout=args.limit)
            found.append({"mbit_per_s": rate, **json.loads(result.read_text())})
            print(table(found[-1]), flush=True)
            if args.output is not None:
                args.output.mkdir(parents=True, exist_ok=True)
                (args.output / "compression.json").write_text(json.dumps(found))
    return found


def table(row: Dict[str, Any]) -> str:
    """Medians at one link rate, and how many times faster than Gloo without a hook."""
    lines = []
    for kind, baseline in (("allreduce", "Gloo float32"), ("steps", "DDP, Gloo")):
        if kind not in row:
            continue
        medians = {name: statistics.median(times) for name, times in row[kind].items()}
        lines.append(f"{row['mbit_per_s']} Mbit/s, {kind}:")
        gloo_s = medians.get(baseline, float("nan"))
        lines += [
            f"  {name:36s} {seconds:8.3f} s   {gloo_s / seconds:5.2f} x Gloo, processor "
            f"{statistics.median(row['processor'][f'{kind} {name}']):6.3f} s"
            for name, seconds in medians.items()
        ]
    lines += [f"  {name:32s} {value:8.3f} s" for name, value in row.get("overlap", {}).items()]
    for name in ("no communication", "int8") if "exposed" in row else ():
        parts = {part: statistics.median(times) for part, times in row["exposed"][name].items()}
        lines.append(f"  {name:32s} " + ", ".join(f"{part} {value:.3f} s" for part, value in parts.items()))
    for item in row.get("auto", ()):
        lines.append(f"{row['mbit_per_s']} Mbit/s, backward {item['backward_s']:g} s: {item['chosen']}")
        lines += [
            f"  {name:32s} {statistics.median(times):8.3f} s, "
            f"predicted {item['predicted'].get(name, item['predicted'][item['chosen']]):8.3f} s"
            for name, times in item["measured"].items()
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 100], metavar="MBIT")
    parser.add_argument("--np", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backward", type=float, nargs="+", default=[1.0], metavar="S")
    parser.add_argument("--scale", type=float, default=1.0, help="share of ResNet-50's gradients")
    parser.add_argument("--forward", type=float, default=0.1, metavar="S", help="for --only overlap")
    kinds = ("allreduce", "steps", "auto", "overlap", "exposed")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds[:2])
    parser.add_argument(
        "--variants", nargs="*", default=[], metavar="WORD", help="steps with one of these in the name"
    )
    parser.add_argument("--limit", type=float, default=1800.0, metavar="S", help="per link rate")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return 0
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
