"""How well copies to and from a device overlap with the network: two ranks, throttled or on a real GPU.

    python benchmarks/device_overlap.py                        a fake device and a network of 0.2 GB/s
    python benchmarks/device_overlap.py --cuda                 CUDA tensors of two ranks of this process

Prints, for several rates of the copies, the time of an all-reduce of 64 MB, that of each of its three parts
alone (copying out, the network, copying back), and the ratio to the slowest of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable, List, Sequence

import numpy as np

from ringcomm.config import Settings
from ringcomm.context import Context
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from ringcomm.testing.fake_device import FakeDevice
from ringcomm.transport.base import Fabric, Link, Views

NBYTES = 64 << 20
SETTINGS = Settings(spin_us=0.0, timeout_s=120.0)
Maker = Callable[[Context], Any]


class PacedLink(Link):
    """A link that sends so many bytes per second; what is late is made up for."""

    carrier = "a throttled link"

    def __init__(self, link: Link, byte_s: float) -> None:
        self.peer = link.peer
        self._link = link
        self._byte_s = byte_s
        self._free_s = 0.0

    def send(self, views: Views) -> int:
        now_s = time.perf_counter()
        begin_s = max(self._free_s, now_s - 5e-3)
        room = int((now_s - begin_s) / self._byte_s)
        if room < 1 << 16:
            return 0
        allowed: List[memoryview] = []
        for view in views:
            allowed.append(view[:room])
            room -= allowed[-1].nbytes
        sent = self._link.send(allowed)
        self._free_s = begin_s + sent * self._byte_s
        return sent

    def recv(self, views: Views) -> int:
        return self._link.recv(views)

    def close(self) -> None:
        self._link.close()


class PacedFabric(Fabric):
    """Links of so many bytes per second each way."""

    def __init__(self, fabric: Fabric, byte_s: float) -> None:
        self.rank, self.size = fabric.rank, fabric.size
        self._fabric = fabric
        self._links = {
            peer: PacedLink(fabric.link(peer), byte_s) for peer in range(fabric.size) if peer != fabric.rank
        }

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        time.sleep(2e-4)

    def make_wakeable(self) -> None:
        self._fabric.make_wakeable()

    def wake(self) -> None:
        self._fabric.wake()

    def close(self) -> None:
        self._fabric.close()


def timed(context: Context, array: Any, wait: Callable[[], Any], times: int = 4) -> float:
    """Seconds for an all-reduce, the result on the device included; the median, after one to warm up."""
    taken: List[float] = []
    for _ in range(times + 1):
        context.barrier()
        began_s = time.perf_counter()
        context.allreduce_(array, op=Sum)
        wait()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:])


def throttled(copy_rate: float, network_rate: float) -> float:
    """The slower rank's seconds with these rates, in bytes per second; a copy rate of 0: NumPy arrays."""

    def work(context: Context) -> float:
        values = np.ones(NBYTES // 4, np.float32)
        if not copy_rate:
            return timed(context, values, lambda: None)
        with FakeDevice(context.rank, byte_s=1.0 / copy_rate) as device:
            return timed(context, device.array(values), lambda: device.main.put().wait())

    wrap: Any = lambda fabric: PacedFabric(fabric, 1.0 / network_rate)  # noqa: E731
    return max(run_ranks(2, work, settings=SETTINGS, wrap=wrap, timeout_s=600))


def on_cuda() -> None:
    """The same with CUDA tensors between two ranks of this process, over sockets."""
    import torch

    values = torch.ones(NBYTES // 4, device="cuda")
    host = torch.empty(NBYTES // 4, pin_memory=True)

    def copies(target: Any, source: Any) -> float:
        began_s = time.perf_counter()
        for _ in range(10):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / 10

    parts = {"copy out": copies(host, values), "copy in": copies(values, host)}

    def work(context: Context) -> List[float]:
        network_s = timed(context, np.ones(NBYTES // 4, np.float32), lambda: None)
        return [network_s, timed(context, values.clone(), torch.cuda.synchronize)]

    parts["network"], together_s = map(max, zip(*run_ranks(2, work, "tcp", SETTINGS, timeout_s=600)))
    for name, part_s in parts.items():
        print(f"{name:10} {1e3 * part_s:8.1f} ms")
    print(f"all-reduce {1e3 * together_s:8.1f} ms, {together_s / max(parts.values()):.2f} of the slowest")
    print(f"on {torch.cuda.get_device_name(0)}")


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--network", type=float, default=0.2, help="GB/s of the throttled network")
    arguments = parser.parse_args()
    if arguments.cuda:
        on_cuda()
        return
    network = arguments.network * 1e9
    alone_s = throttled(0.0, network)
    print(f"64 MB among two ranks; network {arguments.network:g} GB/s: {1e3 * alone_s:.0f} ms alone")
    print("copies GB/s  one way ms  all-reduce ms  against the slowest")
    for factor in (50.0, 5.0, 3.0, 2.0, 1.0):
        copy_s = NBYTES / (factor * network)
        together_s = throttled(factor * network, network)
        ratio = together_s / max(copy_s, alone_s)
        print(f"{factor * network / 1e9:11.2f}  {1e3 * copy_s:10.0f}  {1e3 * together_s:13.0f}  {ratio:.2f}")


if __name__ == "__main__":
    main()
