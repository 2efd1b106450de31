"""Makes the tables of the documentation from benchmarks/results, and its pictures:

    python benchmarks/tables.py            rewrites the tables in docs/*.md
    python benchmarks/tables.py --pictures draws the pictures of docs/ anew, too (needs matplotlib)
    python benchmarks/tables.py --check    exit code 1 and the lines that differ, if a page has other numbers

A table is found by the line of its head; its rows are replaced, and its head where that follows from results.
tests/test_tables.py makes the check.
"""

from __future__ import annotations

import argparse
import difflib
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import performance_tables
from cells import RESULTS, Rows, duration, median, milliseconds, ratio, result
from report import size_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        page: its path.
        head: the first cells of its head.
        number: which one of the page's tables with this head, from 0.
        rows: makes the rows.
        columns: makes the whole head, where it depends on what was measured.
    """

    page: str
    head: str
    number: int
    rows: Callable[[], Rows]
    columns: Optional[Callable[[], Sequence[str]]] = None


# -- docs/compression.md --------------------------------------------------------------------------


def compression_steps() -> Rows:
    by_rate = {run["mbit_per_s"]: run["steps"] for run in result("compression")["steps"]}
    for name in by_rate[1000]:
        shown = name.replace("streaming", "`fragments=4, overlap=4`")
        yield [shown, *(f"{median(by_rate[rate][name]):.2f} s" for rate in (3000, 1000, 300, 100))]


def local_speed() -> Rows:
    names = ("no communication", "DDP, Gloo", "ringcomm float32", "ringcomm int8", "ringcomm LocalSGD, int8")
    for run in result("local_steps_speed"):
        megabytes = 102 * run.get("scale", 1.0)
        times = (f"{median(run['steps'][name]):.2f} s" for name in names)
        yield [f"{run['mbit_per_s']} Mbit/s, {megabytes:.0f} MB", *times]


def compression_allreduce() -> Rows:
    fast, slow = result("compression")["allreduce"]
    for name, times in fast["allreduce"].items():
        processor, slowly = median(fast["processor"][f"allreduce {name}"]), median(slow["allreduce"][name])
        yield [name, f"{median(times):.2f} s", f"{processor:.2f} s", f"{slowly:.1f} s"]


def compression_auto() -> Rows:
    for run in result("compression")["auto"]:
        rate = run["mbit_per_s"]
        link = f"{rate // 1000} Gbit/s" if rate >= 1000 else f"{rate} Mbit/s"
        for case in run["auto"]:
            measured = {name: median(times) for name, times in case["measured"].items()}
            predicted = case["predicted"]
            chosen = case["chosen"].replace("none", "float32")
            yield [
                f"{link}, {case['backward_s']:g} s",
                *(f"{measured[name]:.2f} ({predicted[name]:.2f})" for name in ("none", "bf16", "int8")),
                f"{chosen}, {measured['auto']:.2f}",
            ]


def compression_overlap() -> Rows:
    for run in result("compression")["overlap"]:
        rate = run["mbit_per_s"]
        link = f"{rate // 1000} Gbit/s" if rate >= 1000 else f"{rate} Mbit/s"
        columns = ("none", "none, overlapping", "int8", "int8, overlapping")
        yield [f"{link}, {102 * run['scale']:.0f} MB", *(f"{run['overlap'][name]:.2f}" for name in columns)]


def compression_exposed() -> Rows:
    for run in result("compression")["exposed"]:
        steps = {name: median(times) for name, times in run["steps"].items()}
        parts, alone = (
            {part: median(times) for part, times in run[name].items()}
            for name in ("int8", "no communication")
        )
        own = (parts["waited"], parts["computed"] - alone["computed"], parts["after"], parts["process"])
        yield [
            str(run["ranks"]), *(f"{steps[name]:.3f}" for name in ("no communication", "DDP, Gloo")),
            f"{steps['ringcomm int8']:.3f}", f"{steps['DDP, Gloo'] / steps['ringcomm int8']:.2f}",
            f"{steps['DDP, Gloo'] / steps['no communication']:.2f}", *(f"{seconds:.3f}" for seconds in own),
        ]  # fmt: skip


def accuracies(task: str) -> Callable[[], Rows]:
    """A table of accuracies; all methods have the same ten seeds as float32."""
    found = result("accuracy")[task]
    more = result("accuracy").get(f"{task}_40_seeds", {})

    def rows() -> Rows:
        for name, values in found.items():
            low, mean, high = interval(values, found["float32"], 2.262)
            shown = f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
            lost_nothing = "yes" if max(-low, high) <= 0.5 else "no"
            if name in more and lost_nothing == "no":
                low, _, high = interval(more[name], more["float32"], 2.023)
                again = "yes" if max(-low, high) <= 0.5 else "no"
                lost_nothing += f"; with 40 seeds (see below) {again}"
            about = ["", ""] if name == "float32" else [shown, lost_nothing]
            yield [name, f"{statistics.mean(values):.2f}", *about]

    return rows


STUDENT = {2: 12.706, 10: 2.262, 20: 2.093}
"""97.5 % quantiles of Student's t for n - 1 degrees of freedom, by n."""


