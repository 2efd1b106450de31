"""What compression gains on slow links: hosts made of namespaces, their links shaped to a given speed.

    python benchmarks/compression.py [--rates 1000 100] [--np 3] [--rounds 3] [--backward 1.0] [--scale 1.0]
                                     [--only allreduce steps auto overlap] [--variants WORD ...]
                                     [--output DIR]

Needs root and sshd (see tests/hosts/netlab.py, which makes the hosts), and PyTorch. For every link rate
(in Mbit/s) all variants take turns in the same processes:

* an all-reduce of as many float32 as ResNet-50 has gradients (102 MB): ringcomm without and with each codec,
  and Gloo;
* a training step with ResNet-50's 161 gradients, which become ready one after the other during a backward
  pass of ``--backward`` seconds (it sleeps: the ranks here share the cores, machines do not):
  DistributedDataParallel over Gloo, without and with PyTorch's hooks for bf16 and PowerSGD, ringcomm's
  DistributedOptimizer with each compression, LocalSGD with 16 local steps (the mean of 16; streaming: in four
  fragments whose reductions run during four local steps each), and no communication at all;
* with ``--only auto``: for each ``--backward`` the same step with ``compression="auto"`` (its first steps
  are those without compression, the last ones those after the choice) beside bf16 and int8, and what the
  choice predicted for each;
* with ``--only overlap``: steps with a forward pass of ``--forward`` seconds, without and with CrossBarrier;
  here every layer's pass takes equally long.

Prints medians, and with --output writes DIR/compression.json and DIR/compression.svg: time per step against
link rate, one line per variant.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

ROOT = Path(__file__).resolve().parents[1]
for _place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

Step = Callable[[], Any]
Times = Dict[str, List[float]]
LOCAL_STEPS = 16


def gradients_of(scale: float, backward_s: float, forward_s: float = 0.0, evenly: bool = False) -> Any:
    """ResNet-50's parameters as layers whose passes sleep, each by the layer's share of all elements.

    Or each equally long: ResNet-50's last layers have most of the elements, and not more computation.
    """
    import torch
    from peers.steps import resnet50_shapes

    shapes = [(max(1, int(shape[0] * scale)), *shape[1:]) for shape in resnet50_shapes()]
    total = sum(torch.Size(shape).numel() for shape in shapes)

    def share_of(part: Any) -> float:
        return float(1 / len(shapes) if evenly else part.numel() / total)

    class Touch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, flow: Any, part: Any, gradient: Any) -> Any:
            ctx.gradient = gradient
            return flow.clone()

        @staticmethod
        def backward(ctx: Any, flow: Any) -> Any:
            time.sleep(backward_s * share_of(ctx.gradient))
            return flow, ctx.gradient, None

    class Layer(torch.nn.Module):
        def __init__(self, shape: Any) -> None:
            super().__init__()
            self.part = torch.nn.Parameter(torch.ones(shape))
            self.gradient = 1e-3 * torch.randn(shape)

        def forward(self, flow: Any) -> Any:
            if forward_s:
                time.sleep(forward_s * share_of(self.part))
            return Touch.apply(flow, self.part, self.gradient)

    return torch.nn.Sequential(*map(Layer, shapes))


def still(model: Any) -> Any:
    """An optimizer whose step costs nothing."""
    import torch

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Leave the parameters as they are."""

    return Still(model.parameters(), lr=0.1)


def all_reduces(scale: float, gloo: Any) -> Dict[str, Step]:
    """The collectives to compare."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import ringcomm as rc

    count = int(25_557_032 * scale)
    array = np.random.default_rng(rc.rank()).standard_normal(count).astype(np.float32)
    tensor = torch.from_numpy(array.copy())
    found: Dict[str, Step] = {"Gloo float32": lambda: dist.all_reduce(tensor, group=gloo)}

    def add(name: str, codec: Any) -> None:
        found[name] = lambda: rc.allreduce_(array, compression=codec)

    add("ringcomm float32", None)
    for codec in ("bf16", "int8", "int4"):
        add(f"ringcomm {codec}", codec)
    return found


def ddp(
    gloo: Any, scale: float, backward_s: float, hook: Any = None, state: Any = None, cap: int = 25
) -> Step:
    """A step of DistributedDataParallel over Gloo, with buckets of ``cap`` MB."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        gradients_of(scale, backward_s), process_group=gloo, gradient_as_bucket_view=True, bucket_cap_mb=cap
    )
    if hook is not None:
        model.register_comm_hook(state, hook)
    factor = torch.ones(())
    return lambda: model(factor).backward()


