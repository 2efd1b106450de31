"""``ringrun doctor``: the report about an examination, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
import time
from typing import List, Sequence, Tuple

from ringcomm.rendezvous.routing import Pair

from ..job.launch import prepare
from ..plan.options import Options
from .findings import CHECKS, LEVELS, NOTE, Finding, all_findings
from .network import Examination, Route, examine

WIDTH = 100


def run_doctor(options: Options, as_data: bool) -> Tuple[str, int]:
    """Examine hosts and the network between them; return the text and the exit code."""
    began = time.monotonic()
    found = examine(prepare(options, ["true"]))
    findings = all_findings(found)
    code = 1 if problems(findings) else 0
    if as_data:
        return as_json(found, findings), code
    plural = "" if len(found.hosts) == 1 else "s"
    took = f"Examined {len(found.hosts)} host{plural} in {time.monotonic() - began:.1f} s.\n"
    return as_text(found, findings) + took, code


def problems(findings: Sequence[Finding]) -> List[Finding]:
    """Return the findings that are more than notes."""
    return [row for row in findings if row.level != NOTE]


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


def _mark(found: Examination, findings: Sequence[Finding], index: int, check: str) -> str:
    levels = {row.level for row in problems(findings) if row.check == check and index in row.hosts}
    return min(levels, default="-" if found.problems[index] else "ok", key=LEVELS.index)


def _links(found: Examination) -> List[str]:
    """Return a line for each pair of hosts, with the interfaces of a job and the speed each way."""
    rows: List[Tuple[str, ...]] = [("link", "by", "there", "back")]
    for pair in sorted(found.tried):
        route, names = found.routes.get(pair), " - ".join(found.hosts[host] for host in pair)
        if route is None:
            rows.append((names, "no connection", "", ""))
        else:
            by = " - ".join(route.iface(host) for host in pair)
            rows.append((names, by, _rate(route, pair), _rate(route, pair[::-1])))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(text.ljust(wide) for text, wide in zip(row, widths)).rstrip() for row in rows]


def _rate(route: Route, way: Pair) -> str:
    speed = route.speeds[way]
    return f"{speed:.{0 if speed >= 10 else 1}f} MB/s" if speed else "no stream"


def _wrapped(found: Examination, finding: Finding) -> List[str]:
    names = ", ".join(found.hosts[index] for index in finding.hosts)
    text = f"{finding.level}: {names}: {finding.text}"
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="      ", break_on_hyphens=False)
    remedy = f"      → {finding.remedy}" if finding.remedy else ""
    return lines + textwrap.wrap(remedy, WIDTH, subsequent_indent="        ", break_on_hyphens=False)


def as_json(found: Examination, findings: Sequence[Finding]) -> str:
    """Return the report for programs."""
    rows = [{**row._asdict(), "hosts": [found.hosts[index] for index in row.hosts]} for row in findings]
    content = {
        "hosts": [
            {"name": name, "problem": problem, "facts": facts}
            for name, problem, facts in zip(found.hosts, found.problems, found.facts)
        ],
        "links": [
            {
                "from": found.hosts[source], "to": found.hosts[target], "from_iface": route.iface(source),
                "to_iface": route.iface(target), "bytes_per_s": 1e6 * route.speeds[source, target],
            }
            for pair, route in sorted(found.routes.items())
            for source, target in (pair, pair[::-1])
        ],
        "problems": [row for row in rows if row["level"] != NOTE],
        "notes": [row for row in rows if row["level"] == NOTE],
    }  # fmt: skip
    return json.dumps(content, indent=2) + "\n"
