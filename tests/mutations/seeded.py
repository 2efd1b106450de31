"""Mutation testing: small changes at random places, and whether the quick run's tests notice them.

    python tests/mutations/seeded.py --table mutations.txt                 100 changes
    python tests/mutations/seeded.py --seed 2 --count 30 --areas engine    others, in one area
    python tests/mutations/seeded.py --again mutations.txt                 what survived in that table

Needs coverage.py. First the tests of the quick run are measured: which of them execute which lines (kept in
``build/quick-run.json``; ``--measure`` does it again, as is due when tests or sources have changed much).
Then each change is made in a copy of the project, and of those tests the ones that execute what was changed
run, until one fails. A test that fails without the change as well does not count. The table has a line per
change; those that survive are listed once more, for a test, or for the reason why they mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Dict, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.mutations.copies import collected, copy_project, run_tests  # noqa: E402
from tests.mutations.quick_run import PARTS, QuickRun, measure  # noqa: E402
from tests.mutations.sites import Site, sites_of  # noqa: E402

AREAS = {
    "schedule": "ringcomm/schedule",
    "collective": "ringcomm/collective",
    "transport": "ringcomm/transport",
    "rendezvous": "ringcomm/rendezvous",
    "engine": "ringcomm/engine",
    "launcher": "launcher/ringrun",
}
MEASURED = ROOT / "build" / "quick-run.json"
MAX_TESTS = 250
MAX_S = 60.0
"""The tests for one change took no longer than this together when they were measured."""
_SURVIVED = re.compile(r" *\d+ (?P<file>\S+):(?P<line>\d+) (?P<change>.*) \| \d+ tests, \d+ s: SURVIVED")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", re.MULTILINE)
_NAMED = re.compile(r"^(tests/[^\s:]+::.*?)(?: (?:PASSED|SKIPPED|XFAIL|\++ Timeout).*)? *$", re.MULTILINE)


class Result(NamedTuple):
    """What has become of one change.

    Attributes:
        caught: the test that failed (``hangs``: until a time limit), ``import``, or "" if it survived.
    """

    number: int
    site: Site
    right: str
    tests: int
    seconds: float
    caught: str

    def __str__(self) -> str:
        change = f"{self.site.file}:{self.site.line} {change_text(self.site, self.right)}"
        cost = f"{self.tests} tests, {self.seconds:.0f} s"
        return f"{self.number:3d} {change} | {cost}: {self.caught or 'SURVIVED'}"


def change_text(site: Site, right: str) -> str:
    """A change in a line of text, without where it is."""
    before, after = (" ".join(text.split())[:70] for text in (right, site.wrong))
    return f"{site.kind}: {before} -> {after}"


def choose(seed: int, count: int, areas: List[str]) -> List[Site]:
    """Sites at random, equally many in each area. Most stay the same when other code is changed."""
    chosen = []
    for number, area in enumerate(areas):
        drawn: List[Tuple[bytes, Site]] = []
        for path in sorted((ROOT / AREAS[area]).rglob("*.py")):
            source, times = path.read_text(), Counter[str]()
            for site in sites_of(str(path.relative_to(ROOT)), source):
                change = change_text(site, site.right(source))
                times[change] += 1
                lot = f"{seed} {site.file} {change} {times[change]}"
                drawn.append((hashlib.sha256(lot.encode()).digest(), site))
        share = count // len(areas) + (number < count % len(areas))
        chosen += sorted(site for _, site in sorted(drawn)[:share])
    return chosen


def select(run: QuickRun, site: Site) -> List[str]:
    """The tests that execute the site, as many as there is time for."""
    chosen: List[str] = []
    total_s = 0.0
    for test in run.tests_for(site.file, site.line, site.end_line)[:MAX_TESTS]:
        total_s += run.seconds[test]
        if total_s > MAX_S:
            break
        chosen.append(test)
    return chosen


class Bench:
    """Copies of the project to change one file in, and one that stays as it is."""

    def __init__(self, folder: Path, run: QuickRun, jobs: int) -> None:
        self._run = run
        self._clean = copy_project(folder / "clean")
        self._copies: Queue[Path] = Queue()
        # Tests may be gone since they were measured. Those that fail without any change leave this set, too.
        self._known = collected(self._clean, [path for part in PARTS for path in part])
        for number in range(jobs):
            self._copies.put(copy_project(folder / f"copy{number}"))

    def try_site(self, number: int, site: Site) -> Result:
        """Make the change, and run the tests until one fails."""
        source = (self._clean / site.file).read_text()
        tests = select(self._run, site)
        copy = self._copies.get()
        began_s = time.monotonic()
        try:
            (copy / site.file).write_text(site.apply(source))
            caught = self._caught_by(copy, tests)
        finally:
            (copy / site.file).write_text(source)
            self._copies.put(copy)
        result = Result(number, site, site.right(source), len(tests), time.monotonic() - began_s, caught)
        print(result, flush=True)
        return result

    def _caught_by(self, copy: Path, tests: List[str]) -> str:
        """The first test that fails with the change and not without it, or how else it shows; else ""."""
        while True:
            left = [test for test in tests if test in self._known]
            if not left:
                return ""
            done = run_tests(copy, ["-v", *left], 10 * MAX_S)
            if done.code == 0:
                return ""
            if done.code in (2, 3):  # nothing can be imported, or not even pytest can go on
                return "import"
            named, how = ended_at(done.output)
            assert named in left and done.code in (1, -1), done.output
            if run_tests(self._clean, [named], 3 * MAX_S).code == 0:
                return named + how
            self._known.discard(named)


def ended_at(output: str) -> Tuple[str, str]:
    """The test at which pytest has ended, and " hangs" if a time limit has ended it there.

    Args:
        output: of ``pytest -x -v``.
    """
    failed = _FAILED.search(output)
    if failed:
        return failed[1], ""
    # Then a time limit has ended pytest within the last test that it named.
    return next(iter(_NAMED.findall(output)[-1:]), ""), " hangs"


def survivors_of(table: str) -> List[Site]:
    """The changes that have survived in a table, where the code has them now."""
    found = []
    for line in table.splitlines():
        match = _SURVIVED.fullmatch(line)
        if match is None:
            continue
        source = (ROOT / match["file"]).read_text()
        same = [
            site
            for site in sites_of(match["file"], source)
            if change_text(site, site.right(source)) == match["change"]
        ]
        if same:
            found.append(min(same, key=lambda site: abs(site.line - int(match["line"]))))
        else:
            print(f"no longer there: {line}")
    return found


def main() -> int:
    """Choose, try and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--jobs", type=int, default=2, help="how many copies are tested at a time")
    parser.add_argument("--measure", action="store_true", help="measure again what tests execute")
    parser.add_argument("--again", type=Path, help="only what survived in this table")
    parser.add_argument("--table", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    if options.again:
        chosen = survivors_of(options.again.read_text())
    else:
        chosen = choose(options.seed, options.count, options.areas)
    sites = list(enumerate(chosen, 1))
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        if options.measure or not MEASURED.exists():
            copy = copy_project(Path(folder, "measured"))
            Path(folder, "scratch").mkdir()
            MEASURED.parent.mkdir(exist_ok=True)
            measure(copy, Path(folder, "scratch"), options.jobs).save(MEASURED)
        bench = Bench(Path(folder), QuickRun.load(MEASURED), options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(lambda item: bench.try_site(*item), sites))
    return report(results, options.table)


def report(results: List[Result], table: Path) -> int:
    """Print how many were caught by area, and the survivors."""
    survivors = [result for result in results if not result.caught]
    lines = [str(result) for result in results]
    summary: Dict[str, str] = {}
    for area, folder in AREAS.items():
        of_area = [result for result in results if result.site.file.startswith(folder)]
        summary[area] = f"{sum(bool(result.caught) for result in of_area)} of {len(of_area)}"
    lines += ["", f"caught: {len(results) - len(survivors)} of {len(results)}"]
    lines += [f"  {area}: {text}" for area, text in summary.items()]
    print("\n".join(["", *map(str, survivors), *lines[len(results) :]]))
    if table:
        table.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
