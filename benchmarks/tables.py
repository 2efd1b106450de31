"""Makes the tables of the documentation from benchmarks/results, and its pictures:

    python benchmarks/tables.py            rewrites the tables in docs/*.md
    python benchmarks/tables.py --pictures also draws docs/machines.svg (needs matplotlib)
    python benchmarks/tables.py --check    exit code 1 and the lines that differ, if a page has other numbers

A table is found by the line of its head; its rows are replaced, and its head where that follows from results.
"""

from __future__ import annotations

import argparse
import difflib
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import limits
from cells import RESULTS, Rows, duration, median, ratio, result, size_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Table(NamedTuple):
    """A table of a page."""

    page: str
    head: str  # the first cells of its head
    number: int  # among the page's tables with this head, from 0
    rows: Callable[[], Rows]
    columns: Optional[Callable[[], Sequence[str]]] = None  # the whole head, where it depends on results


ONE_HOST = "one_host"
NAMES = {
    "ringcomm": "ringcomm", "ringcomm-shared": "`rc.empty`", "ringcomm-shm": "shm", "ringcomm-tcp": "TCP",
    "gloo": "Gloo", "openmpi": "Open MPI", "openmpi-tcp": "Open MPI, TCP", "mpich": "MPICH",
    "mpich-tcp": "MPICH, TCP",
}  # fmt: skip
"""Peers of compare.py, and what their columns are called."""
PEERS = {
    "one": ("ringcomm", "ringcomm-shared", "ringcomm-tcp", "gloo", "openmpi", "mpich"),
    "four": ("ringcomm", "ringcomm-tcp", "gloo", "openmpi"),
    "others": ("ringcomm", "ringcomm-tcp", "gloo", "openmpi"),
}
"""The peers that the table of a run shows."""
SIZES = {
    "one": (8, 16384, 262144, 1_000_000, 16_000_000, 64_000_000, 256_000_000),
    "four": (8, 16384, 1_000_000, 16_000_000, 64_000_000),
    "others": (8, 1_000_000, 16_000_000),
}
"""The sizes that the table of a run shows, in bytes."""
GRADIENT_BYTES = 4 * 25_557_032
RATIOS = (("gloo", "ringcomm"), ("openmpi", "ringcomm"))
BOUNDED_BYTES = 1_000_000
"""From here on a bound by copies and additions says something."""


def columns(run: str) -> Callable[[], List[str]]:
    """The head of :func:`beside_peers`."""

    def head() -> List[str]:
        several = len({name.split()[1] for name in result(ONE_HOST)["runs"][run]["seconds"]}) > 1
        compared = [f"{NAMES[slow]} / {NAMES[own]}" for slow, own in RATIOS]
        return [*["collective"] * several, "size", "bound", *(NAMES[peer] for peer in PEERS[run]), *compared]

    return head


def beside_peers(run: str) -> Callable[[], Rows]:
    """One run of compare.py, by its name: medians of the rounds, and medians of the rounds' ratios."""

    def rows() -> Rows:
        found = result(ONE_HOST)
        seconds: Dict[str, Dict[str, Any]] = found["runs"][run]["seconds"]
        several = len({name.split()[1] for name in seconds}) > 1
        machine = found["runs"]["one"]
        for name, times in seconds.items():
            ranks, collective, size = name.split()
            if int(size) not in SIZES[run]:
                continue
            bound = limits.lower_bound(machine["limits"], collective, int(size), int(ranks), machine["cores"])
            cells = [collective] if several else []
            bounded = bound is not None and int(size) >= BOUNDED_BYTES
            cells += [size_text(int(size)), duration(bound) if bounded else ""]
            cells += [duration(median(times[peer])) if peer in times else "" for peer in PEERS[run]]
            measured = [(times.get(slow), times.get(own)) for slow, own in RATIOS]
            yield cells + [f"{ratio(one, other):.2f}" if one and other else "" for one, other in measured]

    return rows


def gradients() -> Rows:
    """ResNet-50's gradients."""
    found = result(ONE_HOST)["resnet50"]["rounds"]
    ways = {
        "per-tensor": "one by one", "grouped": "grouped", "one-bucket": "in one bucket",
        "ddp-buckets": "in DDP's buckets", "ddp-buckets-view": "in DDP's buckets, as views of them",
        "small-buckets-view": "as views of buckets of 8 MiB",
    }  # fmt: skip
    base, machine = found["gloo, ddp-buckets-view"], result(ONE_HOST)["runs"]["one"]
    bound = limits.lower_bound(machine["limits"], "allreduce", GRADIENT_BYTES, 2, machine["cores"])
    if bound is not None:
        yield ["bound", "copies and additions alone", duration(bound), f"{median(base) / bound:.2f}"]
    shown = set()
    for name in sorted(found, key=lambda name: median(found[name])):
        peer, _, mode = name.partition(", ")
        if peer in shown and not name.startswith("ringcomm, "):
            continue  # of a peer its fastest way
        shown.add(peer)
        yield [NAMES[peer], ways[mode], duration(median(found[name])), f"{ratio(base, found[name]):.2f}"]


