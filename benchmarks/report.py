"""From times to something to read: Markdown tables with ratios, and plots.

python benchmarks/report.py DIR      makes the tables and plots of DIR/compare.json anew
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import limits as bounds
import machine
from measure import Sample, medians, speedups
from peers.catalog import baseline_of, find

BUS_FACTOR: Dict[str, Callable[[int], float]] = {
    "allreduce": lambda p: 2 * (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "allgather": lambda p: (p - 1) / p,
    "reducescatter": lambda p: (p - 1) / p,
    "alltoall": lambda p: (p - 1) / p,
    "message": lambda p: 2.0,
}
"""Bus bandwidth is size / time times this, as in NCCL's tests: what a rank must send at least, per second."""

EFFICIENCY_FROM_BYTES = 1_000_000


def size_text(size_bytes: int) -> str:
    """8 B, 64 KiB, 256 MB: whole megabytes, or else powers of two, are called what they are."""
    if size_bytes and size_bytes % 1_000_000 == 0:
        return f"{size_bytes // 1_000_000} MB"
    for unit, suffix in ((1 << 20, " MiB"), (1 << 10, " KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    for unit, suffix in ((1_000_000, " MB"), (1000, " kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g}{suffix}"
    return f"{size_bytes} B"


def time_text(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def ratio_text(ratio: float) -> str:
    """Return how many times as fast, with as many digits as it deserves."""
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×" if ratio >= 9.95 else f"{ratio:.2f}×"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return [*lines, ""]


def ordered(values: Any) -> List[Any]:
    """Each once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def heading(title: str, facts: Dict[str, Any], noise: str) -> List[str]:
    """Title, machine, and how quiet it was."""
    about = (
        f"{facts['when']}, {facts['cores']} cores ({facts['cpu']}), {facts['memory_GiB']} GiB, "
        f"Linux {facts['kernel']}, Python {facts['python']}, ringcomm {facts['ringcomm']}; "
        f"the system's congestion control is {facts['congestion']} "
        f"(available: {facts['congestion_available']})."
    )
    settings = "".join(f"{name}={value} " for name, value in facts["settings"].items())
    return [f"# {title}", "", about, "", noise, "", f"    {settings}{facts['command']}", ""]


def core_lines(states: Sequence[str]) -> List[str]:
    """Return what cores.py saw before and after; nothing on one core."""
    return [f"The cores before and after: {', '.join(states)}.", ""] if states else []


def version_lines(versions: Dict[str, Dict[str, Any]], left_out: Dict[str, str]) -> List[str]:
    """Return what was measured, and what was not and why."""
    lines = []
    for peer, facts in versions.items():
        details = ", ".join(f"{name} {value}" for name, value in facts.items())
        lines.append(f"- **{peer}**: {details}")
    lines += [f"- {peer}: left out, {reason}" for peer, reason in left_out.items()]
    return [*lines, ""]


def failure_lines(failures: Sequence[Dict[str, Any]]) -> List[str]:
    """Runs that failed; their cells are empty or rest on fewer rounds."""
    if not failures:
        return []
    lines = ["## Failed runs", ""]
    for each in failures:
        how = "ran too long" if each["exit"] is None else f"exit code {each['exit']}"
        said = each["output"].strip().splitlines() or ["no output"]
        last = ([line for line in said if "error" in line.lower()] or said)[-1]
        lines.append(
            f"- {each['peer']}, np={each['np']}, {each['tasks']}, round {each['round'] + 1}: {how}: `{last}`"
        )
    return [*lines, ""]


def _key(sample: Sample) -> Tuple[int, str, int, str]:
    return sample.np, sample.task["collective"], sample.task["bytes"], sample.peer


def _base(key: Tuple[int, str, int, str], measured: Sequence[str]) -> Tuple[int, str, int, str]:
    base = baseline_of(key[3])
    return (*key[:3], base if base in measured else baseline_of(""))


class Comparison:
    """The samples of a comparison, condensed."""

    def __init__(self, samples: Sequence[Sample], found: Sequence[bounds.Limit], cores: int) -> None:
        self.peers = ordered(sample.peer for sample in samples)
        self.nps = ordered(sample.np for sample in samples)
        self.collectives = ordered(sample.task["collective"] for sample in samples)
        self.sizes = sorted({sample.task["bytes"] for sample in samples})
        self.times = medians(samples, _key)
        self.ratios = speedups(samples, _key, lambda key: _base(key, self.peers))
        self._limits = found
        self._cores = cores

    def efficiency(self, key: Tuple[int, str, int, str]) -> Optional[float]:
        """Lower bound / measured, for peers that may use the host's memory."""
        np, collective, size, peer = key
        if size < EFFICIENCY_FROM_BYTES or key not in self.times or not find(peer).same_host:
            return None
        bound = bounds.lower_bound(self._limits, collective, size, np, self._cores)
        return bound / self.times[key] if bound else None

    def entries(self) -> List[Dict[str, Any]]:
        """One flat record per cell, for JSON."""
        return [
            {
                "np": key[0], "collective": key[1], "bytes": key[2], "peer": key[3], "seconds": seconds,
                "bus_bytes_per_s": key[2] / seconds * BUS_FACTOR[key[1]](key[0]),
                "times_baseline": self.ratios.get(key), "efficiency": self.efficiency(key),
            }
            for key, seconds in self.times.items()
        ]  # fmt: skip

    def cell(self, key: Tuple[int, str, int, str]) -> str:
        """`5.2× (38 µs)`."""
        if key not in self.times:
            return "–"
        text = time_text(self.times[key])
        ratio = self.ratios.get(key)
        if ratio is None or _base(key, self.peers) == key:
            return text
        return f"**{ratio_text(ratio)}** ({text})"

    def tables(self) -> List[str]:
        """One table per number of ranks and collective."""
        lines: List[str] = []
        for np in self.nps:
            for collective in self.collectives:
                rows = [
                    [size_text(size), *(self.cell((np, collective, size, peer)) for peer in self.peers)]
                    for size in self.sizes
                ]
                lines += [f"## {collective}, {np} ranks", "", *table(["size", *self.peers], rows)]
        return lines

    def efficiency_tables(self) -> List[str]:
        """Lower bound / measured for what may use the host's memory."""
        peers = [peer for peer in self.peers if find(peer).same_host]
        rows = []
        for np in self.nps:
            for collective in self.collectives:
                for size in self.sizes:
                    values = [self.efficiency((np, collective, size, peer)) for peer in peers]
                    if any(value is not None for value in values):
                        shown = ["–" if value is None else f"{value:.2f}" for value in values]
                        rows.append([collective, str(np), size_text(size), *shown])
        if not rows:
            return []
        about = [line.strip() for line in (bounds.lower_bound.__doc__ or "").splitlines()]
        return ["## Efficiency = lower bound / measured", "", *about, "",
                *table(["collective", "ranks", "size", *peers], rows)]  # fmt: skip


def comparison_report(data: Dict[str, Any]) -> Tuple[str, Comparison]:
    """The Markdown of compare.json, and what it shows."""
    samples = [Sample(**each) for each in data["collected"]["samples"]]
    facts, collected = data["machine"], data["collected"]
    found = Comparison(samples, data["limits"], facts["cores"])
    noise = machine.noise_line(data["quiet"], collected["others"])
    lines = heading("ringcomm beside its peers", facts, noise) + core_lines(data.get("cores", ()))
    lines += version_lines(collected["versions"], data["left_out"])
    lines += [
        "Each cell: **how many times as fast as Gloo** (the absolute time). A column X@CC is compared with "
        "gloo@CC if that was measured. float32, in place where the peer can; size = the whole buffer (the "
        "larger one where input and output differ); a barrier before each call; per call the slowest rank; "
        f"medians over calls and over {data['pace']['rounds']} rounds, in each of which all peers run in "
        "turn in fresh processes; the ratio is the median of the rounds' ratios.",
        "",
    ]
    lines += found.tables() + found.efficiency_tables()
    if data["limits"]:
        lines += ["## Limits of the machine", ""]
        lines += table(["what", "median"], [[each["name"], bounds.show(each)] for each in data["limits"]])
    return "\n".join(lines + failure_lines(collected["failures"])), found


def plot(found: Comparison, np: int, path: Path, title: str) -> None:
    """Time and bus bandwidth against size, log axes, one row per collective."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(found.collectives)
    figure, panels = pyplot.subplots(rows, 2, figsize=(13, 4 * rows), squeeze=False, layout="constrained")
    colors = pyplot.get_cmap("tab10" if len(found.peers) <= 10 else "tab20").colors
    for row, collective in enumerate(found.collectives):
        for index, peer in enumerate(found.peers):
            sizes = [size for size in found.sizes if (np, collective, size, peer) in found.times]
            times = [found.times[np, collective, size, peer] for size in sizes]
            factor = BUS_FACTOR[collective](np)
            style = {"marker": "o", "markersize": 3, "color": colors[index % len(colors)], "label": peer}
            style["linewidth"] = 2.5 if peer.startswith("ringcomm") else 1.2
            style["linestyle"] = "-" if find(peer).same_host or peer == "gloo" else "--"
            panels[row][0].plot(sizes, [each * 1e6 for each in times], **style)
            panels[row][1].plot(sizes, [s / t * factor / 1e9 for s, t in zip(sizes, times)], **style)
        for panel, label in zip(panels[row], ("time, µs", "bus bandwidth, GB/s")):
            panel.set(
                xscale="log", yscale="log", xlabel="bytes", ylabel=label, title=f"{collective}, {np} ranks"
            )
            panel.grid(which="major", alpha=0.4)
        panels[row][1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_comparison(data: Dict[str, Any], output: Path) -> str:
    """Write compare.json, compare.md and one plot per number of ranks; returns the Markdown."""
    text, found = comparison_report(data)
    data["summary"] = found.entries()
    output.mkdir(parents=True, exist_ok=True)
    (output / "compare.json").write_text(json.dumps(data))
    pictures: List[str] = []
    try:
        for np in found.nps:
            name = f"compare-np{np}.png"
            facts = data["machine"]
            title = f"{facts['when']}, {facts['cores']} cores, Linux {facts['kernel']}"
            plot(found, np, output / name, title)
            pictures.append(f"![{np} ranks]({name})")
    except ImportError:
        pictures = ["(No plots: matplotlib is not installed.)"]
    text = "\n".join([text, *pictures, ""])
    (output / "compare.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tables and plots of a comparison anew.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    print(write_comparison(json.loads((directory / "compare.json").read_text()), directory))


if __name__ == "__main__":
    main()
