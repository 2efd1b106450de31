"""Branch coverage of every module by its own tests: those that the table in coverage_table.txt names for it.

A module that only the tests of other modules reach has no tests of its own; a bug in it is found late, far
from its cause. So each module names the test files that must cover it alone (its unit test, or a stated
integration test), and how much of it they cover at least, in percent of lines and branches. 95 is the aim; a
lower number is what is reached so far, and may only rise.

    python tests/check_coverage.py [PART OF A PATH ...]           measure and compare
    python tests/check_coverage.py --write [PART OF A PATH ...]   measure, and raise the numbers

A part of a path chooses modules, by their own path or by that of one of their tests: measuring everything
takes an hour, so do it in pieces. Each test file runs once; what it covers is recorded under its name. Unit
tests run whole, and of other parametrized tests one case in four, always the same ones. The processes that a
test starts, and those that they start, are measured too, as far as they end in a way in which they can still
write down what they have covered (not by SIGKILL), and run in this interpreter and file system.

A module whose tests are skipped in this environment is not measured: those of the TensorFlow, Keras and JAX
adapters need ``.venv-test-tf/bin/python tests/check_coverage.py tensorflow keras jax``, that of MXNet
``.venv-test-mxnet``, and those of Ray, Dask and Spark ``.venv-test-engines``. A module that could
not be measured has ``-`` in place of a number, and the reason after a ``#``; ``--missing`` tries these.
Modules without any function are not in the table. Exclusions are marked in the code, each with its reason:
``# pragma: no cover - needs another kernel``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "coverage_table.txt"
PACKAGES = {"ringcomm": ROOT / "ringcomm", "ringrun": ROOT / "launcher" / "ringrun"}
AIM = 95.0
SHARE = 4
"""Of a parametrized test outside tests/unit one case in so many runs."""
SLACK = 2
"""By so many percent the coverage by integration tests may differ between runs: some depends on time."""
FAILED = "tests have failed"
TEST_FILE = "COVERAGE_TEST_FILE"
"""The environment variable that names the test file by which a process was started."""
_EXCLUDED = [
    "if TYPE_CHECKING:", "raise NotImplementedError", r"@(abc\.)?abstractmethod",
    r"^\s*\.\.\.$", r"\).*: \.\.\.$",
]  # fmt: skip

_SETTINGS = """
[run]
branch = true
parallel = true
data_file = {folder}/data
context = ${{COVERAGE_TEST_FILE}}
include =
{tops}
patch = _exit
sigterm = true
disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse, no-sysmon
"""
"""For the processes that tests start. They read it because COVERAGE_PROCESS_START names it, and a file that
the package ``coverage`` installs starts it in each interpreter that has this variable."""

_OPTIONS = ["-q", "--no-header", "-rs", "-p", "no:cacheprovider", "--timeout", "600", "--schedules", "60"]


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        module: path of the module, from the root of the repository.
        percent: how much of its lines and branches its tests cover at least; None: that is not measured.
        tests: the test files.
        reason: why it is not measured.
    """

    module: str
    percent: Optional[float]
    tests: List[str]
    reason: str = ""


def table() -> List[Row]:
    """The table: a line ``PERCENT MODULE TEST-FILE ... [# REASON]`` for each module."""
    lines = TABLE.read_text().splitlines()
    return [_row(line) for line in lines if line and not line.startswith("#")]


def _row(line: str) -> Row:
    facts, _, reason = line.partition("#")
    percent, module, *tests = facts.split()
    return Row(module, None if percent == "-" else float(percent), tests, reason.strip())


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
    missing: Dict[str, List[str]] = {}
    for package, top in PACKAGES.items():
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            if parts[-1] in ("__main__", "_forward") or "horovod_shim" in parts:
                continue
            name = ".".join((package, *parts)).replace(".__init__", "")
            try:
                importlib.import_module(name)
            except ImportError as problem:  # of a framework that is not installed here
                missing.setdefault(str(problem).splitlines()[0], []).append(name)
    for problem_text, names in missing.items():
        print(f"not imported: {names[0]} and {len(names) - 1} others: {problem_text}")