def ddp() -> Rows:
    """PyTorch over the backend, beside Gloo."""
    for what, times in result("ddp")["seconds"].items():
        ways = ("ringcomm-tcp", "ringcomm")
        cells = [duration(median(times[way])) if way in times else "" for way in (*ways, "gloo")]
        ratios = [f"{ratio(times['gloo'], times[way]):.2f}" if way in times else "" for way in ways]
        yield [what, *cells, *ratios]


def small_steps() -> Rows:
    """Steps of a small model: milliseconds, and the overhead as a part of what it is compared with."""
    found = result("small_steps")
    shown = ("1 direct", "1 named", "12 direct", "12 named")
    for framework, places in found.items():
        for name in places["2 ranks"]["lines"]:
            if framework == "none" or name not in shown:
                lines = [places.get(place, {"lines": {}})["lines"].get(name, {}) for place in found["none"]]
                yield [name, *(
                    f"{1e3 * line['median_s']:.2f}" + (f" ({line['ratio']:.2f})" if "ratio" in line else "")
                    for line in lines if line
                )]  # fmt: skip


def links() -> Rows:
    """All-reduces between hosts, beside Gloo."""
    for row in result("links")["rows"]:
        if row["bytes"] == 4_000_000:
            continue  # the shaper lets a part of it pass at once
        yield [row["network"], size_text(row["bytes"])] + [
            duration(row["bound_s"]),
            *(duration(median(row["seconds"][peer])) for peer in ("ringcomm", "gloo")),
            *(f"{row['bound_s'] / median(row['seconds'][peer]):.3f}" for peer in ("ringcomm", "gloo")),
            f"{ratio(row['seconds']['gloo'], row['seconds']['ringcomm']):.2f}",
        ]


def on_a_device() -> Rows:
    for name, found in result("device").items():
        for nbytes in ("65536", "1048576", "16777216", "268435456"):
            seconds = found["seconds"][nbytes]
            ways = ("ringcomm", "CuPy", "by hand", "Gloo")
            times = [f"{1e3 * seconds[way]:.3g}" for way in ways]
            label = f"{size_text(int(nbytes))}, {name.rpartition(', ')[2]}"
            yield [label, *times, f"{seconds['Gloo'] / seconds['ringcomm']:.2f}"]


def steps_on_a_device() -> Rows:
    for what, times in result("device_steps")["seconds"].items():
        if "8 B" in what or what == "barrier":
            continue
        for name in ("ringcomm", "ringcomm-tcp"):
            if name in times:
                ours, theirs = median(times[name]), median(times["gloo"])
                step = "DistributedOptimizer" if "Optimizer" in what else "DistributedDataParallel"
                transport = "TCP" if name.endswith("tcp") else "auto"
                ratio = median([gloo / own for own, gloo in zip(times[name], times["gloo"])])
                yield [step, transport, f"{1e3 * ours:.1f} ms", f"{1e3 * theirs:.1f} ms", f"{ratio:.2f}"]


def unequal_machines() -> Rows:
    found = result("unequal")
    labels = {
        "processes": "three processes, gradients of 256 KB",
        "hosts": "three hosts (namespaces), links of 1 Gbit/s, gradients of 256 KB",
    }
    for name, label in labels.items():
        one = found[name]
        alone, equal, balanced = one["median_s"].values()
        gains = f"{one['against_alone']:.2f} and {one['against_equal']:.2f} times as fast"
        yield [label, f"{alone:.3f} s", f"{equal:.3f} s", f"{balanced:.3f} s: {gains}"]


def larger_models() -> Rows:
    """Parallel training and messages over ringcomm and Gloo, by link."""
    names = ("larger", "larger_16_cores", "larger_1gbit", "larger_100mbit")
    steps = [result(name)["seconds"] for name in names]
    for what in steps[0]:
        if not what.endswith((" bf16", " int8")):
            times = [(median(run[what]["ringcomm"]), median(run[what]["gloo"])) for run in steps]
            yield [what, *(f"{duration(ours)} / {duration(gloo)}" for ours, gloo in times)]
    for nbytes in (8, 65536, 16_000_000):
        cells = [f"message there and back, {size_text(nbytes)}"]
        for name in ("messages", "", "messages_1gbit", "messages_100mbit"):
            rows = result(name)["summary"] if name else ()
            found = {row["peer"]: row["seconds"] for row in rows if row["bytes"] == nbytes}
            cells.append(f"{duration(found['ringcomm-torch'])} / {duration(found['gloo'])}" if found else "")
        yield cells