def training_steps(scale: float, backward_s: float, gloo: Any) -> Dict[str, Callable[[], Step]]:
    """What makes the training steps to compare; each is made when it is its turn, to save memory."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    import ringcomm.torch as hvd

    def distributed(compression: Any) -> Step:
        model = gradients_of(scale, backward_s)
        optimizer = hvd.DistributedOptimizer(still(model), model.named_parameters(), compression=compression)
        factor = torch.ones(())

        def step() -> None:
            model(factor).backward()
            optimizer.step()

        return step

    def bf16(group: Any, bucket: Any) -> Any:
        return default_hooks.bf16_compress_hook(group, bucket)  # DDP refuses the function itself with Gloo

    bf16.__annotations__.clear()  # annotations that are text do not pass DDP's check

    def alone() -> Step:
        model = gradients_of(scale, backward_s)
        factor = torch.ones(())
        return lambda: model(factor).backward()

    def local(fragments: int = 1, overlap: int = 0) -> Step:
        model = gradients_of(scale, backward_s)
        optimizer = still(model)
        outer = hvd.LocalSGD(model, optimizer, LOCAL_STEPS, compression="int8",
                             fragments=fragments, overlap=overlap)  # fmt: skip
        outer.__enter__()
        factor = torch.ones(())

        def step() -> None:
            started = time.perf_counter()
            for _ in range(LOCAL_STEPS):
                model(factor).backward()
                optimizer.step()
            means.append((time.perf_counter() - started) / LOCAL_STEPS)

        means: List[float] = []
        step.means = means  # type: ignore[attr-defined]
        return step

    def torchs_power() -> Step:
        state = powerSGD_hook.PowerSGDState(gloo, matrix_approximation_rank=4, start_powerSGD_iter=2)
        # With several buckets ranks start the hook's later collectives in different sequences: Gloo aborts.
        return ddp(gloo, scale, backward_s, powerSGD_hook.powerSGD_hook, state, 1000)

    return {
        "no communication": alone,
        "DDP, Gloo": lambda: ddp(gloo, scale, backward_s),
        "DDP, Gloo, bf16 hook": lambda: ddp(gloo, scale, backward_s, bf16, gloo),
        "DDP, Gloo, PowerSGD 4 hook": torchs_power,
        "ringcomm float32": lambda: distributed("none"),
        "ringcomm bf16": lambda: distributed("bf16"),
        "ringcomm int8": lambda: distributed("int8"),
        "ringcomm int4": lambda: distributed("int4"),
        "ringcomm PowerSGD 4": lambda: distributed(hvd.PowerSGD(4)),
        f"ringcomm LocalSGD {LOCAL_STEPS}, int8": local,
        f"ringcomm LocalSGD {LOCAL_STEPS}, int8, streaming": lambda: local(4, 4),
    }


def overlaps(scale: float, backward_s: float, forward_s: float, rounds: int) -> Dict[str, float]:
    """Mean seconds per step with and without an overlap of the exchange with the next forward pass."""
    import torch

    import ringcomm as rc
    import ringcomm.torch as hvd

    found: Dict[str, float] = {}
    for compression in ("none", "int8"):
        for overlapping in (False, True):
            model = gradients_of(scale, backward_s, forward_s, evenly=True)
            optimizer = hvd.DistributedOptimizer(
                still(model), model.named_parameters(), compression=compression
            )
            barrier = hvd.CrossBarrier(model, optimizer) if overlapping else None
            factor = torch.ones(())
            for number in range(rounds + 2):
                if number == 2:
                    rc.barrier()
                    started = time.perf_counter()
                model(factor).backward()
                optimizer.step()
            if barrier is not None:
                barrier.close()
            rc.barrier()
            name = f"{compression}, overlapping" if overlapping else compression
            found[name] = (time.perf_counter() - started) / rounds
    return found


AUTO_WARM_UP = 7
"""Steps without compression, after which the choice is made; the first is not counted."""


def choices(scale: float, backward_s: float, rounds: int) -> Dict[str, Any]:
    """Seconds per step without compression, with bf16, int8 and after the choice; and the predictions."""
    import torch

    import ringcomm as rc
    import ringcomm.torch as hvd

    def steps_of(compression: str) -> Any:
        model = gradients_of(scale, backward_s)
        optimizer = hvd.DistributedOptimizer(still(model), model.named_parameters(), compression=compression)
        factor = torch.ones(())

        def steps(count: int) -> List[float]:
            rc.barrier()
            times = [time.perf_counter()]
            for _ in range(count):
                model(factor).backward()
                optimizer.step()
                times.append(time.perf_counter())
            return [last - first for first, last in zip(times, times[1:])]

        return optimizer, steps

    optimizer, steps = steps_of("auto")
    found: Dict[str, Any] = {"none": steps(AUTO_WARM_UP)[1:]}
    choice = optimizer._reducer._auto.choice
    found["auto"] = steps(1 + rounds)[1:]
    for name in ("bf16", "int8"):
        found[name] = steps_of(name)[1](1 + rounds)[1:]
    return {"backward_s": backward_s, "chosen": choice.name, "predicted": choice.steps_s, "measured": found}


def timed(step: Step, rounds: int, warm_up: int, processor: List[float]) -> List[float]:
    """Seconds of each call, from a common start; ``processor`` gets this rank's processor time of each."""
    import ringcomm as rc

    times: List[float] = []
    for number in range(-warm_up, rounds):
        rc.barrier()
        started, worked = time.perf_counter(), time.process_time()
        step()
        worked = time.process_time() - worked
        rc.barrier()
        if number >= 0:
            times.append(time.perf_counter() - started)
            processor.append(worked)
    means: List[float] = getattr(step, "means", [])
    return means[-rounds:] if means else times