class _ByFile:
    """A pytest plugin that records what is covered under the name of the test file.

    Attributes:
        passed: the test files of which a test has passed.
        failed: the test files of which a test has failed.
    """

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self.passed: Set[str] = set()
        self.failed: Set[str] = set()

    def _enter(self, nodeid: str) -> None:
        name = nodeid.split("::")[0]
        self._coverage.switch_context(name)
        os.environ[TEST_FILE] = name

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or (report.when == "call" and report.passed):
            (self.failed if report.failed else self.passed).add(report.nodeid.split("::")[0])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid.split("::")[0])

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
    """Run the tests of these rows.

    Yields:
        Each row with the percentage that was measured; None, and the reason, where its tests have failed or
        were skipped.
    """
    with tempfile.TemporaryDirectory() as folder:
        by_file = _run_tests(sorted({name for row in rows for name in row.tests}), folder)
        together = _coverage(f"{folder}/data")
        for pattern in _EXCLUDED:
            together.exclude(pattern)
        together.combine([folder])
        for row in rows:
            failed = by_file.failed.intersection(row.tests)
            if failed or not by_file.passed.issuperset(row.tests):
                why = f"{FAILED}: {', '.join(sorted(failed))}" if failed else "skipped here"
                yield row._replace(percent=None, reason=why)
            else:
                yield row._replace(percent=_percent(together, row, f"{folder}/report.json"))


def _coverage(data: str) -> Any:
    import coverage

    source = [str(top) for top in PACKAGES.values()]
    return coverage.Coverage(data, branch=True, source=source, config_file=False)


def _run_tests(files: Sequence[str], folder: str, options: Sequence[str] = _OPTIONS) -> _ByFile:
    """Run test files; what they and their processes cover is in the files ``data.*`` of the folder."""
    import pytest

    tops = "".join(f"  {top}/*\n" for top in PACKAGES.values())
    Path(folder, "coveragerc").write_text(_SETTINGS.format(folder=folder, tops=tops))
    measured = _coverage(f"{folder}/data.tests")
    measured.start()
    sys.path.insert(0, str(ROOT / "launcher"))
    _import_all()
    by_file = _ByFile(measured)
    # The agent's program names its files as modules do, and coverage looks for them along sys.path.
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher"), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"COVERAGE_PROCESS_START": f"{folder}/coveragerc", "PYTHONPATH": path}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in settings.items():
            patched.setenv(name, value)
        pytest.main([*options, *files], [by_file])
    measured.stop()
    measured.save()
    return by_file


def _percent(measured: Any, row: Row, output: str) -> float:
    """Return how much of a module its tests have covered."""
    contexts = ["^$", *(f"^{re.escape(name)}$" for name in row.tests)]
    path = str(ROOT / row.module)
    sys.stdout.flush()
    measured.json_report(include=[path], contexts=contexts, outfile=output, show_contexts=False)
    report: Dict[str, Any] = json.loads(Path(output).read_text())
    (found,) = report["files"].values()
    summary = found["summary"]
    if summary["percent_covered"] < (AIM if row.percent is None else row.percent):
        arcs = ", ".join(f"{a}->{b}" for a, b in found["missing_branches"])
        print(f"{row.module}: not covered: lines {found['missing_lines']}, branches {arcs}")
    return float(summary["percent_covered"])


def main() -> None:
    """Measure, and compare with the table or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--missing", action="store_true", help="only the modules that have no number")
    parser.add_argument("parts", nargs="*")
    given = parser.parse_args()
    chosen = [row for row in table() if (row.percent is None) == given.missing]
    if given.parts:
        paths = {row.module: " ".join((row.module, *row.tests)) for row in chosen}
        chosen = [row for row in chosen if any(part in paths[row.module] for part in given.parts)]
    if not chosen:
        parser.error("no row of the table matches")
    measured = list(measure(chosen))
    found = {row.module: row.percent for row in measured if row.percent is not None}
    for row in measured:
        if row.percent is None:
            print(f"not measured: {row.module}: {row.reason}")
    for module, percent in sorted(found.items(), key=lambda item: item[1]):
        if percent < AIM:
            print(f"{percent:6.1f} {module}")
    reached = sum(1 for percent in found.values() if percent >= AIM)
    print(f"{reached} of {len(found)} modules are covered to {AIM:.0f} % by their own tests")
    low = [row.module for row in chosen if found.get(row.module, 100.0) < (row.percent or 0.0)]
    if given.write:
        _write(found)
    elif low:
        raise SystemExit(f"covered less than the table says: {', '.join(low)}")
    if any(row.reason.startswith(FAILED) for row in measured):
        raise SystemExit("not all was measured, because tests have failed")


def _write(found: Dict[str, float]) -> None:
    """Raise the numbers in the table; a number never falls."""
    lines = []
    for line in TABLE.read_text().splitlines():
        row = None if not line or line.startswith("#") else _row(line)
        if row is not None and row.module in found:
            slack = 0 if all(name.startswith("tests/unit/") for name in row.tests) else SLACK
            least = min(int(AIM), max(int(row.percent or 0), int(found[row.module]) - slack))
            line = " ".join([f"{least:3}", row.module, *row.tests])
        lines.append(line)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
