"""The doctor's report, as text and as JSON. Pure."""

from __future__ import annotations

import json
import textwrap
from typing import Any, Dict, List, Sequence, Tuple

from ringcomm.rendezvous.routing import Pair

from .finding import CHECKS, LEVELS, NOTE, Finding
from .network import Examination, Route

WIDTH = 100


def as_text(found: Examination, findings: Sequence[Finding]) -> str:
    """Return a line for each host, the table of links, and the problems with their remedies."""
    wide = max(map(len, found.hosts))
    lines = [f"{'':{wide}}  " + "  ".join(f"{check:9}" for check in CHECKS).rstrip()]
    for index, name in enumerate(found.hosts):
        marks = [_mark(found, findings, index, check) for check in CHECKS]
        lines.append(f"{name:{wide}}  " + "  ".join(f"{mark:9}" for mark in marks).rstrip())
    if found.tried:
        lines += ["", *_links(found)]
    lines.append("")
    for finding in findings:
        lines += [*_wrapped(found, finding), ""]
    count, notes = len(problems(findings)), len(findings) - len(problems(findings))
    text = f"{count} problem{'' if count == 1 else 's'}" if count else "No problem found"
    if notes:
        text += f", {notes} note{'' if notes == 1 else 's'}"
    return "\n".join([*lines, f"{text}."]) + "\n"


def problems(findings: Sequence[Finding]) -> List[Finding]:
    """Return the findings that are more than notes."""
    return [row for row in findings if row.level != NOTE]


def _mark(found: Examination, findings: Sequence[Finding], index: int, check: str) -> str:
    levels = {row.level for row in problems(findings) if row.check == check and index in row.hosts}
    if not levels and found.problems[index]:
        return "-"
    return min(levels, default="ok", key=LEVELS.index)


_HEAD = ("link", "by", "there", "back")


def _links(found: Examination) -> List[str]:
    """Return a line for each pair of hosts, with the interfaces of a job and the speed each way."""
    rows: List[Tuple[str, ...]] = [_HEAD]
    for pair in sorted(found.tried):
        route, names = found.routes.get(pair), " - ".join(found.hosts[host] for host in pair)
        if route is None:
            rows.append((names, "no connection", "", ""))
        else:
            by = " - ".join(route.iface(host) for host in pair)
            rows.append((names, by, _rate(route, pair), _rate(route, pair[::-1])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(text.ljust(wide) for text, wide in zip(row, widths)).rstrip() for row in rows]


def _rate(route: Route, way: Pair) -> str:
    speed = route.speeds[way]
    return "no stream" if speed is None else _mb(speed / 1e6)


def _mb(speed: float) -> str:
    return f"{speed:.{0 if speed >= 10 else 1}f} MB/s"


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
    """Return the report for programs."""
    rows = [
        (row.level, {**row._asdict(), "hosts": [found.hosts[index] for index in row.hosts]})
        for row in findings
    ]
    content: Dict[str, Any] = {
        "hosts": [
            {"name": name, "problem": problem, "facts": facts}
            for name, problem, facts in zip(found.hosts, found.problems, found.facts)
        ],
        "links": [
            _link(found, route, *way)
            for pair, route in sorted(found.routes.items())
            for way in (pair, pair[::-1])
        ],
        "problems": [row for level, row in rows if level != NOTE],
        "notes": [row for level, row in rows if level == NOTE],
    }  # fmt: skip
    return json.dumps(content, indent=2) + "\n"


def _link(found: Examination, route: Route, source: int, target: int) -> Dict[str, Any]:
    """Return one direction of a route."""
    return {
        "from": found.hosts[source], "to": found.hosts[target], "from_iface": route.iface(source),
        "to_iface": route.iface(target), "bytes_per_s": route.speeds[source, target],
    }  # fmt: skip
