"""What the scaling study measures, and what it predicts."""

from __future__ import annotations

import json
import os
from math import log
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Sequence, Tuple

from ringcomm.scaling.step import time_step, workload
from ringcomm.schedule.closed_form import Cost, reduce_cost
from ringcomm.schedule.machine import Machine, Method, link_byte_s

from .models import COMPUTE_S, buckets_of, bytes_of

Task = Dict[str, Any]
SCALE = {"resnet50": 0.1, "vgg16": 0.05, "inception3": 0.1}
"""Which part of every gradient is reduced at 100 Mbit/s; at 1 Gbit/s ten times as much."""
BURST_BYTES = 256 * 1024
"""What the shaper of a link lets pass at once after a pause."""
CALIBRATION_BYTES = {100: (2_000_000, 8_000_000), 1000: (8_000_000, 64_000_000)}


def key_of(task: Task) -> str:
    """Return what distinguishes a task from all others."""
    names = ("mbit", "hosts", "slots", "method", "workers", "servers", "model", "overlap")
    return " ".join(f"{name}={task[name]}" for name in names) + f" bytes={sum(task['buckets'])}"


def task_of(
    mbit: int, method: str, workers: int, buckets: Sequence[int], servers: Sequence[int] = (), slots: int = 1,
    compute_s: float = 0.0, overlap: bool = False, model: str = "", rounds: int = 3,
) -> Task:  # fmt: skip
    """A task; servers with numbers from ``workers`` on are ranks of their own."""
    size = max([workers - 1, *servers]) + 1
    return {
        "mbit": mbit, "hosts": size // slots, "slots": slots, "method": method, "size": size,
        "workers": workers, "servers": list(servers), "model": model, "buckets": list(buckets),
        "compute_s": compute_s, "overlap": overlap, "rounds": rounds, "warm_up": 1,
    }  # fmt: skip


def calibration_tasks(rates: Sequence[int]) -> List[Task]:
    """All-reduces of two sizes by up to four ranks."""
    found = []
    for mbit in rates:
        for ranks in (2, 3, 4):
            for nbytes in CALIBRATION_BYTES[mbit]:
                for method, servers in (("ring", []), ("direct", []), ("servers", [0])):
                    found.append(task_of(mbit, method, ranks, [nbytes], servers, model="calibration"))
        for nbytes in CALIBRATION_BYTES[mbit]:
            found.append(task_of(mbit, "hierarchical", 4, [nbytes], slots=2, model="calibration"))
    return found


def study_tasks(rates: Sequence[int]) -> List[Task]:
    """Training steps with 6, 8 and 16 workers, and two of the calibration's numbers for comparison."""
    found: List[Task] = []
    for mbit in rates:
        models = ("resnet50", "inception3", "vgg16") if mbit == 100 else ("resnet50",)
        for workers in (2, 4, 6, 8, 16):
            for model in models:
                found += _steps(mbit, workers, model)
        buckets, compute_s = buckets_for(mbit, "resnet50"), COMPUTE_S["resnet50"]
        for method in ("hierarchical", "ring"):
            found.append(
                task_of(mbit, method, 16, buckets, slots=4, compute_s=compute_s, model="resnet50", rounds=2)
            )
    if 100 in rates:
        found += _as_in_the_fifth_article() + _more_workers()
    return found


