"""All-reduces of arrays on a GPU, beside copies by hand and Gloo, in turns in the same processes.

    ringrun -np 2 python benchmarks/device.py [--output DIR] [--sizes 65536 67108864]

Needs PyTorch and one CUDA device, which all ranks share (NCCL refuses that); CuPy is measured where it is
installed. Measured, from the call until the device has the result:

* ``ringcomm``, ``CuPy``: ``rc.allreduce_`` of a CUDA tensor, of a CuPy array;
* ``by hand``: a copy to page-locked memory, ``rc.allreduce_`` of that, and a copy back;
* ``Gloo``: ``torch.distributed.all_reduce`` of a CUDA tensor;
* ``host``: ``rc.allreduce_`` of an array of NumPy, without any copy;
* ``copies``: only the copy to page-locked memory and back.

With --output the medians are added to DIR/device.json, under the device and the transport.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np

import ringcomm as rc

SIZES = [1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]
ROUNDS = 11
Work = Callable[[], Any]


def gloo_group() -> Any:
    """A process group of Gloo with the same ranks."""
    import torch.distributed as dist

    store = rc.broadcast_object(tempfile.mktemp(prefix="ringcomm-gloo-") if rc.rank() == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rc.rank(), world_size=rc.size())
    return dist


def ways(nbytes: int, dist: Any) -> Dict[str, Work]:
    """Return what is measured with arrays of so many bytes.

    They are zeros, so that sums stay what they are.
    """
    import torch

    values = torch.zeros(nbytes // 4, device="cuda")
    locked = torch.zeros(nbytes // 4, pin_memory=True)
    array = np.zeros(nbytes // 4, np.float32)

    def then_wait(work: Work) -> Work:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    def out_and_back(between: Work) -> Work:
        def run() -> None:
            locked.copy_(values, non_blocking=True)
            torch.cuda.synchronize()
            between()
            values.copy_(locked, non_blocking=True)

        return run

    found = {
        "ringcomm": lambda: rc.allreduce_(values, op=rc.Sum),
        "by hand": out_and_back(lambda: rc.allreduce_(locked.numpy(), op=rc.Sum)),
        "Gloo": lambda: dist.all_reduce(values),
        "host": lambda: rc.allreduce_(array, op=rc.Sum),
        "copies": out_and_back(lambda: None),
    }
    try:
        import cupy
    except ImportError:
        pass
    else:
        other = cupy.zeros(nbytes // 4, cupy.float32)
        found["CuPy"] = lambda: rc.allreduce_(other, op=rc.Sum)
    return {name: then_wait(work) for name, work in found.items()}


def medians_s(chosen: Dict[str, Work]) -> Dict[str, float]:
    """Seconds of each, in turns; of the rank that was slowest in the median."""
    taken: Dict[str, List[float]] = {name: [] for name in chosen}
    for number in range(-2, ROUNDS):
        for name, work in chosen.items():
            rc.barrier()
            began_s = time.perf_counter()
            work()
            if number >= 0:
                taken[name].append(time.perf_counter() - began_s)
    own = np.array([statistics.median(times) for times in taken.values()])
    return dict(zip(taken, rc.allreduce(own, op=rc.Max).tolist()))


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="the folder of device.json")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments = parser.parse_args()
    import torch

    rc.init()
    if rc.size() == 1:
        parser.error("start it with two ranks: ringrun -np 2 python benchmarks/device.py")
    torch.cuda.set_device(rc.local_rank() % torch.cuda.device_count())
    dist = gloo_group()
    found: Dict[str, Dict[str, float]] = {}
    for nbytes in arguments.sizes:
        times = found[str(nbytes)] = medians_s(ways(nbytes, dist))
        if rc.rank() == 0:
            cells = "  ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in times.items())
            print(f"{nbytes:>10} bytes, ms:  {cells}", flush=True)
    if rc.rank() == 0 and arguments.output is not None:
        path = arguments.output / "device.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        versions = {"torch": torch.__version__, "ranks": rc.size(), "seconds": found}
        name = f"{torch.cuda.get_device_name()}, {os.environ.get('RINGCOMM_TRANSPORT') or 'auto'}"
        path.write_text(json.dumps({**known, name: versions}, indent=1) + "\n")
    dist.destroy_process_group()
    rc.shutdown()


if __name__ == "__main__":
    main()
