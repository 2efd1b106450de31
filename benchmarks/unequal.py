"""Ranks of unequal speed: the fast one alone, and all three with equal and with balanced batches.

    sudo python benchmarks/unequal.py processes hosts slow-down cost     measures these parts
    python benchmarks/unequal.py draw                                    draws docs/unequal.svg

Results are in benchmarks/results/unequal.json; each part replaces its own.

* ``processes``: three processes with 0.9, 0.3 and 0.3 of a core;
* ``hosts``: the same on three hosts of namespaces with links of 1 Gbit/s and gradients of 1 MB;
* ``slow-down``: in a running job of the three processes one rank's quota is halved;
* ``cost``: what measuring costs per step: jobs without computing, with fixed and with measured speeds.

Speeds are made by CPU quotas (the cpu controller of cgroups), so ranks really compute, slowly: nothing sleeps
in place of work. Two idle cores are enough. With --weight the ranks get their quotas on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

from peers.unequal_jobs import Machines, Run, SlowDown, Work, hosts, on_hosts, processes, replans, settled

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "unequal.json"
PICTURE = HERE.parent / "docs" / "unequal.svg"

QUOTAS = [0.9, 0.3, 0.3]
RATE = "1gbit"
HOSTS = ("desk", "jetson1", "jetson2")
KINDS = ("fast one alone", "equal batches", "balanced batches")
HALF = SlowDown(60, 0, 0.45)
"""The fast one slows down by half."""
BALANCED_SPREAD = 0.10
COLOURS = ("#9aa5b1", "#edae49", "#d1495b")


def spread(run: Run, first: int, last: int) -> float:
    """Return how much the median compute times of ranks differ in these steps, as a part of the longest."""
    medians = [statistics.median(values[first:last]) for values in run.computed]
    return (max(medians) - min(medians)) / max(medians)


def compare(machines: Machines, rounds: int, steps: int, work: Work) -> Dict[str, Any]:
    """The three kinds in turns: medians of the second half of their steps, and what became of shares."""
    step_s: Dict[str, List[float]] = {kind: [] for kind in KINDS}
    runs: List[Run] = []
    for number in range(rounds):
        for kind, chosen, speeds in zip(KINDS, ([0], [0, 1, 2], [0, 1, 2]), ([1], [1, 1, 1], "measure")):
            run = machines.train(chosen, speeds, steps, work)
            step_s[kind].append(statistics.median(settled(run.times[0])))
            said = " | ".join(run.lines)
            print(f"  {number + 1}/{rounds} {kind}: {step_s[kind][-1]:.4f} s {said}", flush=True)
        runs.append(run)
    return with_medians({
        "quotas": QUOTAS, "steps": steps, "rounds": rounds, "work": work._asdict(),
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "step_s": step_s,
        "replans": [replans(run.shares) for run in runs],
        "spread_of_steps_20_to_40": [spread(run, 20, 40) for run in runs],
        "spread_of_the_second_half": [spread(run, steps // 2, steps) for run in runs],
    })  # fmt: skip


def with_medians(found: Dict[str, Any]) -> Dict[str, Any]:
    """Return what :func:`compare` has measured, with medians over its rounds."""
    medians = {kind: statistics.median(values) for kind, values in found["step_s"].items()}
    alone, equal, balanced = (medians[kind] for kind in KINDS)
    figures = {"against_alone": alone / balanced, "against_equal": equal / balanced}
    return {**found, "median_s": medians, **figures}


def together(before: Dict[str, Any], found: Dict[str, Any]) -> Dict[str, Any]:
    """The rounds of two measurements of the same kind."""
    for name in ("quotas", "steps", "work"):
        if before[name] != found[name]:
            raise SystemExit(f"--add: {name} was {before[name]}, and is {found[name]} now")
    lists = ("replans", "spread_of_steps_20_to_40", "spread_of_the_second_half")
    return with_medians({
        **found, **{name: before[name] + found[name] for name in lists},
        "rounds": before["rounds"] + found["rounds"], "load": max(before["load"], found["load"]),
        "step_s": {kind: before["step_s"][kind] + values for kind, values in found["step_s"].items()},
    })  # fmt: skip


def slow_down(machines: Machines, steps: int, work: Work) -> Dict[str, Any]:
    """Halve a rank's quota in a running job: after how many steps ranks take equally long again."""
    run = machines.train([0, 1, 2], "measure", steps, work, HALF)
    changes = replans(run.shares)
    last = max((step for step, _ in changes if step > HALF.step), default=0)
    if not last:
        raise SystemExit(f"shares have not changed after the slow-down: {changes} {run.lines}")
    return {
        "quotas": QUOTAS, "slow_down": HALF._asdict(), "steps": steps, "load": os.getloadavg()[0],
        "replans": changes, "lines": run.lines, "steps_until_balanced": last - HALF.step,
        "step_s_before": statistics.median(run.times[0][HALF.step - 20 : HALF.step]),
        "step_s_between": statistics.median(run.times[0][HALF.step : last]),
        "step_s_after": statistics.median(run.times[0][last:]),
        "spread_after": spread(run, last, steps),
        "times": [round(seconds, 4) for seconds in run.times[0]],
    }  # fmt: skip


