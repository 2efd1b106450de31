from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, NamedTuple, Set

import pytest

from ringrun.agent import binding
from ringrun.agent.binding import Processor, available_processors, describe, shares, usable_shares


def machine(cores: int, threads: int = 1, sockets: int = 1, slow: int = 0) -> List[Processor]:
    """Processors numbered as Linux does: first one of each core, then the second ones."""
    return [
        Processor(
            thread * cores + core, core, core * sockets // cores, 400 if core >= cores - slow else 1024
        )
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


class Recorded(NamedTuple):
    """What /sys/devices/system/cpu of a machine says: the files of its processors."""

    processors: int
    threads: int
    sockets: Dict[int, int]
    last_level: List[str]

    def write(self, root: Path) -> None:
        for number in range(self.processors):
            folder = root / f"cpu{number}"
            core = number % (self.processors // self.threads)
            files = {
                "topology/core_id": str(core),
                "topology/physical_package_id": str(self.sockets.get(number, 0)),
                "cache/index0/level": "1",
                "cache/index0/shared_cpu_list": str(number),
                "cache/index2/level": "2",
                "cache/index2/shared_cpu_list": str(number),
                "cache/index3/level": "3",
                "cache/index3/shared_cpu_list": next(
                    text for text in self.last_level if number in numbers_of(text)
                ),
            }
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(f"{text}\n")


def numbers_of(text: str) -> Set[int]:
    parts = [part.split("-") for part in text.split(",")]
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


ORIN = Recorded(12, 1, {}, ["0-3", "4-7", "8-11"])
RYZEN = Recorded(24, 2, {}, ["0-5,12-17", "6-11,18-23"])
SOCKETS = Recorded(8, 1, {number: number % 2 for number in range(8)}, ["0,2,4,6", "1,3,5,7"])


@pytest.mark.parametrize(
    ("recorded", "usable", "ranks", "expected"),
    [
        (ORIN, "0-11", 2, ["0-1", "2-3"]),
        (ORIN, "0-11", 3, ["0", "1", "2"]),
        (ORIN, "0-11", 6, ["0", "1", "2", "3", "4", "5"]),
        (ORIN, "0-11", 1, ["0-3"]),
        (ORIN, "2-11", 4, ["4", "5", "6", "7"]),  # of the first cluster two cores are left
        (RYZEN, "0-23", 2, ["0-2,12-14", "3-5,15-17"]),
        (RYZEN, "0-23", 8, ["0,12", "1,13", "2,14", "3,15", "4,16", "5,17", "6,18", "7,19"]),
        (SOCKETS, "0-7", 2, ["0,2", "4,6"]),
        (SOCKETS, "0-7", 4, ["0", "2", "4", "6"]),
    ],
)
def test_as_few_caches_as_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Recorded, usable: str, ranks: int,
    expected: List[str],
) -> None:  # fmt: skip
    recorded.write(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: numbers_of(usable))
    processors = available_processors(str(tmp_path))
    assert shares("cache", processors, ranks) == [numbers_of(text) for text in expected]


def test_of_caches_that_suffice_the_fast_cores_are_taken() -> None:
    slow = [Processor(number, number, 0, 400, 0) for number in range(4)]
    fast = [Processor(number, number, 0, 1024, 4) for number in range(4, 6)]
    assert shares("cache", slow + fast, 2) == [{4}, {5}]
    assert shares("cache", slow + fast, 3) == [{0}, {1}, {2}]


def test_without_information_about_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares("cache", machine(4), 2) == shares("core", machine(4), 2)
    monkeypatch.setattr(binding, "available_processors", lambda: available_processors(str(tmp_path)))
    found, why = usable_shares("cache", 1)
    assert found == [os.sched_getaffinity(0)]
    assert describe("a", why) == (
        "--bind binds as --bind core on a: the system does not report which cores share a cache"
    )
    assert "fewer cores" in usable_shares("cache", 5000)[1]


def test_sockets_are_taken_in_turns() -> None:
    assert shares("socket", machine(4, sockets=2), 3) == [{0, 1}, {2, 3}, {0, 1}]


def test_none() -> None:
    assert shares("none", machine(4), 2) == [set(), set()]


def test_this_machine() -> None:
    found = available_processors()
    assert {item.number for item in found} == os.sched_getaffinity(0)


def test_a_board_with_unlike_cores(tmp_path: Path) -> None:
    for number in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / "cpu_capacity").write_text("512\n")
        (folder / "topology" / "core_id").write_text(f"{number}\n")
    assert {item.capacity for item in available_processors(str(tmp_path))} == {512}


def test_shares_that_the_system_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_shares("none", 2) == ([set(), set()], "")
    found, why = usable_shares("socket", 2)
    assert not why and set.union(*found) <= os.sched_getaffinity(0) and all(found)
    found, why = usable_shares("core", 5000)
    assert not any(found) and len(found) == 5000
    assert describe("a", why) == "--bind has no effect on a: there are fewer cores than its 5000 ranks"
    assert describe("a", "") == ""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert usable_shares("socket", 2) == ([set(), set()], "sched_setaffinity: Operation not permitted")
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    assert usable_shares("none", 1) == ([set()], "")
    assert usable_shares("core", 1)[1] == "the system does not report the processors of a process"