def _more_workers() -> List[Task]:
    """Steps with 10 and 12 workers."""
    found: List[Task] = []
    for workers in (10, 12):
        for model in ("resnet50", "inception3", "vgg16"):
            buckets, compute_s, half = buckets_for(100, model), COMPUTE_S[model], range(workers // 2)
            for method, servers in (("ring", ()), ("direct", ()), ("servers", (0,)), ("servers", half)):
                if model != "vgg16" or method != "servers":
                    found.append(
                        task_of(100, method, workers, buckets, tuple(servers), 1, compute_s, False, model, 2)
                    )
    return found


def buckets_for(mbit: int, model: str) -> List[int]:
    """The buckets of a model's gradients at this link rate."""
    return buckets_of(bytes_of(model, SCALE[model] * mbit / 100))


def _steps(mbit: int, workers: int, model: str) -> List[Task]:
    buckets, compute_s = buckets_for(mbit, model), COMPUTE_S[model]
    half = workers // 2
    ways: List[Tuple[str, Sequence[int], bool]] = [
        ("ring", (), False), ("ring", (), True), ("direct", (), False), ("servers", (0,), False),
        ("servers", range(half), False),
    ]  # fmt: skip
    if mbit == 100 and model == "resnet50":
        ways += [("servers", (0,), True), ("gloo", (), False)]
        # Servers on hosts of their own: one, half as many as workers, as many as workers.
        ways += [
            ("servers", range(workers, workers + count), False)
            for count in sorted({1, half, workers})
            if workers + count <= 16
        ]
    return [
        task_of(mbit, method, workers, buckets, tuple(servers), 1, compute_s, overlap, model, rounds=2)
        for method, servers, overlap in ways
        if not (method == "gloo" and workers > 8)
    ]


def _as_in_the_fifth_article() -> List[Task]:
    """Eight workers, and 7.4 times as long a computation as a ring of very many needs for its gradients."""
    buckets = buckets_of(bytes_of("inception3", 0.02))
    compute_s = 7.4 * 2 * sum(buckets) / 12.5e6
    return [
        task_of(100, method, 8, buckets, (), 1, compute_s, overlap, "inception3 as in the article", rounds=2)
        for method, overlap in (("none", False), ("ring", False), ("ring", True), ("ringcomm", True))
    ]


# ---- predictions -------------------------------------------------------------------------------


def calibrated(rows: Sequence[Task], mbit: int) -> Machine:
    """The model's parameters from all-reduces of up to four ranks at one link rate."""
    rows = [row for row in rows if row["mbit"] == mbit]
    flat = Machine((1.0,), 0.0, reduce_byte_s=0.0, message_s=0.0)
    moved = [
        median(row["processor_s"]) / (2 * sum(reduced(row, flat).wire_bytes))
        for row in rows
        if row["slots"] == 1
    ]
    base = Machine(
        (link_byte_s(f"{mbit}mbit"),), moved_byte_s=median(moved), shared_cores=float(os.cpu_count() or 1)
    )
    rings = [row for row in rows if row["method"] == "ring"]

    def error(machine: Machine) -> float:
        return sum(abs(log(_reduce_s(row, machine) / median(row["seconds"]))) for row in rings)

    tried = [
        base._replace(wire_byte_s=(base.wire_byte_s[0] * (0.9 + 0.002 * step),), wire_latency_s=latency_s)
        for step in range(101)
        for latency_s in (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
    ]
    machine = min(tried, key=error)
    crowded = [row for row in rows if row["method"] in ("direct", "servers") and row["hosts"] == 4]
    incast = median(median(row["seconds"]) / _reduce_s(row, machine) for row in crowded)
    return machine._replace(incast=max(1.0, incast))


def predicted_s(task: Task, machine: Machine, overlap: bool = True) -> float:
    """Seconds of a step of the study."""
    if task["method"] == "none":
        return float(task["compute_s"])
    work = workload(task["compute_s"], task["buckets"], task["overlap"] and overlap)
    work = work._replace(bucket_bytes=0)  # the study's buckets are reduced one by one
    method, ranks = _method(task), _ranks(task)
    step_s = time_step(work, lambda nbytes: reduce_cost(method, nbytes, machine, ranks).seconds).step_s
    # While ranks compute, the shaper saves up what it lets pass at once afterwards.
    return max(work.compute_s, step_s - BURST_BYTES * machine.wire_byte_s[0])


def predict(tasks: Sequence[Task], folder: Path) -> None:
    """Write the predictions of all tasks but those of other libraries, from ``calibration.json`` alone."""
    rows = json.loads((folder / "calibration.json").read_text())
    machines = {mbit: calibrated(rows, mbit) for mbit in {task["mbit"] for task in tasks}}
    found = {
        key_of(task): {
            "seconds": predicted_s(task, machines[task["mbit"]]),
            "without_processor": predicted_s(
                task, machines[task["mbit"]]._replace(reduce_byte_s=0.0, moved_byte_s=0.0, message_s=0.0)
            ),
            "without_overlap": predicted_s(task, machines[task["mbit"]], overlap=False),
        }
        for task in tasks
        if task["method"] != "gloo"
    }
    parameters = {str(mbit): machine._asdict() for mbit, machine in machines.items()}
    text = json.dumps({"parameters": parameters, "predictions": found}, indent=1, sort_keys=True)
    (folder / "predictions.json").write_text(text + "\n")


def _ranks(task: Task) -> List[int]:
    """Workers on each host, without the hosts of servers."""
    return [task["slots"]] * (task["workers"] // task["slots"])


def _method(task: Task) -> Method:
    dedicated = bool(task["servers"]) and min(task["servers"]) >= task["workers"]
    kind = "direct" if task["method"] == "ringcomm" else task["method"]
    return Method(kind, len(task["servers"]), dedicated)


def _reduce_s(task: Task, machine: Machine) -> float:
    return reduced(task, machine).seconds


def reduced(task: Task, machine: Machine) -> Cost:
    """Return what reducing a step's gradients as one bucket costs."""
    return reduce_cost(_method(task), sum(task["buckets"]), machine, _ranks(task))