def local_steps() -> Rows:
    """Paired differences to float32 by cell and method, and after what part of the steps ranks exchanged."""
    for label, cell in result("local_steps").items():

        def difference(name: str, cell: Any = cell) -> str:
            pairs = list(zip(cell.get(name, ()), cell["float32"]))
            if len(pairs) < 2:
                return f"{pairs[0][0] - pairs[0][1]:+.2f}" if pairs else "-"
            low, mean, high = interval(*zip(*pairs), STUDENT[len(pairs)])
            return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"

        shares = {name: f"{100 * share:.0f} %" for name, share in cell["exchanges"].items()}
        yield [
            label, f"{statistics.mean(cell['float32']):.2f}",
            difference("LocalSGD"), shares["LocalSGD"],
            difference("weights only"), shares.get("weights only", "-"),
            *(difference(name) for name in ("weights only, int8", "LocalSGD 16", "LocalSGD.diloco")),
        ]  # fmt: skip


def interval(values: Sequence[float], others: Sequence[float], student: float) -> Tuple[float, float, float]:
    """The mean of paired differences between its limits of 95 %, with Student's factor for their number."""
    differences = [one - other for one, other in zip(values, others)]
    half = student * statistics.stdev(differences) / len(differences) ** 0.5
    mean = statistics.mean(differences)
    return mean - half, mean, mean + half


# -- docs/jax.md, docs/gpu.md, docs/unequal.md ------------------------------------------------------


def jax_times() -> Rows:
    found = result("jax")

    def shown(microseconds: float) -> str:
        ms = microseconds / 1000
        return f"{ms:.0f} ms" if ms >= 10 else f"{ms:#.2g} ms"

    for count, name in (("1024", "1 KB"), ("1000000", "1 MB"), ("64000000", "64 MB")):
        best, middle = found["fastest_tenth_us"][count], found["median_us"][count]
        yield [name, *(f"{shown(best[how])} ({shown(middle[how])})" for how in best)]


def on_a_device() -> Rows:
    for name, found in result("device").items():
        for nbytes, seconds in found["seconds"].items():
            ways = ("ringcomm", "CuPy", "by hand", "Gloo", "host", "copies")
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


def lost_hosts() -> Rows:
    """Return how long training stands still when one of three hosts dies."""
    measured = result("lost_host")
    limit = f"over {measured['limit_s']:.0f}"
    for name in ("ringcomm", "torchrun"):
        times = sorted(math.inf if each is None else each for each in measured["seconds"][name])
        each = ", ".join(f"{value:.1f}" if math.isfinite(value) else limit for value in times)
        yield [name, each, f"{median(times):.1f} s"]