def work(args: argparse.Namespace) -> None:
    """Be one rank."""
    import gc
    import warnings

    import torch
    import torch.distributed as dist

    import ringcomm as rc
    import ringcomm.torch as hvd

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rc.rank(), world_size=rc.size())
    gloo = dist.group.WORLD
    processor: Times = {}
    results: Dict[str, Times] = {"processor": processor}
    if "allreduce" in args.only:
        steps = all_reduces(args.scale, gloo)
        found: Times = {name: [] for name in steps}
        for number in range(-1, args.rounds):
            for name, step in steps.items():
                busy: List[float] = []
                seconds = timed(step, 1, 0, busy)
                if number >= 0:
                    found[name] += seconds
                    processor.setdefault(f"allreduce {name}", []).extend(busy)
        results["allreduce"] = found
        del steps
    if "steps" in args.only:
        results["steps"] = {}
        for name, make in training_steps(args.scale, args.backward[0], gloo).items():
            if args.variants and not any(word in name for word in args.variants):
                continue
            gc.collect()
            warm_up = 2 if "PowerSGD" in name else 1
            own = processor.setdefault(f"steps {name}", [])
            results["steps"][name] = timed(make(), args.rounds, warm_up, own)
    if "auto" in args.only:
        results["auto"] = [choices(args.scale, backward_s, args.rounds) for backward_s in args.backward]  # type: ignore[assignment]
    if "overlap" in args.only:
        steps_s = overlaps(args.scale, args.backward[0], args.forward, args.rounds)
        results["overlap"] = {"forward_s": args.forward, "backward_s": args.backward[0], **steps_s}  # type: ignore[dict-item]
    if rc.rank() == 0:
        Path(args.result).write_text(json.dumps(results))


def measure(args: argparse.Namespace) -> List[Dict[str, Any]]:
    """All link rates, one after the other."""
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    names = [f"node{number}" for number in range(1, args.np + 1)]
    found = []
    with Lab(*names, no_wlan=True, docker=False) as lab, tempfile.TemporaryDirectory() as folder:
        for rate in args.rates:
            for host in names:
                lab.shape(host, "eth", f"{rate}mbit", burst="256kb")
            store, result = Path(folder) / f"store{rate}", Path(folder) / f"result{rate}"
            worker = [
                sys.executable, __file__, "--work", "--store", str(store), "--result", str(result),
                "--rounds", str(args.rounds), "--backward", *map(str, args.backward),
                "--scale", str(args.scale), "--forward", str(args.forward), "--only", *args.only,
                "--variants", *args.variants,
            ]  # fmt: skip
            hosts = ["-np", str(args.np), "-H", ",".join(names)]
            launcher = [sys.executable, "-m", "ringrun", "--threads", "1", *hosts]
            environ = {**os.environ, "PATH": lab.environ()["PATH"], "PYTHONPATH": str(ROOT),
                       "GLOO_SOCKET_IFNAME": lab.iface(names[0]), "OMP_NUM_THREADS": "1"}  # fmt: skip
            command = [*launcher, "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME", *worker]
            subprocess.run(command, env=environ, check=True, timeout=args.limit)
            found.append({"mbit_per_s": rate, **json.loads(result.read_text())})
            print(table(found[-1]), flush=True)
            if args.output is not None:
                args.output.mkdir(parents=True, exist_ok=True)
                (args.output / "compression.json").write_text(json.dumps(found))
                draw(found, args.output / "compression.svg")
    return found


