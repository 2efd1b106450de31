"""The table of modules and the tests that cover them: complete, and true about what exists."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.check_coverage import PACKAGES, ROOT, modules, table

MEASURE = """
import json, sys
from tests import check_coverage

check_coverage._import_all = lambda: None
sys.path.insert(0, str(check_coverage.ROOT / "launcher"))
_, folder, *files = sys.argv
found = check_coverage._run_tests(files, folder, ["-q", "-p", "no:cacheprovider"])
data = check_coverage._coverage(f"{folder}/data")
data.combine([folder])
lines = {}
for path in data.get_data().measured_files():
    for line, names in data.get_data().contexts_by_lineno(path).items():
        for name in names:
            lines.setdefault(name.rpartition("/")[2], {}).setdefault(path, []).append(line)
print(json.dumps([sorted(name.rpartition("/")[2] for name in found.passed), lines]))
"""
TEST = """
import subprocess, sys

def test_a_process():
    program = "import ringcomm as rc; rc.init(); rc.barrier()"
    subprocess.run([sys.executable, "-m", "ringrun", "-np", "1", sys.executable, "-c", program], check=True)
"""
OTHER = """
def test_nothing():
    pass
"""


def test_every_module_has_a_line_with_its_tests():
    listed = [row.module for row in table()]
    assert listed == sorted(set(listed)), "tests/coverage_table.txt is sorted, and names a module once"
    assert sorted(listed) == modules()
    assert [row.module for row in table() if not row.tests] == []


def test_a_module_without_a_number_has_a_reason():
    assert [row.module for row in table() if (row.percent is None) != bool(row.reason)] == []


def test_the_tests_exist():
    assert [name for row in table() for name in row.tests if not (ROOT / name).is_file()] == []


def test_a_module_is_covered_by_its_unit_test_where_there_is_one():
    for row in table():
        folder, _, file = re.sub("^(launcher|ringcomm)/_?", "", row.module).rpartition("/")
        name = "/".join(filter(None, ["tests/unit", folder, f"test_{file.lstrip('_')}"]))
        assert name in row.tests or not (ROOT / name).is_file(), row.module


def test_exclusions_have_a_reason():
    for top in PACKAGES.values():
        for path in top.rglob("*.py"):
            for line in path.read_text().splitlines():
                excluded = "pragma: no cover" in line
                assert not excluded or re.search("no cover - .{10}", line), f"{path}: {line}"


@pytest.mark.full
def test_the_processes_of_a_test_are_measured_under_its_name(tmp_path):
    pytest.importorskip("coverage", minversion="7.13")
    (tmp_path / "data").mkdir()
    (tmp_path / "test_with.py").write_text(TEST)
    (tmp_path / "test_without.py").write_text(OTHER)
    files = [str(tmp_path / name) for name in ("test_with.py", "test_without.py")]
    argv = [sys.executable, "-c", MEASURE, str(tmp_path / "data"), *files]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, lines = json.loads(done.stdout.splitlines()[-1])
    assert passed == ["test_with.py", "test_without.py"]
    assert not lines.get("test_without.py")
    for module, ended in (
        ("launcher/ringrun/job/supervise.py", "the launcher returns from main()"),
        ("launcher/ringrun/agent/agent.py", "the agent ends by os._exit()"),
        ("launcher/ringrun/agent/processes.py", "its guard, which it was forked from, too"),
        ("ringcomm/job/context.py", "a rank"),
    ):
        assert _functions_executed(lines["test_with.py"], module), f"{module}: {ended}"


def _functions_executed(lines, module):
    """Whether lines of function bodies were executed, not of definitions only."""
    path = ROOT / module
    bodies = {
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }
    return bodies.intersection(lines.get(str(path), []))
