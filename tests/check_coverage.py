"""Branch coverage of every module by its own tests: those that the table in coverage_table.txt names for it.

A module that only the tests of other modules reach has no tests of its own; a bug in it is found late, far
from its cause. So each module names the test files that must cover it alone (its unit test, or a stated
contract suite), and how much of it they cover at least, in percent of lines and branches. 95 is the aim; a
lower number is what is reached so far, and may only rise.

    python tests/check_coverage.py [PART OF A PATH ...]           measure and compare
    python tests/check_coverage.py --write [PART OF A PATH ...]   measure, and raise the numbers

The tests run once, in one process; what they cover is recorded by test file. Unit tests run whole, and of
parametrized tests in tests/contract and tests/sim one case in four, always the same ones. Processes that
tests start are not measured: a module that runs only in such processes has ``-`` in place of a number.
Modules without any function are not in the table. Exclusions are marked in the code, each with its reason:
``# pragma: no cover - needs another kernel``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "coverage_table.txt"
PACKAGES = {"ringcomm": ROOT / "ringcomm", "ringrun": ROOT / "launcher" / "ringrun"}
AIM = 95.0
SHARE = 4
"""Of a parametrized test outside tests/unit one case in so many runs."""
SLACK = 2
"""By so many percent the coverage by contract tests may differ between runs: some branches depend on time."""
_EXCLUDED = ["if TYPE_CHECKING:", r"raise NotImplementedError", r"@(abc\.)?abstractmethod", r"^\s*\.\.\.$"]


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        module: path of the module, from the root of the repository.
        percent: how much of its lines and branches its tests cover at least; None: that is not measured.
        tests: the test files.
    """

    module: str
    percent: Optional[float]
    tests: List[str]


def table() -> List[Row]:
    """The table: a line ``PERCENT MODULE TEST-FILE ...`` for each module."""
    rows = []
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            percent, module, *tests = line.split()
            rows.append(Row(module, None if percent == "-" else float(percent), tests))
    return rows


def modules() -> List[str]:
    """The modules that the table must have, as paths from the root of the repository."""
    return sorted(
        str(path.relative_to(ROOT))
        for top in PACKAGES.values()
        for path in top.rglob("*.py")
        if "horovod_shim" not in path.parts and _has_functions(path)
    )


def _has_functions(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(path.read_text())))


def _import_all() -> None:
    """Import every module that can be imported here, so that definitions do not count for the first test."""
    for package, top in PACKAGES.items():
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            if parts[-1] in ("__main__", "_forward") or "horovod_shim" in parts:
                continue
            name = ".".join((package, *parts)).replace(".__init__", "")
            try:
                importlib.import_module(name)
            except ImportError as problem:
                print(f"not measured: {name} ({problem})")


class _ByFile:
    """A pytest plugin that records what is covered under the name of the test file."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage

    def _enter(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid.split("::")[0])

    def pytest_collectstart(self, collector: Any) -> None:
        self._enter(collector.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._enter(nodeid)

    def pytest_collection_modifyitems(self, config: Any, items: List[Any]) -> None:
        families: Dict[str, List[Any]] = {}
        for item in items:
            if hasattr(item, "callspec") and not item.nodeid.startswith("tests/unit/"):
                families.setdefault(item.nodeid.split("[")[0], []).append(item)
        left_out = set()
        for cases in families.values():
            cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            left_out.update(cases[-(-len(cases) // SHARE) :])
        items[:] = [item for item in items if item not in left_out]


def measure(rows: Sequence[Row]) -> Iterator[Row]:
    """Run the tests of these rows; yields each row with the percentage that was measured.

    Raises:
        SystemExit: a test has failed.
    """
    import coverage
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        source = [str(top) for top in PACKAGES.values()]
        measured = coverage.Coverage(f"{folder}/data", branch=True, source=source, config_file=False)
        for pattern in _EXCLUDED:
            measured.exclude(pattern)
        measured.start()
        sys.path.insert(0, str(ROOT / "launcher"))
        _import_all()
        files = sorted({name for row in rows for name in row.tests})
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "--schedules", "60"]
        code = pytest.main([*options, *files], [_ByFile(measured)])
        measured.stop()
        measured.save()
        if code:
            raise SystemExit(f"the tests have failed ({code}): nothing was measured")
        for row in rows:
            yield row._replace(percent=_percent(measured, row, f"{folder}/report.json"))


def _percent(measured: Any, row: Row, output: str) -> float:
    """How much of a module its tests have covered."""
    contexts = ["^$", *(f"^{re.escape(name)}$" for name in row.tests)]
    path = str(ROOT / row.module)
    sys.stdout.flush()
    measured.json_report(include=[path], contexts=contexts, outfile=output, show_contexts=False)
    report: Dict[str, Any] = json.loads(Path(output).read_text())
    (found,) = report["files"].values()
    summary = found["summary"]
    if row.percent and summary["percent_covered"] < row.percent:
        arcs = ", ".join(f"{a}->{b}" for a, b in found["missing_branches"])
        print(f"{row.module}: not covered: lines {found['missing_lines']}, branches {arcs}")
    return float(summary["percent_covered"])


def main() -> None:
    """Measure, and compare with the table or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("parts", nargs="*")
    given = parser.parse_args()
    rows = [row for row in table() if row.percent is not None]
    chosen = [row for row in rows if not given.parts or any(part in row.module for part in given.parts)]
    found = {row.module: row.percent or 0.0 for row in measure(chosen)}
    low = [row for row in chosen if found[row.module] < (row.percent or 0.0)]
    for row in sorted(chosen, key=lambda row: found[row.module]):
        if found[row.module] < AIM:
            print(f"{found[row.module]:6.1f} {row.module}")
    reached = sum(1 for row in chosen if found[row.module] >= AIM)
    print(f"{reached} of {len(chosen)} modules are covered to {AIM:.0f} % by their own tests")
    if given.write:
        _write(found)
    elif low:
        raise SystemExit("covered less than the table says: " + ", ".join(row.module for row in low))


def _write(found: Dict[str, float]) -> None:
    """Raise the numbers in the table; a number never falls."""
    lines = []
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#") and line.split()[1] in found:
            percent, module, *tests = line.split()
            slack = 0 if all(name.startswith("tests/unit/") for name in tests) else SLACK
            least = min(int(AIM), max(int(percent), int(found[module]) - slack))
            line = " ".join([f"{least:3}", module, *tests])
        lines.append(line)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
