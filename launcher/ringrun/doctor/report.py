"""The doctor's report, for people and as JSON. Pure."""

from __future__ import annotations

import json
import textwrap
from statistics import median
from typing import Any, Dict, List, Optional, Sequence

from .finding import CHECKS, Finding
from .hosts import Examination

WIDTH = 100


def as_text(found: Examination, findings: Sequence[Finding]) -> str:
    """A line for each host, the table of links, and the problems with their remedies."""
    wide = max(map(len, found.hosts))
    lines = [f"{'':{wide}}  " + "  ".join(f"{check:9}" for check in CHECKS).rstrip()]
    for index, name in enumerate(found.hosts):
        marks = [_mark(found, findings, index, check) for check in CHECKS]
        lines.append(f"{name:{wide}}  " + "  ".join(f"{mark:9}" for mark in marks).rstrip())
    if found.speeds:
        lines += ["", *_matrix(found, wide)]
    lines.append("")
    for finding in findings:
        lines += [*_wrapped(found, finding), ""]
    if findings:
        lines.append(f"{len(findings)} problem{'' if len(findings) == 1 else 's'}.")
    else:
        lines.append("No problem found.")
    return "\n".join(lines) + "\n"


def _mark(found: Examination, findings: Sequence[Finding], index: int, check: str) -> str:
    levels = {row.level for row in findings if row.check == check and index in row.hosts}
    if not levels and found.problems[index]:
        return "-"
    return min(levels, default="ok")  # "bad" comes before "slow"


def _matrix(found: Examination, wide: int) -> List[str]:
    """Round trip in ms and MB/s from each host (row) to each other (column)."""
    cell = max(18, wide)
    lines = [f"{'from / to':{wide}}  " + "  ".join(f"{name:{cell}}" for name in found.hosts).rstrip()]
    for source, name in enumerate(found.hosts):
        cells = [_cell(found, source, target) for target in range(len(found.hosts))]
        lines.append(f"{name:{wide}}  " + "  ".join(f"{text:{cell}}" for text in cells).rstrip())
    return lines


def _cell(found: Examination, source: int, target: int) -> str:
    if source == target:
        return "."
    trip, speed = round_trip_ms(found, source, target), found.speeds.get((source, target))
    if trip is None:
        return "no connection"
    return f"{trip:.2f} ms, " + ("no stream" if speed is None else f"{speed / 1e6:.0f} MB/s")


def round_trip_ms(found: Examination, source: int, target: int) -> Optional[float]:
    """The median round trip on the best address, in milliseconds; None if there is no connection."""
    trips = [
        median(row.result["rtt_ms"])
        for row in found.dialled
        if (row.source, row.target, row.result.get("answered")) == (source, target, target)
    ]
    return min(trips, default=None)


def _wrapped(found: Examination, finding: Finding) -> List[str]:
    names = ", ".join(found.hosts[index] for index in finding.hosts)
    head = f"{finding.level}: {names}: "
    lines = textwrap.wrap(head + finding.text, WIDTH, subsequent_indent="      ", break_on_hyphens=False)
    if finding.remedy:
        lines += textwrap.wrap(
            f"      → {finding.remedy}", WIDTH, subsequent_indent="        ", break_on_hyphens=False
        )
    return lines


def as_json(found: Examination, findings: Sequence[Finding]) -> str:
    """The same for programs."""
    content: Dict[str, Any] = {
        "hosts": [
            {"name": name, "problem": problem, "facts": facts}
            for name, problem, facts in zip(found.hosts, found.problems, found.facts)
        ],
        "links": [
            {
                "from": found.hosts[source], "to": found.hosts[target], "bytes_per_s": speed,
                "round_trip_ms": round_trip_ms(found, source, target),
            }
            for (source, target), speed in sorted(found.speeds.items())
        ],
        "problems": [
            {**row._asdict(), "hosts": [found.hosts[index] for index in row.hosts]} for row in findings
        ],
    }  # fmt: skip
    return json.dumps(content, indent=2) + "\n"
