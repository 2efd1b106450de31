"""How well copies to and from a device overlap with the network in an all-reduce of 64 MB.

    python benchmarks/device_overlap.py          on a virtual clock, for several rates of copies and network
    python benchmarks/device_overlap.py --cuda   CUDA tensors of two ranks of this process, over sockets

Prints the time of the all-reduce, and its ratio to the slowest of its three parts alone: copying out, the
network, copying back. On the virtual clock the executor, the schedule and the pieces are the real ones and
the processor takes no time, so the numbers are the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable, List

import numpy as np

from ringcomm.config import Settings
from ringcomm.context import Context
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from ringcomm.testing.device_simulation import Rates, simulate_all_reduce

NBYTES = 64 << 20
NETWORK = 1e9
SETTINGS = Settings(spin_us=0.0, timeout_s=120.0)


def simulated() -> None:
    """Print a table for rates of copies against a network of 1 GB/s."""
    print("ranks  algorithm  copies GB/s  all-reduce ms  against the slowest")
    for size in (2, 4):
        network_s = 2 * (size - 1) / size * NBYTES / NETWORK
        for algorithm in ("direct", "ring", "pipelined"):
            for factor in (50.0, 11.5, 5.0, 3.0, 2.0, 1.5, 1.0):
                arrays = [np.ones(NBYTES // 4, np.float32) for _ in range(size)]
                rates = Rates(factor * NETWORK, factor * NETWORK, NETWORK)
                taken_s = simulate_all_reduce(rates, arrays, algorithm)
                ratio = taken_s / max(network_s, NBYTES / rates.copy_out)
                print(f"{size:5}  {algorithm:9}  {factor:11.1f}  {1e3 * taken_s:13.1f}  {ratio:.2f}")


def timed(context: Context, array: Any, wait: Callable[[], Any], times: int = 9) -> float:
    """Seconds for an all-reduce, the result on the device included; the median, after one to warm up."""
    taken: List[float] = []
    for _ in range(times + 1):
        context.barrier()
        began_s = time.perf_counter()
        context.allreduce_(array, op=Sum)
        wait()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:])


def on_cuda() -> None:
    """The same with CUDA tensors between two ranks of this process, which share its interpreter."""
    import torch

    values = torch.ones(NBYTES // 4, device="cuda")
    parts = {}
    for label, host in (
        ("", torch.empty(NBYTES // 4, pin_memory=True)),
        (" (pageable)", torch.empty(NBYTES // 4)),
    ):
        for name, target, source in (("copy out", host, values), ("copy in", values, host)):
            target.copy_(source)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(10):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            parts[name + label] = (time.perf_counter() - began_s) / 10

    def work(context: Context) -> List[float]:
        network_s = timed(context, np.ones(NBYTES // 4, np.float32), lambda: None)
        return [network_s, timed(context, values.clone(), torch.cuda.synchronize)]

    parts["network"], together_s = map(max, zip(*run_ranks(2, work, "tcp", SETTINGS, timeout_s=600)))
    for name, part_s in parts.items():
        print(f"{name:20} {1e3 * part_s:8.1f} ms")
    slowest_s = max(parts[name] for name in ("copy out", "copy in", "network"))
    print(f"{'all-reduce':20} {1e3 * together_s:8.1f} ms, {together_s / slowest_s:.2f} of the slowest")
    print(f"on {torch.cuda.get_device_name(0)}")


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    if parser.parse_args().cuda:
        on_cuda()
    else:
        simulated()


if __name__ == "__main__":
    main()
