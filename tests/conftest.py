"""`on_ranks` and `ranks_of`: run a function on every rank of a job; `alone`: a job of this process."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
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
"""With --quick, one case of a parametrized test in so many is run, and of other tests without parameters that
start processes or ranks one in QUICK_PARTS, the same ones everywhere."""
UNIT_SHARE = 4
UNIT_CASES = 6
"""Unit tests take a few milliseconds: with --quick up to so many cases of each are run, or one in UNIT_SHARE
if those are more. Those that are marked ``sampled`` are treated as other tests."""
QUICK_PARTS = 3

UNIT = Path(__file__).parent / "unit"
MAX_RANKS = {"memory": 9, "tcp": 4, "auto": 4, "shm": 3}


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="of parametrized tests run one case in N, others with other versions of Python and NumPy",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        help="of tests without parameters run the K-th of N parts, which are the same everywhere",
    )
    parser.addoption(
        "--schedules",
        type=int,
        default=1000,
        metavar="N",
        help="of the simulated jobs run N, with seeds from 0",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="a selection: no test marked `full`; of parametrized tests and of long ones a share",
    )
    parser.addoption(
        "--starts",
        type=int,
        default=0,
        metavar="N",
        help="of each case of tests/hosts/test_routes.py start N jobs, of all cases, not two of some",
    )
    parser.addoption(
        "--programs",
        type=int,
        metavar="N",
        help="of the programs from seeds run N of each kind, not 40 (with --quick 6)",
    )
    parser.addoption("--all-kills", action="store_true", help="run the whole kill matrix, not a selection")


def pytest_configure(config):
    if config.option.programs is None:
        config.option.programs = 6 if config.option.quick else 40


def pytest_collection_modifyitems(config, items):
    """With --one-in or --quick, leave out most cases of parametrized tests; with --part, of the others."""
    quick = config.getoption("--quick")
    share = QUICK_SHARE if quick else config.getoption("--one-in")
    salt = f"{sys.version_info[:2]} {np.__version__} "
    gone = {item for item in items if quick and item.get_closest_marker("full")}
    families = {}
    part, parts = map(int, (config.getoption("--part") or "1/1").split("/"))
    for item in items:
        if hasattr(item, "callspec") and item not in gone:
            families.setdefault(item.nodeid.split("[")[0], []).append(item)
    for item in items:
        if not hasattr(item, "callspec"):
            number = zlib.crc32(item.nodeid.encode())
            if number % parts != part - 1 or (quick and number // parts % QUICK_PARTS and is_long(item)):
                gone.add(item)
    for cases in families.values():
        cases.sort(key=lambda item: zlib.crc32((salt + item.nodeid).encode()))
        kept = -(-len(cases) // share)
        if quick and is_short_unit_test(cases[0]):
            kept = max(UNIT_CASES, -(-len(cases) // UNIT_SHARE))
        gone.update(cases[kept:])
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]
    if getattr(config.option, "loadgroup", False):
        name_groups(items)


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
            pairs = [(name, size) for name, most in MAX_RANKS.items() for size in range(1, most + 1)]
            metafunc.parametrize(("on_ranks", "size"), pairs, indirect=["on_ranks"])
        else:
            metafunc.parametrize("on_ranks", list(MAX_RANKS), indirect=True)
