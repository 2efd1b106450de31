"""Every number in a table of the documents is in benchmarks/results, or the page says that it is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import cells  # noqa: E402
import performance  # noqa: E402
import tables  # noqa: E402
from cores import SEPARATE, SHARED  # noqa: E402
from limits import SPAN_BYTES  # noqa: E402

MEASURED = re.compile(r"\d (?:µs|us|ms|s|MB|GB|GB/s|%)(?:\W|$)|\d×|^[+-]?\d+\.\d+$", re.MULTILINE)
"""What a measured cell has: a number with a unit, a ratio, a decimal fraction."""
ELSEWHERE = "not in benchmarks/results"
COMPUTED = {
    ("docs/compression.md", "| link | float32"): "the line rate's minimum",
    ("docs/compression.md", "| | bytes per element"): "a definition",
    ("docs/protocol.md", "| type | fields"): "a definition",
    ("docs/reliability.md", "| what happens | what detects it"): "limits, which are settings",
    ("docs/scaling.md", "| | bytes of the busiest"): "a definition",
}
"""Tables with nothing measured, or that another test compares."""


class Found(NamedTuple):
    """A table: its page, its head, its text, and the sections around it."""

    page: str
    head: str
    text: str
    around: str


def found_tables() -> Iterator[Found]:
    """Every table of the documents with measured numbers."""
    for path in [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page, text = str(path.relative_to(ROOT)), re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
        for section in sections:
            for match in re.finditer(r"(?:^\|.*\n)+", section + "\n", re.MULTILINE):
                head, _, *rows = match[0].splitlines()
                cells = "\n".join(cell.strip() for row in rows for cell in row.strip("|").split("|")[1:])
                if len(MEASURED.findall(cells)) > 2:
                    around = sections[0] + (section if section is not sections[0] else "")
                    yield Found(page, head, match[0], " ".join(around.split()))


def is_made(table: Found) -> bool:
    """Return whether benchmarks/tables.py makes a table from results."""
    heads = [each.head for each in tables.TABLES if each.page == table.page]
    return any(table.head.startswith(f"| {head}".replace("|  |", "| |")) for head in heads)


def test_pages_have_the_numbers_of_the_results() -> None:
    assert tables.differences() == []


@pytest.mark.parametrize("table", list(found_tables()), ids=lambda table: f"{table.page}-{table.head[:40]}")
def test_every_measured_table_is_made_of_results_or_says_that_it_is_not(table: Found) -> None:
    computed = any(table.page == page and table.head.startswith(head) for page, head in COMPUTED)
    assert computed or is_made(table) or ELSEWHERE in table.around, table.text


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "unequal.md").read_text()
    (table,) = [each for each in tables.TABLES if each.head.startswith(" | fast one alone")]
    changed = page.replace("0.294 s | 0.279 s", "0.294 s | 0.278 s")
    assert changed != page == tables.made(changed, [table])


def test_pictures_are_those_of_the_results() -> None:
    """Those that need no matplotlib."""
    import unequal

    assert "\n".join([*unequal.bars(tables.result("unequal")), ""]) == unequal.PICTURE.read_text()


def test_a_run_beside_the_peers_is_taken_with_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = [{"what": what, "bytes": size, "processes": 2, "median": 1e10}
              for what in ("add", "copy") for size in SPAN_BYTES.values()]  # fmt: skip
    peers = {"ringcomm": 4, "ringcomm-shared": 3, "gloo": 12, "openmpi": 6}
    machine = {"when": "today", "cpu": "a processor", "cores": 2}
    call = {"collective": "allreduce", "bytes": 4_000_000}
    for name, task in (("one/compare", call), ("resnet/resnet", {"mode": "grouped"})):
        samples = [
            {"peer": peer, "np": 2, "round": number, "task": task, "ns": [ms * 10**6] * 3, "state": SHARED}
            for peer, ms in peers.items() for number in range(2) if (peer, number) != ("openmpi", 0)
        ]  # fmt: skip
        if task is call:  # a round of one peer in another state, which is in no table
            samples.append({**samples[0], "round": 2, "ns": [10**9], "state": SEPARATE})
        found = {"machine": machine, "cores": ["a shared cache"], "limits": speeds}
        path = tmp_path / f"{name}.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**found, "collected": {"samples": samples}}))
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(performance, "RESULTS", results)
    monkeypatch.setattr(cells, "RESULTS", results)
    assert performance.take(tmp_path) == ["one", "resnet"]
    first = next(each for each in tables.TABLES if each.page == "docs/performance.md")
    page = tables.made("| size | bound |\n| --- | --- |\n", [first])
    assert page == (
        "| size | bound | ringcomm | `rc.empty` | Gloo | Open MPI | Gloo / ringcomm | Open MPI / ringcomm |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 4 MB | 800 µs | 4.00 ms | 3.00 ms | 12.0 ms | 6.00 ms | 3.00 | 1.50 |\n"
    )
    assert cells.result("one_host")["resnet50"]["rounds"]["openmpi, grouped"] == [None, 0.006]


def test_the_command_makes_the_check() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], cwd=ROOT)
    assert done.returncode == 0