def table(row: Dict[str, Any]) -> str:
    """Medians at one link rate, and how many times faster than Gloo without a hook."""
    lines = []
    for kind, baseline in (("allreduce", "Gloo float32"), ("steps", "DDP, Gloo")):
        if kind not in row:
            continue
        medians = {name: statistics.median(times) for name, times in row[kind].items()}
        lines.append(f"{row['mbit_per_s']} Mbit/s, {kind}:")
        gloo_s = medians.get(baseline, float("nan"))
        lines += [
            f"  {name:36s} {seconds:8.3f} s   {gloo_s / seconds:5.2f} x Gloo, processor "
            f"{statistics.median(row['processor'][f'{kind} {name}']):6.3f} s"
            for name, seconds in medians.items()
        ]
    lines += [f"  {name:32s} {value:8.3f} s" for name, value in row.get("overlap", {}).items()]
    for item in row.get("auto", ()):
        lines.append(f"{row['mbit_per_s']} Mbit/s, backward {item['backward_s']:g} s: {item['chosen']}")
        lines += [
            f"  {name:32s} {statistics.median(times):8.3f} s, "
            f"predicted {item['predicted'].get(name, item['predicted'][item['chosen']]):8.3f} s"
            for name, times in item["measured"].items()
        ]
    return "\n".join(lines)


def draw(rows: Sequence[Dict[str, Any]], path: Path) -> None:
    """Time per step against link rate, both logarithmic, as SVG."""
    from math import log10

    rows = [row for row in rows if "steps" in row]
    if len(rows) < 2:
        return
    rows = sorted(rows, key=lambda row: row["mbit_per_s"])
    series = {
        name: [(row["mbit_per_s"], statistics.median(row["steps"][name])) for row in rows]
        for name in rows[0]["steps"]
    }
    width, height, left, top, bottom = 720, 420, 60, 20, 50
    right = 220
    xs = [log10(row["mbit_per_s"]) for row in rows]
    values = [log10(seconds) for points in series.values() for _, seconds in points]
    low, high = min(values) - 0.05, max(values) + 0.05

    def x(rate: float) -> float:
        return left + (log10(rate) - xs[0]) / (xs[-1] - xs[0]) * (width - left - right)

    def y(seconds: float) -> float:
        return top + (high - log10(seconds)) / (high - low) * (height - top - bottom)

    colors = ("#999", "#d62728", "#ff7f0e", "#e377c2", "#1f77b4", "#17becf", "#2ca02c", "#bcbd22", "#9467bd")
    end = width - right
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row in rows:
        rate = row["mbit_per_s"]
        parts.append(f'<text x="{x(rate):.0f}" y="{height - 30}" text-anchor="middle">{rate}</text>')
        parts.append(f'<path d="M{x(rate):.0f} {top}V{height - bottom}" stroke="#eee"/>')
    for seconds in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100):
        if low <= log10(seconds) <= high:
            parts.append(
                f'<text x="{left - 6}" y="{y(seconds) + 4:.0f}" text-anchor="end">{seconds:g} s</text>'
            )
            parts.append(f'<path d="M{left} {y(seconds):.0f}H{end}" stroke="#eee"/>')
    labels = sorted(series, key=lambda name: -series[name][0][1])
    for place, name in enumerate(labels):
        color = colors[list(series).index(name) % len(colors)]
        line = " ".join(f"{x(rate):.1f},{y(seconds):.1f}" for rate, seconds in series[name])
        dashes = ' stroke-dasharray="5 3"' if "Gloo" in name else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        parts.append(
            f'<text x="{width - right + 12}" y="{top + 14 + 18 * place}" fill="{color}">{name}</text>'
        )
    middle = (left + width - right) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{height - 10}" text-anchor="middle">link rate in Mbit/s</text></svg>'
    )
    path.write_text("\n".join(parts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 100], metavar="MBIT")
    parser.add_argument("--np", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backward", type=float, nargs="+", default=[1.0], metavar="S")
    parser.add_argument("--scale", type=float, default=1.0, help="share of ResNet-50's gradients")
    parser.add_argument("--forward", type=float, default=0.1, metavar="S", help="for --only overlap")
    kinds = ("allreduce", "steps", "auto", "overlap")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds[:2])
    parser.add_argument(
        "--variants", nargs="*", default=[], metavar="WORD", help="steps with one of these in the name"
    )
    parser.add_argument("--limit", type=float, default=1800.0, metavar="S", help="per link rate")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return 0
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
