"""Errors of the study's predictions, and the pictures of docs/scaling.md, from the files of its results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Sequence, Tuple

from ringcomm.scaling.figure import COLOURS, Line, line_chart
from ringcomm.schedule.closed_form import reduce_cost
from ringcomm.schedule.machine import Machine, Method, link_byte_s

from .models import TITLES, bytes_of
from .scaling_plan import Task, key_of, predicted_s, reduced, task_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
CALIBRATED = 4
"""Numbers of workers up to here were used for the calibration."""
METHODS = ("ring", "direct", "servers")
PLAIN = ("ring", "direct", "hierarchical", "servers")
FILES = ("quiet", "measured", "repeated")
Point = Tuple[Task, float, Dict[str, float]]
"""A task, its measured median, and its predictions."""


def points(folder: Path) -> List[Point]:
    """Everything that was predicted and measured, also what was measured twice.

    In ``quiet`` is what was measured while nothing else ran, in ``measured`` and ``repeated`` what was
    measured while other programs used both cores.
    """
    told = json.loads((folder / "predictions.json").read_text())["predictions"]
    tasks: List[Task] = []
    for name in FILES:
        path = folder / f"{name}.json"
        tasks += [{**task, "file": name} for task in json.loads(path.read_text())] if path.exists() else []
    return [(task, median(task["seconds"]), told[key_of(task)]) for task in tasks if key_of(task) in told]


def errors(rows: Sequence[Point], which: str = "seconds") -> List[float]:
    """Relative errors of the predictions, by their size."""
    return sorted(abs(told[which] / seconds - 1) for _, seconds, told in rows)


def summary(folder: Path) -> str:
    """A line for each group of points: how many, median and worst error, also of the ablations."""
    rows = [row for row in points(folder) if row[0]["workers"] > CALIBRATED and row[0]["method"] != "none"]
    lines = []
    for title, chosen in _groups(rows):
        if not chosen:
            continue
        parts = []
        for which in ("seconds", "without_processor", "without_overlap"):
            found = errors(chosen, which)
            parts.append(f"{which} {100 * median(found):.1f} % ({100 * found[-1]:.1f} %)")
        lines.append(f"{title}: {len(chosen)} points; median (worst) error: {', '.join(parts)}")
    ratios = sorted(_bytes_ratio(task) for task, _, _ in points(folder) if task["method"] in PLAIN)
    lines.append(
        f"bytes that the kernel counted on the busiest interface, over the formula: {len(ratios)} steps, "
        f"median {median(ratios):.3f}, most {ratios[-1]:.3f}"
    )
    return "\n".join(lines)


def _bytes_ratio(task: Task) -> float:
    counted = max(max(pair) for pair in task["bytes"])
    return counted / max(reduced(task, Machine()).wire_bytes)


def _groups(rows: Sequence[Point]) -> List[Tuple[str, List[Point]]]:
    def where(**wanted: Any) -> List[Point]:
        return [row for row in rows if all(row[0][name] == value for name, value in wanted.items())]

    groups: List[Tuple[str, List[Point]]] = []
    for file, title in (("quiet", ""), ("measured", " while other programs ran")):
        chosen = where(file=file)
        groups += [
            (f"all{title}", chosen),
            *((f"{name}{title}", [row for row in chosen if row[0]["method"] == name]) for name in METHODS),
            (f"up to 12 workers{title}", [row for row in chosen if row[0]["workers"] < 16]),
            (f"16 workers{title}", [row for row in chosen if row[0]["workers"] == 16]),
            (f"with overlap{title}", [row for row in chosen if row[0]["overlap"]]),
        ]
    return [*groups, ("16 ranks or hosts, measured again while other programs ran", where(file="repeated"))]


def draw(folder: Path) -> None:
    """Write the pictures, and print the errors."""
    text = summary(folder)
    (folder / "errors.txt").write_text(text + "\n")
    print(text)
    (DOCS / "scaling-errors.svg").write_text(_errors_picture(points(folder)))
    (DOCS / "scaling-measured.svg").write_text(_efficiency_picture(folder))
    (DOCS / "scaling-machines.svg").write_text(_machines_picture())


def _errors_picture(rows: Sequence[Point]) -> str:
    """Predicted against measured seconds, every point; those while other programs ran in grey."""
    later = [row for row in rows if row[0]["workers"] > CALIBRATED]

    def of(method: str, quiet: bool) -> Tuple[Tuple[float, float], ...]:
        return tuple(
            (seconds, told["seconds"])
            for task, seconds, told in later
            if task["method"] == method and (task["file"] == "quiet") == quiet
        )

    lines = []
    for method, grey in zip(METHODS, ("#999", "#bbb", "#ccc")):
        lines.append(Line(f"{method}, while other programs ran", of(method, False), grey, joined=False))
    lines += [Line(method, of(method, True), joined=False) for method in METHODS]
    ends = [seconds for _, seconds, _ in rows]
    lines.append(
        Line("predicted = measured", ((min(ends), min(ends)), (max(ends), max(ends))), "#999", marks=False)
    )
    return line_chart(
        "Seconds per step, predicted before they were measured", "measured seconds", "predicted seconds",
        lines, y_log=True,
    )  # fmt: skip


def _efficiency_picture(folder: Path) -> str:
    """ResNet-50 at 100 Mbit/s: measured points, and lines of the model as it was calibrated."""
    found = json.loads((folder / "predictions.json").read_text())["parameters"]["100"]
    machine = Machine(**{**found, "wire_byte_s": tuple(found["wire_byte_s"])})
    rows = [
        (task, seconds) for task, seconds, _ in points(folder)
        if task["mbit"] == 100 and task["model"] == "resnet50" and task["slots"] == 1 and not task["overlap"]
        and task["file"] == ("measured" if task["workers"] <= CALIBRATED else "quiet")
    ]  # fmt: skip
    lines: List[Line] = []
    for number, (name, belongs) in enumerate(_ways()):
        chosen = [(task, seconds) for task, seconds in rows if belongs(task)]
        if not chosen:
            continue
        colour = COLOURS[number]
        task = chosen[0][0]
        drawn = tuple(
            (t["workers"], 100 * t["compute_s"] / seconds) for t, seconds in sorted(chosen, key=_workers)
        )
        lines.append(Line(f"{name}, measured", drawn, colour, joined=False))
        model = []
        for workers in (2, 4, 6, 8, 12, 16):
            servers = _servers_like(name, workers)
            like = task_of(100, task["method"], workers, task["buckets"], servers, 1, task["compute_s"])
            model.append((workers, 100 * task["compute_s"] / predicted_s(like, machine)))
        lines.append(Line(f"{name}, model", tuple(model), colour, dashed=True, marks=False))
    return line_chart(
        f"{TITLES['resnet50']}, a tenth of each gradient, at 100 Mbit/s, without overlap", "workers",
        "efficiency in %", lines, y_from_zero=True,
    )  # fmt: skip


def _workers(row: Tuple[Task, float]) -> int:
    workers: int = row[0]["workers"]
    return workers


def _ways() -> List[Tuple[str, Any]]:
    def extra(task: Task) -> bool:
        return bool(task["servers"]) and min(task["servers"]) >= task["workers"]

    def count(task: Task) -> int:
        return len(task["servers"])

    return [
        ("ring", lambda task: task["method"] == "ring"),
        ("1 server", lambda task: count(task) == 1 and not extra(task)),
        ("servers on half", lambda task: count(task) == task["workers"] // 2 > 1 and not extra(task)),
        ("as many extra servers", lambda task: count(task) == task["workers"] and extra(task)),
    ]


def _servers_like(name: str, workers: int) -> Sequence[int]:
    return {
        "1 server": range(1),
        "servers on half": range(max(1, workers // 2)),
        "as many extra servers": range(workers, 2 * workers),
    }.get(name, ())


def _machines_picture() -> str:
    """Simulated rates to 4,096 workers: where servers on further hosts win, and where not."""
    nbytes, compute_s, machine = sum(bytes_of("resnet50")), 0.36, Machine((link_byte_s("10gbit"),))
    lines = []
    sizes = [2**power for power in range(1, 13)]
    for name, make, machines in (
        ("ring", lambda w: Method("ring"), lambda w: w),
        ("1 extra server", lambda w: Method("servers", 1, True), lambda w: w + 1),
        ("w/2 extra servers", lambda w: Method("servers", w // 2, True), lambda w: w + w // 2),
        ("w extra servers", lambda w: Method("servers", w, True), lambda w: 2 * w),
    ):
        rates = []
        for workers in sizes:
            step_s = compute_s + reduce_cost(make(workers), nbytes, machine, [1] * workers).seconds
            rates.append((workers, workers, step_s, machines(workers)))
        lines.append(
            Line(f"{name}, per worker", tuple((w, 100 * compute_s / s) for w, _, s, _ in rates), marks=False)
        )
        if name != "1 extra server":
            per = tuple((w, 100 * compute_s / s * w / m) for w, _, s, m in rates)
            lines.append(Line(f"{name}, per machine", per, lines[-1].colour, dashed=True, marks=False))
    return line_chart(
        "Simulated: ResNet-50 (0.36 s), 10 Gbit/s, no overlap", "workers",
        "rate in % of one worker alone", lines, y_from_zero=True,
    )  # fmt: skip
