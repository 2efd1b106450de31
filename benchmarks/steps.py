"""Training steps over slow links beside PyTorch's DDP over Gloo: three hosts of namespaces, shaped links.

    sudo python benchmarks/steps.py [--rates 1000 100] [--rounds 3] [--output FILE]

A step has ResNet-50's gradients, each ready in its turn. The computation sleeps, because the ranks share the
cores of one machine, and machines do not. Prints medians; ``--output`` writes the rounds. Within one host:
ddp.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

from peers.steps import ddp_step, optimizer_step, still, torch_gradients  # noqa: E402

LOCAL_STEPS = 16
HOSTS = ("node1", "node2", "node3")
Step = Callable[[], Any]


def variants(scale: float, backward_s: float) -> Dict[str, Callable[[], Step]]:
    """What makes the steps to compare; each is made when it is its turn, to save memory."""
    import torch

    import ringcomm.torch as hvd

    def model() -> Any:
        return torch_gradients(scale, backward_s=backward_s)

    def local() -> Step:
        network, factor = model(), torch.ones(())
        optimizer = still(network.parameters())
        hvd.LocalSGD(network, optimizer, LOCAL_STEPS, compression="int8", max_drift=math.inf).__enter__()

        def step() -> None:
            for _ in range(LOCAL_STEPS):
                network(factor).backward()
                optimizer.step()

        return step

    return {
        "DDP, Gloo": lambda: ddp_step(model()),
        "ringcomm float32": lambda: optimizer_step(model(), compression="none"),
        "ringcomm int8": lambda: optimizer_step(model(), compression="int8"),
        f"ringcomm LocalSGD {LOCAL_STEPS}, int8": local,
    }


def work(args: argparse.Namespace) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import ringcomm as rc
    import ringcomm.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rc.rank(), world_size=rc.size())
    results: Dict[str, List[float]] = {}
    for name, make in variants(args.scale, args.backward).items():
        gc.collect()
        step, count = make(), LOCAL_STEPS if "LocalSGD" in name else 1
        for number in range(-1, args.rounds):
            rc.barrier()
            started = time.perf_counter()
            step()
            rc.barrier()
            if number >= 0:
                results.setdefault(name, []).append((time.perf_counter() - started) / count)
    if rc.rank() == 0:
        Path(args.result).write_text(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 100], metavar="MBIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backward", type=float, default=0.2, metavar="S")
    parser.add_argument("--scale", type=float, default=1.0, help="part of ResNet-50's gradients")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    found = []
    with Lab(*HOSTS, no_wlan=True, docker=False) as lab, tempfile.TemporaryDirectory() as folder:
        for rate in args.rates:
            for host in HOSTS:
                lab.shape(host, "eth", f"{rate}mbit", burst="256kb")
            store, result = Path(folder) / f"store{rate}", Path(folder) / f"result{rate}"
            command = [
                sys.executable, "-m", "ringrun", "--threads", "1", "-np", str(len(HOSTS)),
                "-H", ",".join(HOSTS), "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME",
                sys.executable, __file__, "--work", "--store", str(store), "--result", str(result),
                "--rounds", str(args.rounds), "--backward", str(args.backward), "--scale", str(args.scale),
            ]  # fmt: skip
            environ = {
                **os.environ, "PATH": lab.environ()["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}",
                "GLOO_SOCKET_IFNAME": lab.iface(HOSTS[0]), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            subprocess.run(command, env=environ, check=True, timeout=3600)
            found.append({"mbit_per_s": rate, "steps": json.loads(result.read_text())})
            for name, times in found[-1]["steps"].items():
                print(f"{rate} Mbit/s, {name}: {statistics.median(times):.3f} s", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
