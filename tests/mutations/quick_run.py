"""Which tests of the quick run execute which lines: measured with coverage.py, a context per test.

Code that runs in processes which a test has started counts for that test, unless they were killed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, Tuple
from xml.etree import ElementTree

import pytest

from tests.mutations.copies import environ_for

PARTS = (["tests/unit", "tests/sim", "tests/fuzz"], ["tests/integration"], ["tests/proc"])
_QUICK = ["--quick", "-m", "not slow and not hosts and not aarch64"]
_STATED = {"launcher/ringrun/compat/": "tests/proc/test_ringrun_horovod.py::"}
"""The tests for files that run where they cannot be seen."""
_PHASE = re.compile(r" \((setup|call|teardown)\)$")
_CONFIGURATION = """
[run]
branch = false
parallel = true
data_file = {data}
context = ${{PYTEST_CURRENT_TEST-}}
source =
    {where}/ringcomm
    {where}/launcher/ringrun
patch = _exit
disable_warnings = no-data-collected,module-not-measured,module-not-imported
"""


class QuickRun:
    """The tests of the quick run: what each executes, and how long it takes.

    Args:
        seconds: by test, how long it took; only tests that have passed.
        lines: by file and line, the tests that execute it.
    """

    def __init__(self, seconds: Dict[str, float], lines: Dict[str, Dict[int, List[str]]]) -> None:
        self.seconds = seconds
        self._lines = lines

    def tests_for(self, file: str, line: int, end_line: int) -> List[str]:
        """The tests that execute one of these lines, or, if they run at import, any line of the file.

        Those in the file's own test module come first, then the quick ones. A file that is not seen to be
        executed (the launcher sends some to other processes as text) counts as its directory.
        """
        of_file = self._lines.get(file, {})
        found = {test for number in range(line, end_line + 1) for test in of_file.get(number, ())}
        if not found:
            found = {test for tests in of_file.values() for test in tests}
        if not found:
            beside = [self._lines[other] for other in self._lines if Path(other).parent == Path(file).parent]
            found = {test for lines in beside for tests in lines.values() for test in tests}
        for place, suite in _STATED.items():
            if file.startswith(place):
                found |= {test for test in self.seconds if test.startswith(suite)}
        own = f"/test_{Path(file).stem.lstrip('_')}.py"
        return sorted(found, key=lambda test: (own not in test, self.seconds[test], test))

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps({"seconds": self.seconds, "lines": self._lines}))

    @classmethod
    def load(cls, path: Path) -> QuickRun:
        """Read what :meth:`save` has written."""
        content = json.loads(path.read_text())
        lines = {
            file: {int(line): tests for line, tests in of_file.items()}
            for file, of_file in content["lines"].items()
        }
        return cls(content["seconds"], lines)


def measure(where: Path, scratch: Path, jobs: int) -> QuickRun:
    """Run the quick run's tests in a copy of the project, and note what each executes.

    Args:
        where: the copy.
        scratch: an empty directory for the data.
        jobs: how many parts run at a time.
    """
    (scratch / "rc").write_text(_CONFIGURATION.format(data=scratch / "data", where=where))
    coverage = [sys.executable, "-m", "coverage"]

    def run(number: int) -> Path:
        report = scratch / f"{number}.xml"
        command = [*coverage, "run", "--rcfile", str(scratch / "rc"), "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", "-p", __name__, f"--junitxml={report}"]
        command += [*_QUICK, *PARTS[number]]
        with open(scratch / f"{number}.log", "w") as log:
            subprocess.run(command, cwd=where, env=environ_for(where), stdout=log, stderr=log, check=False)
        return report

    with ThreadPoolExecutor(jobs) as pool:
        reports = list(pool.map(run, range(len(PARTS))))
    seconds = dict(item for report in reports for item in _passed(report))
    subprocess.run([*coverage, "combine", "--rcfile", str(scratch / "rc"), "-q"], cwd=where, check=False)
    return QuickRun(seconds, _lines(where, scratch / "data", seconds))


def _passed(report: Path) -> List[Tuple[str, float]]:
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [
        (properties[0].get("value", ""), float(case.get("time", "0")))
        for case in cases
        if not any(case.findall(kind) for kind in ("failure", "error", "skipped"))
        and (properties := case.findall("properties/property[@name='test']"))
    ]


def _lines(where: Path, data: Path, seconds: Dict[str, float]) -> Dict[str, Dict[int, List[str]]]:
    from coverage import CoverageData

    measured = CoverageData(str(data))
    measured.read()
    lines: Dict[str, Dict[int, List[str]]] = {}
    for file in measured.measured_files():
        of_file = lines.setdefault(str(Path(file).relative_to(where)), {})
        for line, contexts in measured.contexts_by_lineno(file).items():
            # A context is what was set below, or what pytest has told processes that a test has started.
            tests = {_PHASE.sub("", context.split("|")[-1]) for context in contexts}
            of_file[line] = sorted(tests & seconds.keys())
    return lines


class _Contexts:
    """The part that runs within pytest: it names the running test to coverage.py."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        from coverage import Coverage

        item.user_properties.append(("test", item.nodeid))
        current = Coverage.current()
        assert current is not None
        current.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            current.switch_context("")


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest, which loads this module as a plugin."""
    from coverage import Coverage

    current = Coverage.current()
    assert current is not None
    # With it a file that coverage.py has installed starts it in other processes. Its own way (patch =
    # subprocess) gives them this process' context, not that of the test.
    os.environ["COVERAGE_PROCESS_START"] = str(current.config.config_file)
    config.pluginmanager.register(_Contexts())
