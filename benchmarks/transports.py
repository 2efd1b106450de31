"""Every transport of one host in turns, and whether the default is ever slower than one of its alternatives.

    python benchmarks/transports.py [--np 2] [--rounds 15] [--sizes 8 16K 1M] [--output DIR] [--quick]
    python benchmarks/transports.py --work

Each rank opens one job per transport and keeps them all. Then, size by size, the transports take turns of
some milliseconds, in an order that rotates, so what disturbs the machine disturbs all of them alike. Times
are those of an all-reduce (float32, in place) on rank 0: the median of a turn, and the median over turns. The
last line averages ResNet-50's 161 gradients one by one.

Each rank is bound to a core of its own, if there are as many. The default is *within noise* if, compared with
each alternative, the median of the ratios of their times in the same round is at most 1.05, or the ratio of
their shortest times is. Writes DIR/transports.json and DIR/transports.md.

With ``--work`` one thread drives both ends of a link itself, without waiting, and the shortest of many times
counts: what system calls, copies and Python take, both ranks together. That hardly depends on what else the
machine does, so it separates changes from noise; it does not show the gain of two ranks on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cores import UNWATCHED, Watch
from peers.steps import resnet50_shapes

import ringcomm as rc
from ringcomm.collective.flows import SegmentPool
from ringcomm.collective.part import Part
from ringcomm.collective.reduce import kernel
from ringcomm.collective.short import make_execution
from ringcomm.config import Membership, Settings, Slot
from ringcomm.configuration.parsing import TRANSPORTS as ALL_TRANSPORTS
from ringcomm.configuration.parsing import size as parse_bytes
from ringcomm.job.context import Context
from ringcomm.rendezvous.actions import Seat
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.schedule.select import Selector
from ringcomm.transport.base import Fabric
from ringcomm.transport.local import make_links
from ringcomm.transport.tcp import SocketFabric
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.signature import Signature

DEFAULT = "auto"
TRANSPORTS = (DEFAULT, "unix", "shm", "tcp")
SIZES = [f"{number}{unit}" for unit, numbers in (
    ("", (8,)), ("K", (1, 4, 16, 32, 64, 128, 256, 512)), ("M", (1, 2, 4, 8, 16, 32, 64))
) for number in numbers]  # fmt: skip
GRADIENTS = "161 gradients of ResNet-50"
TURN_S = 0.004
MAX_CALLS = 100
WITHIN = 1.05
LIMIT_S = 900.0

Times = Dict[str, List[float]]
"""For each transport (or algorithm, see :func:`settings_for`) one time per round."""


def settings_for(name: str) -> Settings:
    """Settings with this transport, or with the default one and this algorithm."""
    variable = "RINGCOMM_TRANSPORT" if name in ALL_TRANSPORTS else "RINGCOMM_ALGORITHM"
    return Settings.from_environment({**os.environ, variable: name})


def main() -> int:
    args = _arguments()
    if args.worker:
        return _work(json.loads(sys.stdin.readline()))
    if args.work:
        print(
            work_table(args.transports, [parse_bytes(size) for size in args.sizes], 3 if args.quick else 60)
        )
        return 0
    rounds = 3 if args.quick else args.rounds
    tasks = [GRADIENTS if size == GRADIENTS else parse_bytes(size) for size in [*args.sizes, GRADIENTS]]
    measured = measure(args.np, args.transports, tasks, rounds)
    text = report(measured, args.transports, args.np, rounds)
    print(text)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "transports.md").write_text(text + "\n")
        (args.output / "transports.json").write_text(json.dumps(measured, indent=1))
    return 0


def _arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="a check that it works")
    parser.add_argument("--work", action="store_true", help="both ends in one thread, see above")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the launcher's side ---------------------------------------------------------------------


def measure(
    ranks: int, transports: Sequence[str], tasks: Sequence[Any], rounds: int, watched: str = ""
) -> List[Dict[str, Any]]:
    """Start the ranks, one job per transport, and collect what rank 0 measured.

    Args:
        watched: a file of :data:`cores.MAPPED_BYTES`, if the state of the first two ranks' cores is wanted.
    """
    servers, jobs = [], []
    for transport in transports:
        key = secrets.token_bytes(32)
        server = RendezvousServer(
            key=key, job=transport, seats=[Seat(Slot(0, rank), "localhost") for rank in range(ranks)],
            addresses=["127.0.0.1"], start_timeout_s=60.0, notify=lambda notice: None,
        )  # fmt: skip
        servers.append(server)
        jobs.append({"transport": transport, "key": key.hex(), "endpoints": list(server.start())})
    random.shuffle(jobs)  # the memory of a process's first job is slower than that of later ones
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)
        for _ in range(ranks)
    ]
    try:
        for rank, worker in enumerate(workers):
            plan = {"rank": rank, "size": ranks, "jobs": jobs, "tasks": tasks, "rounds": rounds,
                    "watched": watched}  # fmt: skip
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(plan) + "\n")
            worker.stdin.close()
            worker.stdin = None
        said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit(f"a rank failed: exit codes {[worker.returncode for worker in workers]}")
        return [json.loads(line) for line in said[0].splitlines()]
    finally:
        for worker in workers:
            worker.kill()
        for server in servers:
            server.stop()


def report(measured: Sequence[Dict[str, Any]], transports: Sequence[str], ranks: int, rounds: int) -> str:
    """The table: one row per size, the best in bold, and whether the default is within noise of it."""
    lines = [
        f"All-reduce, {ranks} ranks on {os.cpu_count()} cores, {rounds} rounds, transports in turns; median "
        f"(shortest). Load average at the end: {os.getloadavg()[0]:.1f}.",
        "",
        f"| size | {' | '.join(transports)} | {DEFAULT} / best other | within noise |",
        f"| --- |{' --- |' * (len(transports) + 2)}",
    ]
    for row in measured:
        times: Times = row["times"]
        best = min(transports, key=lambda name: median(times[name]))
        cells = [
            f"{'**' * (name == best)}{_time(median(times[name]))}{'**' * (name == best)} "
            f"({_time(min(times[name]))})"
            for name in transports
        ]
        ratio, fine = compared(times)
        lines.append(f"| {row['task']} | {' | '.join(cells)} | {ratio:.2f} | {'yes' if fine else '**no**'} |")
    return "\n".join(lines)


def compared(times: Times) -> Tuple[float, bool]:
    """The default's time over that of its best alternative, and whether it is within noise of all."""
    others = [name for name in times if name != DEFAULT]
    if DEFAULT not in times or not others:
        return 1.0, True
    ratios = {
        name: median([mine / other for mine, other in zip(times[DEFAULT], times[name])]) for name in others
    }
    shortest = min(times[DEFAULT])
    fine = all(ratios[name] <= WITHIN or shortest <= WITHIN * min(times[name]) for name in others)
    return max(ratios.values()), fine


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


