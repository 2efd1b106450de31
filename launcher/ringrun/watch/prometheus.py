"""The numbers of all ranks in Prometheus's text format. Pure."""

from __future__ import annotations

from typing import List, Mapping, Tuple

from .history import History
from .numbers import Sample

_Row = Tuple[str, float]
_HELP = {
    "ringcomm_steps_total": ("counter", "Training steps."),
    "ringcomm_step_seconds": ("gauge", "Time of the last training step."),
    "ringcomm_elapsed_seconds": ("counter", "Time since the rank joined the job."),
    "ringcomm_waited_seconds_total": ("counter", "Time in collectives: moving data or waiting for ranks."),
    "ringcomm_calls_total": ("counter", "Collectives, by kind."),
    "ringcomm_call_seconds_total": ("counter", "Time in collectives, by kind."),
    "ringcomm_sent_bytes_total": ("counter", "Bytes sent, by receiving rank."),
    "ringcomm_received_bytes_total": ("counter", "Bytes received, by sending rank."),
    "ringcomm_waited_for_seconds_total": ("counter", "Time until data of another rank came, by that rank."),
    "ringcomm_local_steps": ("gauge", "Local steps between two synchronizations."),
    "ringcomm_local_drift": ("gauge", "Distance of the ranks' weights, relative to the weights' norm."),
    "ringcomm_slowest": ("gauge", "1 for the rank that the others wait for, otherwise 0."),
}


def exposition(history: History, hosts: Mapping[int, str]) -> str:
    """The text that an endpoint for Prometheus serves.

    Args:
        history: the samples.
        hosts: by process, the name of its host.
    """
    slowest = history.slowest_now(hosts)
    present = history.present()
    rows: List[_Row] = []
    for rank, number in sorted(present.items()):
        sample = history.processes[number].latest
        if sample is not None:
            labels = f'rank="{rank}",host="{_escaped(hosts.get(number, ""))}"'
            rows += _rows(sample, labels)
            is_slowest = slowest is not None and slowest.rank == rank
            rows.append((f"ringcomm_slowest{{{labels}}}", float(is_slowest)))
    lines: List[str] = []
    for name, (kind, text) in _HELP.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{series} {value:.15g}" for series, value in rows if series.startswith(f"{name}{{")]
    return "\n".join(lines) + "\n"


def _rows(sample: Sample, labels: str) -> List[_Row]:
    rows: List[_Row] = [
        (f"ringcomm_steps_total{{{labels}}}", sample.steps),
        (f"ringcomm_step_seconds{{{labels}}}", sample.step_s),
        (f"ringcomm_elapsed_seconds{{{labels}}}", sample.elapsed_s),
        (f"ringcomm_waited_seconds_total{{{labels}}}", sample.waited_s),
    ]
    rows += [(f"ringcomm_{name}{{{labels}}}", value) for name, value in sorted(sample.gauges.items())]
    for kind, numbers in sorted(sample.kinds.items()):
        own = f'{labels},kind="{_escaped(kind)}"'
        rows.append((f"ringcomm_calls_total{{{own}}}", numbers.runs))
        rows.append((f"ringcomm_call_seconds_total{{{own}}}", numbers.took_s))
    for rank, peer in sorted(sample.peers.items()):
        own = f'{labels},peer="{rank}"'
        rows.append((f"ringcomm_sent_bytes_total{{{own}}}", peer.sent_bytes))
        rows.append((f"ringcomm_received_bytes_total{{{own}}}", peer.received_bytes))
        rows.append((f"ringcomm_waited_for_seconds_total{{{own}}}", peer.slept_s))
    return rows


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
