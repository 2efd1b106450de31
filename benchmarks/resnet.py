"""One step's gradients: ResNet-50's 161 tensors (25.5 million numbers, 102 MB), averaged over all ranks.

    python benchmarks/resnet.py --output DIR [--np 2 4] [--peers …] [--quick]

ringcomm tensor by tensor and in buckets, beside Gloo (tensor by tensor, and in the buckets of torch's
DistributedDataParallel) and every MPI that is installed. Writes DIR/resnet.json and DIR/resnet.md. The
options are those of compare.py; how each mode works is told in peers/steps.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any, Dict, List, Tuple

import machine
import report
from compare import common_arguments, core_states, pace_of, quiet, tools_of
from measure import Collected, Sample, medians, round_robin, speedups
from peers.catalog import Peer, baseline_of, choose
from peers.steps import resnet50_shapes

BASE_MODE = "ddp-buckets-view"
VIEWED = ("ddp-buckets", BASE_MODE)
"""Gloo's modes that others are compared with."""
MODES: Dict[str, Tuple[str, ...]] = {
    "run_ringcomm.py": ("per-tensor", "grouped", "one-bucket", "small-buckets-view"),
    "run_gloo.py": ("per-tensor", "per-tensor-async", "ddp-buckets", BASE_MODE, "small-buckets-view"),
    "run_mpi.py": ("per-tensor", "ddp-buckets", BASE_MODE, "small-buckets-view"),
    "run_horovod.py": ("per-tensor-async", "one-bucket"),
}

Key = Tuple[int, str, str]


def _key(sample: Sample) -> Key:
    return sample.np, sample.peer, sample.task["mode"]


def _versus(mode: str, measured: List[str]) -> Any:
    """Key to the key of Gloo in that mode, under the same congestion control if that was measured."""

    def base(key: Key) -> Key:
        peer = baseline_of(key[1])
        return key[0], peer if peer in measured else baseline_of(""), mode

    return base


def summary(samples: List[Sample]) -> List[Dict[str, Any]]:
    """One record per number of ranks, peer and mode, the fastest first."""
    peers = report.ordered(sample.peer for sample in samples)
    times = medians(samples, _key)
    ratios = {mode: speedups(samples, _key, _versus(mode, peers)) for mode in VIEWED}
    return [
        {"np": key[0], "peer": key[1], "mode": key[2], "seconds": times[key],
         **{f"times_gloo_{mode}": ratios[mode].get(key) for mode in VIEWED}}
        for key in sorted(times, key=lambda key: (key[0], times[key]))
    ]  # fmt: skip


def markdown(data: Dict[str, Any]) -> str:
    """The report."""
    collected = data["collected"]
    noise = machine.noise_line(data["quiet"], collected["others"])
    lines = report.heading("ResNet-50's gradients as one step", data["machine"], noise)
    lines += report.core_lines(data["cores"])
    lines += report.version_lines(collected["versions"], data["left_out"])
    shapes = len(resnet50_shapes())
    lines += [
        f"{shapes} float32 tensors, averaged. A barrier before each step; per step the slowest rank; medians "
        f"over steps and {data['pace']['rounds']} rounds in which all peers run in turn in fresh processes. "
        "The last columns say how many times as fast as Gloo with DistributedDataParallel's buckets.",
        "",
    ]
    for np in report.ordered(each["np"] for each in data["summary"]):
        rows = [
            [each["peer"], each["mode"], report.time_text(each["seconds"]), *(
                "–" if each[f"times_gloo_{mode}"] is None else report.ratio_text(each[f"times_gloo_{mode}"])
                for mode in VIEWED)]
            for each in data["summary"] if each["np"] == np
        ]  # fmt: skip
        head = ["peer", "mode", "time", *(f"× gloo {mode}" for mode in VIEWED)]
        lines += [f"## {np} ranks", "", *report.table(head, rows)]
    return "\n".join(lines + report.failure_lines(collected["failures"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    common_arguments(parser)
    args = parser.parse_args()
    tools, pace = tools_of(args), pace_of(args)
    peers, left_out = choose(args.peers, tools)
    data: Dict[str, Any] = {"quiet": quiet(args), "machine": machine.facts(), "pace": asdict(pace)}
    data["left_out"], data["cores"] = left_out, core_states()
    collected = Collected()

    def tasks(peer: Peer) -> List[Dict[str, Any]]:
        return [{"kind": "step", "mode": mode} for mode in MODES[peer.worker]]

    try:
        for np in args.np:
            round_robin(peers, tools, np, [tasks], pace, collected)
    finally:
        data["cores"] += core_states()
        data["collected"] = collected.raw()
        data["summary"] = summary(collected.samples)
        text = markdown(data)
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "resnet.json").write_text(json.dumps(data))
        (args.output / "resnet.md").write_text(text)
    print(text)
    return collected.exit_code()


if __name__ == "__main__":
    sys.exit(main())