def advice() -> Rows:
    from advisor import summary

    for line in summary(result("advisor")).splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def larger_models(compressed: bool) -> Callable[[], Rows]:
    """Steps of models that are divided, on one host and over links, beside Gloo.

    Args:
        compressed: whether the rows are those of a pipeline with its codecs, over links; otherwise all else.
    """
    files = {
        "larger": "one host",
        "larger_16_cores": "one host, 16 cores",
        "larger_1gbit": "1 Gbit/s",
        "larger_100mbit": "100 Mbit/s",
    }

    def rows() -> Rows:
        for file, link in files.items():
            for what, times in result(file)["seconds"].items():
                codec = what.partition(" as ")[2]
                over_links = what.startswith("pipeline") and "host" not in link
                if not over_links if compressed else codec:
                    continue
                ways = ("ringcomm-tcp", "ringcomm")
                ours = ", ".join(milliseconds(median(times[way])) for way in ways)
                ratios = ", ".join(f"{ratio(times['gloo'], times[way]):.2f}" for way in ways)
                label = (f"`{codec}`" if codec else "float32") if compressed else what
                yield [link, label, f"{ours} ms", f"{milliseconds(median(times['gloo']))} ms", ratios]

    return rows


def round_trips() -> Rows:
    """Messages between two ranks, there and back: of a host, and of two hosts."""
    where = {"messages": "one host", "messages_1gbit": "1 Gbit/s", "messages_100mbit": "100 Mbit/s"}
    for file, links in where.items():
        found = {(item["bytes"], item["peer"]): item["seconds"] for item in result(file)["summary"]}
        for size_bytes in sorted({size for size, _ in found}):
            cells = [links, size_text(size_bytes)]
            for name in ("ringcomm-torch-tcp", "ringcomm-torch", "gloo", "openmpi-tcp", "openmpi"):
                seconds = found.get((size_bytes, name))
                cells.append("" if seconds is None else duration(seconds))
            yield cells


# -- docs/machines.md -----------------------------------------------------------------------------


def memory() -> Rows:
    for row in result("memory")["rows"]:
        parts = ("numpy", "init", "reductions", "all", "agent")
        yield [str(row["ranks"]), *(f"{row[f'{part}_rss']:.1f} MB" for part in parts)]


TABLES: Tuple[Table, ...] = (
    Table("docs/compression.md", "step, backward pass of 0.2 s", 0, compression_steps),
    Table("docs/compression.md", "local steps, backward pass", 0, local_speed),
    Table("docs/compression.md", "all-reduce of 102 MB", 0, compression_allreduce),
    Table("docs/compression.md", "link, backward pass", 0, compression_auto),
    Table("docs/compression.md", " | float32 | overlapping", 0, compression_overlap),
    Table("docs/compression.md", "ranks on two cores", 0, compression_exposed),
    Table("docs/compression.md", " | accuracy", 0, accuracies("digits")),
    Table("docs/compression.md", " | accuracy", 1, accuracies("textures")),
    Table("docs/machines.md", "ranks | Python and NumPy", 0, memory),
    Table("docs/compression.md", "task, learning rate", 0, local_steps),
    Table("docs/jax.md", "float32, 2 ranks", 0, jax_times),
    Table("docs/larger_models.md", "links | ringcomm sends", 0, larger_models(True)),
    Table("docs/larger_models.md", "links | what", 0, larger_models(False)),
    Table("docs/larger_models.md", "links | there and back", 0, round_trips),
    Table("docs/gpu.md", "array and transport", 0, on_a_device),
    Table("docs/gpu.md", "step | transport", 0, steps_on_a_device),
    Table("docs/unequal.md", " | fast one alone", 0, unequal_machines),
    Table("docs/unequal.md", "of a core", 0, advice),
    Table("docs/elastic.md", "one of three hosts dies", 0, lost_hosts),
    *(
        Table("docs/performance.md", head, number, rows, columns)
        for head, number, rows, columns in performance_tables.TABLES
    ),
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
    """A page with its tables made anew."""
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


def pictures() -> None:
    """Draw what the benchmarks draw from results."""
    import figure
    import unequal

    figure.draw(figure.speed(), figure.PICTURE)
    figure.draw_machines(figure.seconds_on_machines(RESULTS), figure.terms(RESULTS), figure.MACHINES)
    unequal.PICTURE.write_text("\n".join([*unequal.bars(result("unequal")), ""]))


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
        pictures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
