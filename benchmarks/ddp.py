"""PyTorch over ringcomm beside Gloo, in the same processes at the same time.

    ringrun -np 2 benchmarks/ddp.py [--rounds 15] [--output FILE] [--quick] [--device cuda]

Three backends take turns, so whatever else the machine does hits all of them alike: ringcomm over TCP,
ringcomm as it comes (on one host it reads the other rank's memory) and Gloo. Measured are

* steps of DistributedDataParallel, three in a row, on a model with ResNet-50's 161 parameters (102 MB of
  gradients that are there already, so this is what communication costs),
* steps of ringcomm.torch's DistributedOptimizer on the same model, beside DistributedDataParallel over Gloo,
* collectives on 8 bytes.

Rank 0 prints medians, and the median of the ratios to Gloo's time in the same round; the larger the better.
With --output they are written. With --device cuda everything lies on a GPU, which all ranks share.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[1]
for place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if place not in sys.path:
        sys.path.insert(0, place)

import machine  # noqa: E402
from cells import duration, median, ratio  # noqa: E402
from peers.steps import ddp_step, optimizer_step, torch_gradients  # noqa: E402

STEPS = 3
"""Steps that follow each other, as in training; the first finds nothing of its own in the cache."""
WARM_UP = 2
"""Rounds before the first that counts. (After one step DistributedDataParallel rebuilds its buckets.)"""
Step = Callable[[], Any]


def groups() -> Dict[str, Any]:
    """A process group of each backend, for the same ranks."""
    import torch.distributed as dist

    os.environ["RINGCOMM_TRANSPORT"] = "tcp"
    found = {"ringcomm-tcp": dist.new_group(backend="ringcomm")}
    os.environ["RINGCOMM_TRANSPORT"] = "auto"
    found["ringcomm"] = dist.new_group(backend="ringcomm")
    found["gloo"] = dist.new_group(backend="gloo")
    return found


def measure_optimizer(
    group: Any, rounds: int, scale: float, device: str
) -> Dict[str, Dict[str, List[float]]]:
    """DistributedOptimizer over TCP and as it comes, each in turns with DDP over Gloo."""
    import ringcomm.torch as hvd

    gloo = ddp_step(torch_gradients(scale, device), group)
    found = {}
    for name, transport in (("ringcomm-tcp", "tcp"), ("ringcomm", "auto")):
        os.environ["RINGCOMM_TRANSPORT"] = transport
        hvd.init()
        steps = {name: optimizer_step(torch_gradients(scale, device)), "gloo": gloo}
        found[f"DistributedOptimizer ({transport}) beside DDP"] = measure(steps, rounds, STEPS)
        hvd.shutdown()
    return found


def small_calls(group: Any, device: str) -> Dict[str, Step]:
    """Collectives on 8 bytes."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    two, many = torch.ones(2, device=device), torch.ones(2 * size, device=device)
    return {
        "all_reduce 8 B": lambda: dist.all_reduce(two, group=group),
        "broadcast 8 B": lambda: dist.broadcast(two, 0, group=group),
        "all_gather 8 B": lambda: dist.all_gather_into_tensor(many, two, group=group),
        "async all_reduce 8 B": lambda: dist.all_reduce(two, group=group, async_op=True).wait(),
        "barrier": lambda: dist.barrier(group=group),
    }


def measure(steps: Dict[str, Step], rounds: int, calls: int) -> Dict[str, List[float]]:
    """Seconds per call of each backend, round by round, all backends in every round.

    Args:
        calls: how many follow each other before it is another backend's turn.
    """
    import torch
    import torch.distributed as dist

    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    times: Dict[str, List[float]] = {name: [] for name in steps}
    for number in range(-WARM_UP, rounds):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(calls):
                step()
            wait()
            if number >= 0:
                times[name].append((time.perf_counter() - started) / calls)
    return times


def work(rounds: int, quick: bool, device: str) -> Dict[str, Dict[str, List[float]]]:
    """Seconds of each round, by what was measured and by backend."""
    found = groups()
    scale = 0.1 if quick else 1.0
    results = {}
    steps = {name: ddp_step(torch_gradients(scale, device), group) for name, group in found.items()}
    results["DDP step, 161 parameters"] = measure(steps, rounds, STEPS)
    del steps
    gc.collect()  # models and reducers refer to each other; 600 MB more make everything slower
    results.update(measure_optimizer(found["gloo"], rounds, scale, device))
    by_group = {name: small_calls(group, device) for name, group in found.items()}
    for what in by_group["gloo"]:
        calls = {name: small[what] for name, small in by_group.items()}
        results[what] = measure(calls, rounds, 20 if quick else 200)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often everything is measured [15]")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the gradients [cpu]")
    args = parser.parse_args()
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = work(2 if args.quick else args.rounds, args.quick, args.device)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        return
    for what, times in results.items():
        shown = [f"{name} {duration(median(times[name]))}" for name in times]
        own = [name for name in times if name != "gloo"]
        ratios = [f"Gloo / {name} {ratio(times['gloo'], times[name]):.2f}" for name in own]
        print(f"{what}: {', '.join([*shown, *ratios])}")
    if args.output is not None:
        facts = {"machine": machine.facts(), "np": size, "seconds": results}
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