def slow_links() -> Rows:
    """Training steps over links of several rates."""
    runs = {run["mbit_per_s"]: run["steps"] for run in result("compression")["steps"]}
    for name in runs[100]:
        if "PowerSGD" not in name:
            label = name.replace("streaming", "`fragments=4, overlap=4`")
            yield [label, *(f"{median(runs[rate][name]):.2f} s" for rate in (1000, 300, 100))]


def local_steps() -> Rows:
    """The accuracy of local steps, in some cells of the result."""
    quantiles = {10: 2.262, 20: 2.093}  # of Student's t, for an interval of 95 %
    shown = (
        "digits, perceptron, 0.05", "digits, batch normalization, 0.1", "textures, 0.0167",
        "characters, transformer, 0.4", "textures, AdamW, 0.003", "digits, perceptron, AdamW, 0.003",
    )  # fmt: skip
    for name in shown:
        found = result("local_steps")[name]
        cells = {}
        for way in ("LocalSGD", "LocalSGD 16"):
            differences = [one - other for one, other in zip(found.get(way, ()), found["float32"])]
            if differences:
                middle, count = statistics.mean(differences), len(differences)
                half = quantiles[count] * statistics.stdev(differences) / math.sqrt(count)
                cells[way] = f"{middle:+.2f} ({middle - half:+.2f} to {middle + half:+.2f})"
        exchanges = f"{found['exchanges']['LocalSGD']:.0%}".replace("%", " %")
        yield [name, f"{statistics.mean(found['float32']):.2f}", cells["LocalSGD"], exchanges,
               cells.get("LocalSGD 16", "")]  # fmt: skip


def lost_hosts() -> Rows:
    """Return how long training stands still when one of three hosts dies."""
    measured = result("lost_host")
    limit = f"over {measured['limit_s']:.0f}"
    for name in ("ringcomm", "torchrun"):
        times = sorted(math.inf if each is None else each for each in measured["seconds"][name])
        each = ", ".join(f"{value:.1f}" if math.isfinite(value) else limit for value in times)
        yield [name, each, f"{median(times):.1f} s"]


TABLES: Tuple[Table, ...] = (
    Table("docs/performance.md", "size | bound", 0, beside_peers("one"), columns("one")),
    Table("docs/performance.md", "size | bound", 1, beside_peers("four"), columns("four")),
    Table("docs/performance.md", "collective | size", 0, beside_peers("others"), columns("others")),
    Table("docs/performance.md", "peer | gradients", 0, gradients),
    Table("docs/performance.md", "what | ringcomm over TCP", 0, ddp),
    Table("docs/performance.md", "step | 2 ranks", 0, small_steps),
    Table("docs/performance.md", "links | size", 0, links),
    Table("docs/gpu.md", "array and transport", 0, on_a_device),
    Table("docs/gpu.md", "step | transport", 0, steps_on_a_device),
    Table("docs/unequal.md", " | fast one alone", 0, unequal_machines),
    Table("docs/larger_models.md", "ringcomm / Gloo", 0, larger_models),
    Table("docs/slow_links.md", "per step", 0, slow_links),
    Table("docs/slow_links.md", "task, learning rate", 0, local_steps),
    Table("docs/elastic.md", "one of three hosts dies", 0, lost_hosts),
)


def find(lines: Sequence[str], table: Table) -> Tuple[int, int]:
    """The first and the last line of a table's rows, the latter excluded."""
    head = f"| {table.head}".replace("|  |", "| |")
    heads = [index for index, line in enumerate(lines) if line.startswith(head)]
    first = heads[table.number] + 2
    last = first
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    return first, last


def made(text: str, tables: Sequence[Table]) -> str:
    """A page with its tables from the results."""
    lines = text.split("\n")
    for table in tables:
        first, last = find(lines, table)
        lines[first:last] = [f"| {' | '.join(row)} |" for row in table.rows()]
        if table.columns is not None:
            columns = table.columns()
            lines[first - 2 : first] = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns))]
    return "\n".join(lines)


def differences() -> List[str]:
    """The lines in which pages and results differ."""
    found: List[str] = []
    for page in dict.fromkeys(table.page for table in TABLES):
        text = (ROOT / page).read_text()
        new = made(text, [table for table in TABLES if table.page == page])
        found += difflib.unified_diff(
            text.split("\n"), new.split("\n"), page, "benchmarks/results", lineterm="", n=0
        )
    return found


def main() -> int:
    """Rewrite the pages, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page differs")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    args = parser.parse_args()
    found = differences()
    print("\n".join(found))
    if args.check:
        return 1 if found else 0
    for page in dict.fromkeys(table.page for table in TABLES):
        path = ROOT / page
        path.write_text(made(path.read_text(), [table for table in TABLES if table.page == page]))
    if args.pictures:
        import figure

        figure.draw_machines(figure.seconds_on_machines(RESULTS), figure.terms(RESULTS), figure.MACHINES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
