"""`on_ranks` and `ranks_of`: run a function on every rank of a job; `alone`: a job of this process."""

from __future__ import annotations

import gc
import signal
import threading
import zlib
from pathlib import Path

import pytest

import ringcomm as rc
from ringcomm import api
from ringcomm.config import Membership
from ringcomm.testing.cluster import run_ranks

# Under nohup or in a background job of a plain shell these arrive ignored, and what the tests start would
# inherit that: ringrun, for one, leaves SIGHUP ignored then.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

QUICK_SHARE = 12
"""In the quick tier one case of a parametrized test in so many is run, and of others that start processes or
ranks one in QUICK_PARTS, the same ones everywhere."""
UNIT_SHARE = 4
UNIT_CASES = 6
"""Unit tests take milliseconds: in the quick tier up to so many cases of each are run, or one in UNIT_SHARE
if those are more. Those that are marked ``sampled`` are treated as other tests."""
QUICK_PARTS = 3
CI_CASES = 8
CI_CASES_OF_PROCESSES = 3
"""In CI so many cases of a parametrized test that is not a unit test are run, the same ones everywhere: the
smaller number where a test starts processes, or what its marker ``cases`` says."""
OF_PROCESSES = tuple(Path(__file__).parent / name for name in ("adapters", "hosts", "proc"))

UNIT = Path(__file__).parent / "unit"
PAIRS = [
    ("memory", 1), ("memory", 2), ("memory", 3), ("memory", 5), ("memory", 8),
    ("tcp", 2), ("tcp", 3), ("auto", 3),
]  # fmt: skip
"""Transports and numbers of ranks of tests of collectives: every kind of step of every algorithm. The
symbolic checker proves each algorithm for 1 to 64 ranks."""
PROGRAMS = {"quick": 6, "ci": 8, "all": 40}
SCHEDULES = {"quick": 50, "ci": 150, "all": 1000}


def pytest_addoption(parser):
    parser.addoption(
        "--tier", choices=("quick", "ci", "all"), default="all",
        help="quick: a selection, without tests marked `full` or `release`; ci: without those marked "
        "`release`, and of parametrized tests a share; all (the default): everything",
    )
    parser.addoption("--schedules", type=int, metavar="N", help="run N simulated jobs, with seeds from 0")
    parser.addoption(
        "--starts", type=int, default=0, metavar="N",
        help="start N jobs of each case of tests/hosts/test_routes.py, not two",
    )
    parser.addoption("--programs", type=int, metavar="N", help="run N programs from seeds of each kind")
    parser.addoption("--all-kills", action="store_true", help="run the whole kill matrix, not a selection")


def pytest_configure(config):
    option = config.option
    option.programs = option.programs or PROGRAMS[option.tier]
    option.schedules = option.schedules or SCHEDULES[option.tier]


def pytest_collection_modifyitems(config, items):
    """Leave out what the tier does not run."""
    tier = config.option.tier
    left_out = {"quick": ("full", "release"), "ci": ("release",), "all": ()}[tier]
    gone = {item for item in items if any(item.get_closest_marker(name) for name in left_out)}
    families = {}
    for item in items:
        if hasattr(item, "callspec"):
            families.setdefault(item.nodeid.split("[")[0], []).append(item)
        elif tier == "quick" and zlib.crc32(item.nodeid.encode()) % QUICK_PARTS and is_long(item):
            gone.add(item)
    for cases in families.values():
        cases = [item for item in cases if item not in gone]
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        gone.update(cases[cases_of(tier, cases) :])
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]
    if getattr(config.option, "loadgroup", False):
        name_groups(items)


def cases_of(tier, cases):
    """Return how many cases of a parametrized test a tier runs."""
    if tier == "all" or not cases:
        return len(cases)
    short = is_short_unit_test(cases[0])
    if tier == "ci":
        started = any(folder in cases[0].path.parents for folder in OF_PROCESSES)
        wanted = cases[0].get_closest_marker("cases")
        most = wanted.args[0] if wanted else CI_CASES_OF_PROCESSES if started else CI_CASES
        return len(cases) if short else most
    return max(UNIT_CASES, -(-len(cases) // UNIT_SHARE)) if short else -(-len(cases) // QUICK_SHARE)


def name_groups(items):
    """Put a test's group behind its name, by which pytest-xdist gives tests to one worker.

    It does so itself where pytest keeps names as strings; newer ones (9.2) do not read what it sets.
    """
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        if mark and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{mark.args[0]}")


def pytest_collection_finish():
    """Keep the garbage collector away from what exists before the first test: the items and the frameworks.

    Tests that count descriptors collect garbage two or three times each. In a process that holds all tests
    each collection would take a third of a second.
    """
    gc.collect()
    gc.freeze()


def is_short_unit_test(item):
    return UNIT in item.path.parents and not item.get_closest_marker("sampled")


def is_long(item):
    """Whether a test starts processes or ranks: most that are neither unit tests nor about the sources."""
    about_sources = item.path.parent == UNIT.parent
    return not (about_sources or UNIT in item.path.parents or item.get_closest_marker("smoke"))


@pytest.fixture
def on_ranks(request):
    """`on_ranks(size, function, **options)`: the results in rank order; see `run_ranks`."""

    def run(size, function, **options):
        return run_ranks(size, function, transport=request.param, **options)

    return run


@pytest.fixture
def ranks_of(monkeypatch):
    """`ranks_of(size, function, **options)`: like `run_ranks`, where each rank has a default context."""
    mine = threading.local()
    for name in ("context", "placed"):
        monkeypatch.setattr(api, name, lambda: mine.context)
    monkeypatch.setattr(api, "is_initialized", lambda: hasattr(mine, "context"))

    def run(size, function, **options):
        def work(context):
            mine.context = context
            return function(context)

        return run_ranks(size, work, **options)

    return run


@pytest.fixture
def alone():
    """This process as a job of one rank: `rc`, initialized."""
    rc.init(Membership())
    yield rc
    rc.shutdown()


def pytest_generate_tests(metafunc):
    """Every test with `on_ranks` runs over every transport; with `size` too, for every number of ranks."""
    if "on_ranks" in metafunc.fixturenames:
        if "size" in metafunc.fixturenames:
            metafunc.parametrize(("on_ranks", "size"), PAIRS, indirect=["on_ranks"])
        else:
            metafunc.parametrize("on_ranks", ["memory", "tcp", "auto"], indirect=True)
