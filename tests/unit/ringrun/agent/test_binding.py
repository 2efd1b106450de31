from __future__ import annotations

import os
from pathlib import Path
from typing import List, Set

import pytest

from ringrun.agent.binding import Processor, available_processors, describe, shares, usable_shares


def machine(cores: int, threads: int = 1, sockets: int = 1, slow: int = 0) -> List[Processor]:
    """Processors numbered as Linux does: first one of each core, then the second ones."""
    return [
        Processor(thread * cores + core, core, core * sockets // cores, 400 if core >= cores - slow else 1024)
        for thread in range(threads)
        for core in range(cores)
    ]


@pytest.mark.parametrize(
    ("processors", "ranks", "expected"),
    [
        (machine(4), 2, [{0, 1}, {2, 3}]),
        (machine(4), 3, [{0}, {1}, {2}]),
        (machine(4), 1, [{0, 1, 2, 3}]),
        (machine(4, threads=2), 2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (machine(4, slow=2), 2, [{0, 2}, {1, 3}]),  # each rank gets a fast one and a slow one
        (machine(2), 3, [set(), set(), set()]),  # too few: no rank is bound
        ([], 2, [set(), set()]),
    ],
)
def test_cores(processors: List[Processor], ranks: int, expected: List[Set[int]]) -> None:
    assert shares("core", processors, ranks) == expected


def test_a_board_with_unlike_cores(tmp_path: Path) -> None:
    for number in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / "cpu_capacity").write_text("512\n")
        (folder / "topology" / "core_id").write_text(f"{number}\n")
    assert {item.capacity for item in available_processors(str(tmp_path))} == {512}


def test_shares_that_the_system_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_shares("none", 2) == ([set(), set()], "")
    found, why = usable_shares("core", 1)
    assert not why and set.union(*found) <= os.sched_getaffinity(0) and all(found)
    found, why = usable_shares("core", 5000)
    assert not any(found) and len(found) == 5000
    assert describe("a", why) == "--bind has no effect on a: there are fewer cores than its 5000 ranks"
    assert describe("a", "") == ""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert usable_shares("core", 1) == ([set()], "sched_setaffinity: Operation not permitted")
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    assert usable_shares("none", 1) == ([set()], "")
    assert usable_shares("core", 1)[1] == "the system does not report the processors of a process"
