"""The table of modules and the tests that cover them: complete, and true about what exists."""

from __future__ import annotations

import re

from tests.check_coverage import PACKAGES, ROOT, modules, table


def test_every_module_has_a_line_with_its_tests():
    listed = [row.module for row in table()]
    assert listed == sorted(set(listed)), "tests/coverage_table.txt is sorted, and names a module once"
    assert sorted(listed) == modules()
    assert [row.module for row in table() if not row.tests] == []


def test_the_tests_exist():
    assert [name for row in table() for name in row.tests if not (ROOT / name).is_file()] == []


def test_a_module_is_covered_by_its_unit_test_where_there_is_one():
    own = {path.name: str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
    for row in table():
        folder = row.module.replace("launcher/", "").replace("ringcomm/", "").rpartition("/")[0]
        name = own.get(f"test_{row.module.rpartition('/')[2].lstrip('_')}", "")
        if name.startswith(f"tests/unit/{folder}/"):
            assert name in row.tests, row.module


def test_exclusions_have_a_reason():
    for top in PACKAGES.values():
        for path in top.rglob("*.py"):
            for line in path.read_text().splitlines():
                excluded = "pragma: no cover" in line
                assert not excluded or re.search("no cover - .{10}", line), f"{path}: {line}"
