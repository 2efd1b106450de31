"""One rank of the scaling study: training steps whose gradients are reduced in different ways.

Computation sleeps, because the ranks share the cores of one machine; communication is real. With overlap a
bucket is reduced by a second thread as soon as the backward pass has made it, as DDP and Horovod do.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import ringcomm as rc
from ringcomm.collective.reduce import kernel
from ringcomm.ops import ReduceOp
from ringcomm.schedule.hierarchy import hosts_of
from ringcomm.schedule.registry import Problem, build
from ringcomm.schedule.steps import even_bounds
from tests.support import servers

Reduce = Callable[["np.ndarray[Any, Any]"], None]
FORWARD = 1 / 3
"""Which part of the computation is done before the first gradient is."""


class Interfaces:
    """Bytes that the kernel has counted on this namespace's ``eth0``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def counted(self) -> Tuple[int, int]:
        """Received and sent."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self._name:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
        return 0, 0


def reducer(task: Dict[str, Any]) -> Reduce:
    """Return what sums a bucket over all workers, in place."""
    context, method = rc.api.context(), task["method"]
    runner, rank, size = context._runner, rc.rank(), task["size"]
    if method == "none":
        return lambda bucket: None
    if method == "ringcomm":
        return lambda bucket: rc.allreduce_(bucket, op=rc.Sum)
    if method == "gloo":
        import torch
        import torch.distributed as dist

        return lambda bucket: dist.all_reduce(torch.from_numpy(bucket))
    grid = hosts_of([peer.host_index for peer in context.peers])
    made: Dict[int, Any] = {}

    def schedule(count: int) -> Any:
        if method == "servers":
            owners = task["servers"]
            bounds = even_bounds(count, len(owners))
            return tuple(servers.all_reduce(rank, range(task["workers"]), owners, bounds))
        return build("allreduce", method, Problem(rank, size, count, even_bounds(count, size), grid))

    def reduce(bucket: np.ndarray[Any, Any]) -> None:
        steps = made.get(bucket.size)
        if steps is None:
            steps = made[bucket.size] = schedule(bucket.size)
        fold = kernel(ReduceOp.SUM, bucket.dtype, size)
        runner.run_apart(steps, bucket, bucket, f"{method} {bucket.size}", fold)

    return reduce


def step(task: Dict[str, Any], buckets: Sequence[Any], reduce: Reduce, works: bool) -> None:
    """One training step of this rank; a server that is no worker computes nothing."""
    compute_s = task["compute_s"] if works else 0.0
    if not task["overlap"] or not works:
        time.sleep(compute_s)
        for bucket in buckets:
            reduce(bucket)
        return
    ready: queue.Queue[Any] = queue.Queue()

    def communicate() -> None:
        for _ in buckets:
            reduce(ready.get())

    thread = threading.Thread(target=communicate)
    thread.start()
    time.sleep(FORWARD * compute_s)
    total = sum(task["buckets"])
    for bucket, length in zip(buckets, task["buckets"]):
        time.sleep((1 - FORWARD) * compute_s * length / total)
        ready.put(bucket)
    thread.join()


def run(task: Dict[str, Any], interfaces: Interfaces) -> Dict[str, Any]:
    """All rounds of a task; the same record on every rank."""
    rank = rc.rank()
    works = rank < task["workers"]
    buckets = [np.empty(max(1, length // 4), np.float32) for length in task["buckets"]]
    reduce = reducer(task)
    expected = task["workers"] * (task["workers"] + 1) / 2
    times: List[float] = []
    moved: List[Tuple[int, int]] = []
    worked: List[float] = []
    for number in range(-task.get("warm_up", 1), task["rounds"]):
        for bucket in buckets:
            bucket.fill(rank + 1 if works else 0)
        rc.barrier()
        before, started, processor = interfaces.counted(), time.perf_counter(), time.process_time()
        step(task, buckets, reduce, works)
        elapsed, processor = time.perf_counter() - started, time.process_time() - processor
        rc.barrier()
        after = interfaces.counted()
        right = not works or task["method"] == "none" or all((b[[0, -1]] == expected).all() for b in buckets)
        if not right:
            raise SystemExit(f"wrong sum: {task}")
        if number >= 0:
            times.append(elapsed)
            worked.append(processor)
            moved.append((after[0] - before[0], after[1] - before[1]))
    rows = rc.allgather_object([times if works else [0.0] * len(times), worked, moved, rc.local_rank()])
    return {
        **task,
        "seconds": [max(values) for values in zip(*(row[0] for row in rows))],
        "processor_s": [sum(values) for values in zip(*(row[1] for row in rows))],
        "bytes": [row[2][-1] for row in rows if row[3] == 0], "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    """Run the tasks of a plan; rank 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    plan = json.loads(args.plan.read_text())
    rc.init()
    if any(task["method"] == "gloo" for task in plan["tasks"]):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = f"file://{args.plan}.store"
        dist.init_process_group("gloo", init_method=store, rank=rc.rank(), world_size=rc.size())
    interfaces = Interfaces(plan["iface"])
    found = []
    for task in plan["tasks"]:
        found.append(run(task, interfaces))
        if rc.rank() == 0:
            args.output.write_text(json.dumps(found))
    rc.shutdown()


if __name__ == "__main__":
    main()
