"""The changes that seeded.py makes: of which kinds, where not, and that each leaves a program."""

from __future__ import annotations

import ast

import pytest

from tests.mutations.seeded import AREAS, ROOT, Result, choose, ended_at, survivors_of
from tests.mutations.sites import sites_of


def changes(source):
    """What each change makes of the line that it changes."""
    found = []
    for site in sites_of("a.py", source):
        pairs = zip(source.splitlines(), site.apply(source).splitlines())
        found += [after.strip() for before, after in pairs if before != after]
    return found


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a in b", ["x = (a not in b)"]),
        ("x = a + b", ["x = (a - b)"]),
        ("x = 'a' + b", []),
        ("x = a and not b", ["x = (a or not b)", "x = a and (b)"]),
        ("x = 3", ["x = (4)"]),
        ("x = True", ["x = (False)"]),
        ("x = -1", ["x = (1)"]),
        ("x = a if b else c", ["x = (c if b else a)"]),
        ("if a:\n    x = b", ["if not a:"]),
        ("f(a)", ["pass"]),
        ("x.y = a", ["pass"]),
        ("x = a", []),
        ("raise E(a + b)", ["pass"]),
        ("for a in b:\n    break", ["pass"]),
        ("def f(a: int = 1) -> List[3]:\n    'text'", ["def f(a: int = (2)) -> List[3]:"]),
        ("log.debug('%d', a + 1)", []),
        ("x = f'{a + 1}'", []),
        ("if TYPE_CHECKING:\n    f(1)", []),
        ("x = 'ä' if a else b  # ö", ["x = (b if a else 'ä')  # ö"]),
    ],
)
def test_kinds(source, wrong):
    assert changes(source) == wrong


def test_an_expression_on_several_lines():
    source = "x = f(\n    a +\n    b)\n"
    assert [site.apply(source) for site in sites_of("a.py", source)] == ["x = f(\n    (a - b))\n"]


def test_every_change_of_a_file_leaves_a_program():
    source = (ROOT / "ringcomm/transport/accept.py").read_text()
    sites = sites_of("accept.py", source)
    assert len(sites) > 100
    unchanged = ast.dump(ast.parse(source))
    for site in sites:
        assert ast.dump(ast.parse(site.apply(source))) != unchanged, site
        assert site.right(source) in source


def test_a_seed_chooses_the_same_sites_again_and_equally_many_in_each_area():
    areas = ["schedule", "collective"]
    sites = choose(3, 7, areas)
    assert sites == choose(3, 7, areas) != choose(4, 7, areas)
    assert [sum(site.file.startswith(AREAS[area]) for site in sites) for area in areas] == [4, 3]


def test_survivors_of_a_table_are_found_again_where_they_are_now():
    file = "ringcomm/transport/accept.py"
    source = (ROOT / file).read_text()
    site = sites_of(file, source)[40]
    moved = site._replace(line=site.line + 3)
    table = [
        str(Result(1, moved, site.right(source), 3, 1.0, "")),
        str(Result(2, sites_of(file, source)[50], "x", 3, 1.0, "hang")),
        str(Result(3, site, "what is not there any more", 3, 1.0, "")),
        "",
        "caught: 1 of 3",
    ]
    assert survivors_of("\n".join(table)) == [site]


PASSED = "tests/a.py::test_a PASSED           [ 50%]\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (PASSED + "tests/a.py::test_b[x y] FAILED\nFAILED tests/a.py::test_b[x y] - x", ("test_b[x y]", "")),
        (PASSED + "tests/a.py::test_b[x] +++++ Timeout ++++++\n~~~~ Stack", ("test_b[x]", " hangs")),
        (PASSED + "tests/a.py::test_b[x] ", ("test_b[x]", " hangs")),
    ],
)
def test_the_test_at_which_pytest_has_ended(output, found):
    assert ended_at(output) == ("tests/a.py::" + found[0], found[1])
