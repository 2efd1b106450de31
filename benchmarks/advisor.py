"""How far the advisor is from what is measured: `ringrun --advise`, and then every subset of hosts.

    sudo python benchmarks/advisor.py                     measures all configurations
    sudo python benchmarks/advisor.py --only 1 4          some of them; the others' results stay
    python benchmarks/advisor.py --summary                the table of what was measured

A configuration is three hosts of namespaces with CPU quotas and shaped links, a batch, and gradients of some
size that are sent in some codec. For each, `ringrun --advise` runs once on all three; then every subset of
them trains with the batches that the advice names. Results are in benchmarks/results/advisor.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from peers.unequal_jobs import Work, hosts, on_hosts, settled

RESULTS = Path(__file__).resolve().parent / "results" / "advisor.json"
HOSTS = ("desk", "jetson1", "jetson2")
MAX_STEPS, MIN_STEPS = 30, 10
RUN_S = 4.0
"""About so long each subset trains."""


class Configuration(NamedTuple):
    """Three hosts and what they train."""

    quotas: Tuple[float, ...]
    rates: Tuple[str, ...]
    megabytes: float
    codec: str
    passes: int = 400

    def work(self) -> Work:
        """Return what a step computes and reduces."""
        return Work(passes=self.passes, gradient_bytes=int(self.megabytes * 1024 * 1024), codec=self.codec)


CONFIGURATIONS = (
    Configuration((0.9, 0.3, 0.3), ("1gbit",) * 3, 1, "float32"),
    Configuration((0.8, 0.4, 0.2), ("1gbit",) * 3, 8, "float32"),
    Configuration((0.5, 0.5, 0.5), ("300mbit",) * 3, 2, "float32"),
    Configuration((0.9, 0.3, 0.3), ("100mbit",) * 3, 4, "float32"),
    Configuration((0.6, 0.6, 0.15), ("1gbit", "1gbit", "100mbit"), 1, "float32"),
    Configuration((0.8, 0.2, 0.2), ("100mbit",) * 3, 2, "float32"),
    Configuration((0.7, 0.35, 0.35), ("200mbit",) * 3, 2, "bf16"),
    Configuration((0.6, 0.4, 0.3), ("500mbit",) * 3, 4, "bf16"),
    Configuration((0.75, 0.5, 0.25), ("500mbit", "500mbit", "200mbit"), 3, "int8"),
)
"""None but the fourth was used while the advisor was built; the last was added when it was done."""


class Said(NamedTuple):
    """The advice: seconds per step and batches by codec and hosts, the recommended hosts, and the line."""

    jobs: Dict[Tuple[str, Tuple[str, ...]], Tuple[float, List[int]]]
    best: Tuple[str, ...]
    text: str


def understood(output: str) -> Said:
    """The table and the recommendation that ringrun has printed."""
    rows = re.findall(r"^ringrun: +([\d.]+) s +[\d.]+ +(\w+) +([\d/]+) +([\w, ]+?) *$", output, re.MULTILINE)
    line = re.search(r"^ringrun: (?:use|one machine alone is fastest:) (.*)$", output, re.MULTILINE)
    if not rows or line is None:
        raise SystemExit(f"no advice was printed:\n{output}")
    jobs = {
        (codec, tuple(names.split(", "))): (float(seconds), [int(share) for share in shares.split("/")])
        for seconds, codec, shares, names in rows
    }
    chosen = re.split(r";|:| with ", line.group(1))[0]
    best = tuple(name for name in HOSTS if name in re.split(r", | and ", chosen))
    return Said(jobs, best, line.group(0).replace("ringrun: ", "", 1))


def measure(lab: Any, configuration: Configuration, weight: int) -> Dict[str, Any]:
    """The advice, and the measured step of every subset."""
    with on_hosts(lab, configuration.quotas, configuration.rates, weight) as machines:
        said = understood(machines.advise([0, 1, 2], configuration.work()))
        print(f"  {said.text}", flush=True)
        rows: List[Dict[str, Any]] = []
        for count in (1, 2, 3):
            for chosen in combinations(range(3), count):
                names = tuple(HOSTS[number] for number in chosen)
                predicted_s, shares = said.jobs["any" if count == 1 else configuration.codec, names]
                steps = max(MIN_STEPS, min(MAX_STEPS, int(RUN_S / predicted_s)))
                run = machines.train(chosen, shares, steps, configuration.work())
                measured_s = statistics.fmean(settled(run.times[0]))
                rows.append({
                    "hosts": list(names), "predicted_s": predicted_s, "measured_s": measured_s,
                    "computed_s": [statistics.median(settled(times)) for times in run.computed],
                    "shares": shares,
                })  # fmt: skip
                print(f"  {', '.join(names)}: {predicted_s:.4f} {measured_s:.4f}", flush=True)
    return {
        "configuration": configuration._asdict(), "text": said.text, "best": list(said.best),
        "rows": rows, "load": os.getloadavg()[0],
    }  # fmt: skip


def recommended(found: Dict[str, Any]) -> Dict[str, Any]:
    """The advisor's choice with this codec, by its rule: a further host must shorten the step by 5 %.

    The line that it prints may name another codec, and other hosts for it.
    """
    limit_s = min(row["predicted_s"] for row in found["rows"]) / 0.95
    near = [row for row in found["rows"] if row["predicted_s"] <= limit_s]
    return min(near, key=lambda row: (len(row["hosts"]), row["predicted_s"]))


def judged(found: Dict[str, Any]) -> Dict[str, Any]:
    """Return how far the predictions are off, and how good the recommended subset is."""
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1.0) for row in found["rows"]]
    chosen = recommended(found)
    quickest = min(found["rows"], key=lambda row: row["measured_s"])
    return {
        "error_of_the_recommended": abs(chosen["predicted_s"] / chosen["measured_s"] - 1.0),
        "worst_error": max(errors),
        "slower_than_the_best": chosen["measured_s"] / quickest["measured_s"] - 1.0,
        "measured_best": quickest["hosts"],
    }


def summary(results: Dict[str, Any]) -> str:
    """A table in Markdown."""
    lines = [
        "| of a core | links | gradients | recommended | predicted | measured | error | "
        "worst subset's error | slower than the best subset |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for _, found in sorted(results.items()):
        given = Configuration(**found["configuration"])
        about, chosen = judged(found), recommended(found)
        rates: Sequence[str] = given.rates[:1] if len(set(given.rates)) == 1 else given.rates
        lines.append(
            f"| {'/'.join(f'{quota:g}' for quota in given.quotas)} | {'/'.join(rates)} | "
            f"{given.megabytes:g} MB, {given.codec} | {', '.join(chosen['hosts'])} | "
            f"{chosen['predicted_s']:.3f} s | {chosen['measured_s']:.3f} s | "
            f"{100 * about['error_of_the_recommended']:.0f} % | {100 * about['worst_error']:.0f} % | "
            f"{100 * about['slower_than_the_best']:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="configurations, from 0")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="[%(default)s]")
    parser.add_argument("--weight", type=int, default=0, help="of the ranks against other processes")
    parser.add_argument("--summary", action="store_true", help="only show what was measured")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.summary:
        with hosts(HOSTS) as lab:
            for number in args.only or range(len(CONFIGURATIONS)):
                print(f"{number}: {CONFIGURATIONS[number]}", flush=True)
                results[str(number)] = measure(lab, CONFIGURATIONS[number], args.weight)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(summary(results))


if __name__ == "__main__":
    main()