def cost(machines: Machines, rounds: int, steps: int) -> Dict[str, Any]:
    """Seconds per step that measuring adds, from jobs whose steps compute nothing."""
    work = Work(passes=0, gradient_bytes=0)
    found: Dict[str, List[float]] = {"fixed": [], "measured": []}
    for _ in range(rounds):
        for name, speeds in (("fixed", [1, 1]), ("measured", "measure")):
            run = machines.train([0, 1], speeds, steps, work)
            found[name].append(statistics.fmean(settled(run.times[0])))
    added_s = statistics.median(found["measured"]) - statistics.median(found["fixed"])
    return {"step_s": found, "added_s": added_s, "steps": steps, "load": os.getloadavg()[0]}


def bars(results: Dict[str, Any]) -> Iterator[str]:
    """The picture, line by line: the three kinds, in processes and on hosts, and the slow-down."""
    parts = (("processes", "of one machine"), ("hosts", "on three hosts, 1 Gbit/s, gradients of 1 MB"))
    drawn = [(results[name], title) for name, title in parts if name in results]
    height = 40 + 170 * len(drawn) + (190 if "slow-down" in results else 0)
    space = "http://www.w3.org/2000/svg"
    yield f'<svg xmlns="{space}" width="640" height="{height}" font-family="sans-serif" font-size="14">'
    yield f'<rect width="640" height="{height}" fill="white"/>'
    top = 26
    for result, title in drawn:
        quotas = ", ".join(f"{quota:g}" for quota in result["quotas"])
        yield f'<text x="12" y="{top}">Seconds per step of 96 samples; {quotas} of a core, {title}</text>'
        longest = max(result["median_s"].values())
        for place, (kind, colour) in enumerate(zip(KINDS, COLOURS)):
            seconds, y = result["median_s"][kind], top + 16 + 40 * place
            width = 380 * seconds / longest
            yield f'<text x="12" y="{y + 20}">{kind}</text>'
            yield f'<rect x="150" y="{y}" width="{width:.1f}" height="30" fill="{colour}"/>'
            yield f'<text x="{158 + width:.1f}" y="{y + 20}">{seconds:.3g} s</text>'
        top += 170
    if "slow-down" in results:
        yield from curve(results["slow-down"], top)
    yield "</svg>"


def curve(result: Dict[str, Any], top: int) -> Iterator[str]:
    """Seconds of each step around the slow-down."""
    times, step = result["times"], result["slow_down"]["step"]
    highest = 1.1 * sorted(times)[int(0.98 * len(times))]
    left, width, height = 60, 560, 120
    base = top + 16 + height
    yield (
        f'<text x="12" y="{top}">Seconds of each step; after step {step} the fast one has half of its quota'
        "</text>"
    )

    def x(number: float) -> float:
        return left + width * number / len(times)

    yield f'<path d="M{left} {base - height}V{base}H{left + width}" stroke="#555" fill="none"/>'
    for mark in range(0, len(times) + 1, 20):
        yield f'<text x="{x(mark):.0f}" y="{base + 18}" text-anchor="middle" font-size="12">{mark}</text>'
    for seconds in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5):
        if seconds < highest:
            y = base - height * seconds / highest
            yield f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end" font-size="12">{seconds:g}</text>'
    points = " ".join(
        f"{x(number):.1f},{base - height * min(1.0, seconds / highest):.1f}"
        for number, seconds in enumerate(times)
    )
    yield f'<polyline points="{points}" stroke="{COLOURS[2]}" fill="none" stroke-width="1.5"/>'
    for number, _ in result["replans"]:
        yield f'<path d="M{x(number):.1f} {base}v-{height}" stroke="#2e4057" stroke-dasharray="3 3"/>'
    yield (
        f'<text x="{left + width}" y="{base - height + 4}" text-anchor="end" font-size="12">dashed: '
        "batches change</text>"
    )


def _on_three_hosts(rounds: int, steps: int, weight: int) -> Dict[str, Any]:
    with hosts(HOSTS) as lab, on_hosts(lab, QUOTAS, [RATE] * 3, weight) as machines:
        return {**compare(machines, rounds, steps, Work()), "rate": RATE}


def main() -> None:
    """Measure, or draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parts = ("processes", "hosts", "slow-down", "cost", "draw")
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind is run [3]")
    parser.add_argument("--steps", type=int, default=80, help="steps per run [80]")
    parser.add_argument("--passes", type=int, default=Work().passes, help="work per sample [%(default)s]")
    parser.add_argument("--weight", type=int, default=0, help="of the ranks against other processes")
    parser.add_argument("--add", action="store_true", help="processes, hosts: keep the rounds of before, too")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    rounds, steps = (1, 40) if args.quick else (args.rounds, args.steps)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}

    def local(measure: Callable[[Machines], Dict[str, Any]]) -> Dict[str, Any]:
        with processes(QUOTAS, args.weight) as machines:
            return measure(machines)

    for part in args.parts:
        print(part, flush=True)
        if part == "draw":
            PICTURE.write_text("\n".join(bars(results)) + "\n")
            continue
        if part == "processes":
            found = local(lambda machines: compare(machines, rounds, steps, Work(passes=args.passes)))
        elif part == "hosts":
            found = _on_three_hosts(rounds, steps, args.weight)
        elif part == "slow-down":
            found = local(lambda machines: slow_down(machines, HALF.step + 60, Work(passes=args.passes)))
        else:
            found = local(lambda machines: cost(machines, rounds, 50 * steps))
        if args.add and part in results:
            found = together(results[part], found)
        results[part] = found
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({name: value for name, value in found.items() if name != "times"}), flush=True)


if __name__ == "__main__":
    main()