# ---- a rank ----------------------------------------------------------------------------------


def _work(plan: Dict[str, Any]) -> int:
    contexts = {}
    _bind(plan["rank"], plan["size"])
    for job in plan["jobs"]:
        endpoints = tuple((address, port) for address, port in job["endpoints"])
        membership = Membership(
            plan["size"], endpoints, bytes.fromhex(job["key"]), job["transport"], Slot(0, plan["rank"]), None,
            "localhost",
        )  # fmt: skip
        contexts[job["transport"]] = Context.start(membership, settings_for(job["transport"]))
    watch = Watch(plan["watched"], plan["rank"] == 0) if plan["watched"] and plan["rank"] < 2 else None
    dice = random.Random(plan["jobs"][0]["key"])  # the same on every rank, and another in every start
    for task in plan["tasks"]:
        times, states = _turns(contexts, task, plan["rounds"], watch, dice)
        if plan["rank"] == 0:
            name = task if task == GRADIENTS else _size(task)
            print(json.dumps({"task": name, "times": times, "states": states}), flush=True)
    for context in contexts.values():
        context.barrier()
        context.close()
    return 0


def _bind(rank: int, ranks: int) -> None:
    """Keep each rank on a core of its own, if there are as many.

    A system that lets both ranks share a core, to save another one, would measure that.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def _size(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"


def _turns(
    contexts: Dict[str, Context], task: Any, rounds: int, watch: Optional[Watch], dice: random.Random
) -> Tuple[Times, Dict[str, List[str]]]:
    """One time per round for each transport, and in which state the cores were: empty if it has changed."""
    if task == GRADIENTS:
        arrays = [np.ones(shape, np.float32) for shape in resnet50_shapes()]
        op = rc.Average
    else:
        arrays = [np.zeros(max(1, task // 4), np.float32)]
        op = rc.Sum
    times: Times = {name: [] for name in contexts}
    states: Dict[str, List[str]] = {name: [] for name in contexts}
    names = list(contexts)
    calls = {name: _calls(contexts[name], arrays, op) for name in names}
    before = UNWATCHED if watch is None else watch.look()
    for _ in range(rounds):
        # What one leaves in the caches is what the next one begins with: each has other neighbours each time.
        dice.shuffle(names)
        for name in names:
            context, taken = contexts[name], []
            _step(context, arrays, op)
            for _ in range(calls[name]):
                context.barrier()
                began_s = time.perf_counter()
                _step(context, arrays, op)
                taken.append(time.perf_counter() - began_s)
            times[name].append(median(taken))
            after = before if watch is None else watch.look()
            states[name].append(after if after == before else "")
            before = after
    return times, states


def _step(context: Context, arrays: Sequence[np.ndarray[Any, Any]], op: rc.ReduceOp) -> None:
    for array in arrays:
        context.allreduce_(array, op)


def _calls(context: Context, arrays: Sequence[np.ndarray[Any, Any]], op: rc.ReduceOp) -> int:
    """Return how many calls a turn has, the same on every rank.

    (Large buffers move to huge pages meanwhile.)
    """
    for _ in range(3):
        _step(context, arrays, op)
    began_s = time.perf_counter()
    _step(context, arrays, op)
    wanted = np.array([TURN_S / (time.perf_counter() - began_s)])
    context.broadcast_(wanted, 0)
    return int(min(MAX_CALLS, max(3, wanted[0])))


# ---- both ends in one thread -----------------------------------------------------------------


def work_table(transports: Sequence[str], sizes: Sequence[int], repeat: int) -> str:
    """One row per size: the work of one all-reduce, both ranks together, the shortest of many."""
    fabrics = {name: _pair(name) for name in transports}
    lines = [f"| size | {' | '.join(transports)} |", f"| --- |{' --- |' * len(transports)}"]
    sequence = 0
    for size in sizes:
        parts = {name: [_part(fabric, size // 4) for fabric in fabrics[name]] for name in transports}
        arrays = [np.zeros(size // 4, np.float32) for _ in range(2)]
        taken: Times = {name: [] for name in transports}
        for _ in range(repeat):
            for name in transports:
                sequence += 1
                taken[name].append(_alone(parts[name], sequence, arrays))
        lines.append(f"| {_size(size)} | {' | '.join(_time(min(taken[name])) for name in transports)} |")
    for pair in fabrics.values():
        for fabric in pair:
            fabric.close()
    return "\n".join(lines)


def _pair(transport: str) -> List[SocketFabric]:
    """Both ends of a link of this process with itself."""
    ends = socket.socketpair()
    if transport == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    with ThreadPoolExecutor(2) as pool:
        links = pool.map(make_links, [{1: ends[0]}, {0: ends[1]}], [transport] * 2)
        return [SocketFabric(rank, found) for rank, found in enumerate(links)]


def _part(fabric: Fabric, count: int) -> Part:
    dtype, op = np.dtype(np.float32), rc.Sum
    fold = kernel(op, dtype, 2)
    schedule = Selector(fabric.rank, 2, None).all_reduce(count, dtype.itemsize, fold.needs_single_fold)
    call = Signature("", 0, 1, int(op), NO_ROOT, (dtype.name,), ((),), items=count)
    return make_execution(schedule, fabric, call.header(0), dtype, SegmentPool(0), fold)


def _alone(parts: Sequence[Part], sequence: int, arrays: Sequence[np.ndarray[Any, Any]]) -> float:
    """Seconds that one all-reduce takes if this thread does the work of both ranks."""
    began_s = time.perf_counter()
    for part, array in zip(parts, arrays):
        part.arm(sequence, array)
    unfinished = list(parts)
    while unfinished:
        unfinished = [part for part in unfinished if not part.advance()]
    elapsed_s = time.perf_counter() - began_s
    for part in parts:
        part.disarm()
    return elapsed_s


if __name__ == "__main__":
    sys.exit(main())
