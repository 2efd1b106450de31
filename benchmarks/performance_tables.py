"""The rows of the tables of docs/performance.md; benchmarks/performance.py measures what they are made of."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

import limits
from cells import Rows, duration, median, ratio, result
from report import EFFICIENCY_FROM_BYTES, size_text

ONE_HOST = "one_host"
NAMES = {
    "ringcomm": "ringcomm", "ringcomm-shared": "`rc.empty`", "ringcomm-shm": "shm", "ringcomm-tcp": "TCP",
    "gloo": "Gloo", "openmpi": "Open MPI", "openmpi-tcp": "Open MPI, TCP", "mpich": "MPICH",
    "mpich-tcp": "MPICH, TCP", "mlx": "MLX", "ringcomm-tcp@reno": "TCP, reno", "gloo@reno": "Gloo, reno",
}  # fmt: skip
"""Peers of compare.py, and what their columns are called."""
GRADIENT_BYTES = 4 * 25_557_032
RATIOS = (("gloo", "ringcomm"), ("openmpi", "ringcomm"))
RENO = (("gloo", "ringcomm-tcp"), ("gloo@reno", "ringcomm-tcp@reno"))


def _peers(run: str) -> List[str]:
    measured = {peer for times in result(ONE_HOST)["runs"][run]["seconds"].values() for peer in times}
    return [peer for peer in NAMES if peer in measured]


def columns(run: str, ratios: Sequence[Sequence[str]] = RATIOS) -> Callable[[], List[str]]:
    """The head of :func:`beside_peers`."""

    def head() -> List[str]:
        several = len({name.split()[1] for name in result(ONE_HOST)["runs"][run]["seconds"]}) > 1
        compared = [f"{NAMES[slow]} / {NAMES[own]}" for slow, own in ratios]
        return [*["collective"] * several, "size", "bound", *(NAMES[peer] for peer in _peers(run)), *compared]

    return head


def beside_peers(run: str, ratios: Sequence[Sequence[str]] = RATIOS) -> Callable[[], Rows]:
    """One run of compare.py: medians of the rounds, and medians of the rounds' ratios.

    Args:
        run: its name in the results.
        ratios: pairs of peers; the column is the time of the first over that of the second.
    """

    def rows() -> Rows:
        found = result(ONE_HOST)
        seconds: Dict[str, Dict[str, Any]] = found["runs"][run]["seconds"]
        several = len({name.split()[1] for name in seconds}) > 1
        machine = found["runs"]["one"]
        for name, times in seconds.items():
            ranks, collective, size = name.split()
            bound = limits.lower_bound(machine["limits"], collective, int(size), int(ranks), machine["cores"])
            cells = [collective] if several else []
            bounded = bound is not None and int(size) >= EFFICIENCY_FROM_BYTES
            cells += [size_text(int(size)), duration(bound) if bounded else ""]
            cells += [duration(median(times[peer])) if peer in times else "" for peer in _peers(run)]
            measured = [(times.get(slow), times.get(own)) for slow, own in ratios]
            yield cells + [f"{ratio(one, other):.2f}" if one and other else "" for one, other in measured]

    return rows


def gradients() -> Rows:
    """ResNet-50's gradients."""
    found = result(ONE_HOST)["resnet50"]["rounds"]
    ways = {
        "per-tensor": "one by one", "grouped": "grouped", "one-bucket": "in one bucket",
        "ddp-buckets": "in DDP's buckets", "ddp-buckets-view": "in DDP's buckets, as views of them",
        "small-buckets-view": "as views of buckets of 8 MiB",
        "per-tensor-async": "one by one, asynchronous",
    }  # fmt: skip
    base, machine = found["gloo, ddp-buckets-view"], result(ONE_HOST)["runs"]["one"]
    bound = limits.lower_bound(machine["limits"], "allreduce", GRADIENT_BYTES, 2, machine["cores"])
    if bound is not None:
        yield ["bound", "copies and additions alone", duration(bound), f"{median(base) / bound:.2f}"]
    for name in sorted(found, key=lambda name: median(found[name])):
        peer, _, mode = name.partition(", ")
        yield [NAMES[peer], ways[mode], duration(median(found[name])), f"{ratio(base, found[name]):.2f}"]


def ddp() -> Rows:
    """PyTorch over the backend, beside Gloo."""
    for what, times in result("ddp")["seconds"].items():
        ways = ("ringcomm-tcp", "ringcomm")
        cells = [duration(median(times[way])) if way in times else "" for way in (*ways, "gloo")]
        ratios = [f"{ratio(times['gloo'], times[way]):.2f}" if way in times else "" for way in ways]
        yield [what, *cells, *ratios]


