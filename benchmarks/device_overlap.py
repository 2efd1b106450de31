"""How well copies to and from a device overlap with the network in an all-reduce of 64 MB.

    python benchmarks/device_overlap.py                            on a virtual clock, for several rates
    ringrun -np 2 python benchmarks/device_overlap.py --cuda       CUDA tensors of two ranks on one GPU
    ringrun -np 2 python benchmarks/device_overlap.py --cuda --output results   the same, as a file, too

Prints the time of the all-reduce, and its ratio to the slowest of its three parts alone: copying out, the
network, copying back. On the virtual clock the executor, the schedule and the pieces are the real ones and
the processor takes no time, so the numbers are the same on every machine.

On a GPU all ranks do each part at the same time, as they share its bus in the all-reduce. The exit code is 1
if the slowest part is less than 85 % of the whole time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np

import ringcomm as rc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.device_simulation import Rates, simulate_all_reduce  # noqa: E402

NBYTES = 64 << 20
NETWORK = 1e9
MIN_SHARE = 0.85


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


def together_s(work: Callable[[], Any], times: int = 9) -> float:
    """Seconds that the slowest rank takes for a piece of work that all begin at once: the median of some.

    Args:
        work: waits until it is done, on the device, too. The first run, to warm up, does not count.
    """
    taken: List[float] = []
    for _ in range(times + 1):
        rc.barrier()
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return float(rc.allreduce(np.array(statistics.median(taken[1:])), op=rc.Max))


def on_cuda() -> Dict[str, Any]:
    """The same with CUDA tensors; call it on every rank of a job."""
    import torch

    rc.init()
    torch.cuda.set_device(rc.local_rank() % torch.cuda.device_count())
    values = torch.ones(NBYTES // 4, device="cuda")
    array = np.ones(NBYTES // 4, np.float32)
    pinned, pageable = torch.empty(NBYTES // 4, pin_memory=True), torch.empty(NBYTES // 4)

    def copied(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def reduced() -> None:
        rc.allreduce_(values, op=rc.Sum)
        torch.cuda.synchronize()

    values.zero_()  # so that sums of sums stay what they are
    array.fill(0.0)
    parts_s = {
        "copy out": together_s(lambda: copied(pinned, values)),
        "copy in": together_s(lambda: copied(values, pinned)),
        "network": together_s(lambda: rc.allreduce_(array, op=rc.Sum)),
    }
    pageable_s = {
        "copy out, pageable": together_s(lambda: copied(pageable, values)),
        "copy in, pageable": together_s(lambda: copied(values, pageable)),
    }
    whole_s = together_s(reduced)
    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "ranks": rc.size(),
        "torch": torch.__version__,
        "algorithm": rc.api.context().settings.algorithm or "chosen",
        "nbytes": NBYTES,
        "parts_s": parts_s,
        "pageable_s": pageable_s,
        "all_reduce_s": whole_s,
        "share": max(parts_s.values()) / whole_s,
    }


def report(found: Dict[str, Any], output: str) -> bool:
    """Print the measurement, and write it to a folder if one is given; whether the overlap is good enough."""
    for name, part_s in {**found["parts_s"], **found["pageable_s"]}.items():
        print(f"{name:20} {1e3 * part_s:8.1f} ms")
    share = found["share"]
    print(f"{'all-reduce':20} {1e3 * found['all_reduce_s']:8.1f} ms ({found['algorithm']})")
    print(f"the slowest part is {share:.0%} of it (at least {MIN_SHARE:.0%} wanted), on {found['device']}")
    if output:
        name = re.sub(r"[^a-z0-9]+", "-", f"{found['device']} {found['algorithm']}".lower())
        path = Path(output) / f"device-{name}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {path}")
    return bool(share >= MIN_SHARE)


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="on a GPU, under ringrun")
    parser.add_argument("--output", default="", help="a folder for the measurement on a GPU")
    arguments = parser.parse_args()
    if not arguments.cuda:
        simulated()
        return
    found = on_cuda()
    if found["ranks"] == 1:
        sys.exit("start it with two ranks: ringrun -np 2 python benchmarks/device_overlap.py --cuda")
    good = report(found, arguments.output) if rc.rank() == 0 else True
    rc.shutdown()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