def links() -> Rows:
    """All-reduces between hosts, beside Gloo."""
    for row in result("links")["rows"]:
        yield [row["network"], size_text(row["bytes"])] + [
            duration(row["bound_s"]),
            *(duration(median(row["seconds"][peer])) for peer in ("ringcomm", "gloo")),
            *(f"{row['bound_s'] / median(row['seconds'][peer]):.3f}" for peer in ("ringcomm", "gloo")),
            f"{ratio(row['seconds']['gloo'], row['seconds']['ringcomm']):.2f}",
        ]


def loopback() -> Rows:
    """Return what two bare processes need for the same bytes over the loopback, beside ringcomm and Gloo."""
    for size, run in result("loopback")["sizes"].items():
        times, calls = run["seconds"], run["calls"]
        ms = {name: f"{median(values) * 1e3:.2f} ms" for name, values in times.items()}
        share, own, bound = (
            ratio(times[above], times[below])
            for above, below in (("bare, added", "ringcomm"), ("gloo", "ringcomm"), ("gloo", "bare, added"))
        )
        megabytes = calls["send_bytes"] / 1e6
        yield [
            size, ms["bare"], ms["bare, added"], ms["ringcomm"], f"{share:.2f}", ms["gloo"], f"{own:.2f}×",
            f"{bound:.2f}×", f"{calls['send'] / megabytes:.1f}",
        ]  # fmt: skip


Groups = Dict[str, List[Dict[str, List[float]]]]
"""By size, what each start measured: microseconds of arrays that are ``ordinary`` and ``shared``."""


def _starts(name: str, state: str = "") -> Groups:
    """The starts of a result of shared_arrays.py; given a state, those that began and ended in it."""
    groups: Groups = {}
    for start in result(name)["starts"]:
        for row in start["rows"]:
            if not state or set(start["cores"]) == {state}:
                groups.setdefault(row["size"], []).append(row["times"])
    return groups


def _beside_ordinary(first: Groups, second: Groups) -> Rows:
    for size, starts in first.items():
        cells = ["13 arrays of 8 MiB" if size == "8Mx13" else size.replace("K", " KiB").replace("M", " MiB")]
        for group in (starts, second.get(size, [])):
            ordinary = [value for times in group for value in times["ordinary"]]
            shared = [value for times in group for value in times["shared"]]
            if not group:
                cells += ["", "", ""]
                continue
            cells += [duration(1e-6 * median(ordinary)), duration(1e-6 * median(shared))]
            cells.append(f"{ratio(ordinary, shared):.2f}")
        yield cells


def shared_arrays() -> Rows:
    """Arrays that the ranks of a host share, beside ordinary ones: both states of the cores side by side."""
    from cores import SEPARATE, SHARED

    return _beside_ordinary(_starts("shared_arrays", SHARED), _starts("shared_arrays", SEPARATE))


def shared_arrays_elsewhere() -> Rows:
    """The same on the machine with 16 cores: two and four ranks."""
    return _beside_ordinary(_starts("shared_arrays_16_cores"), _starts("shared_arrays_16_cores_4_ranks"))


def beside_alternatives() -> Rows:
    """Two ranks, by size: both states of the cores side by side."""
    import alternatives
    from cores import SEPARATE, SHARED

    found = {(line.state, line.task): line for line in alternatives.lines(result("alternatives")["starts"])
             if line.ranks == 2}  # fmt: skip
    for task in dict.fromkeys(task for start in result("alternatives")["starts"] for task in start["times"]):
        cells = []
        for state in (SHARED, SEPARATE):
            if (state, task) not in found:  # no start met that state from its beginning to its end
                cells += ["", "", ""]
                continue
            line = found[state, task]
            best = f"{duration(line.best_s)} ({line.best.replace('_', ' ')})"
            cells += [duration(line.default_s), best, f"{line.ratio:.2f}"]
        yield [task, *cells]


TABLES = (
    ("size | bound", 0, beside_peers("one"), columns("one")),
    ("size | bound", 1, beside_peers("separate"), columns("separate")),
    ("size | bound", 2, beside_peers("congestion", RENO), columns("congestion", RENO)),
    ("size | bound", 3, beside_peers("four"), columns("four")),
    ("collective | size", 0, beside_peers("others"), columns("others")),
    ("peer | gradients", 0, gradients, None),
    ("what | ringcomm over TCP", 0, ddp, None),
    ("size | shared: default", 0, beside_alternatives, None),
    ("size | shared cache: ordinary", 0, shared_arrays, None),
    ("size | 2 ranks: ordinary", 0, shared_arrays_elsewhere, None),
    ("links | size", 0, links, None),
    ("size | bare exchange", 0, loopback, None),
)
"""The first cells of a table's head, which one of those with this head, its rows, and its whole head."""
