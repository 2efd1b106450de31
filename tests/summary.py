"""Parts of tests/run.sh, which need nothing but Python.

``summary.py calibrate RESULTS`` notes how fast this machine is now.
``summary.py failed RESULTS NAME`` prints the tests of a run to be repeated, and notes what they said.
``summary.py table RESULTS TIER [--record]`` prints the table at the end of a run. It fails if more than a few
tests were unstable, or a stage took much longer than its budget in ``durations.json``.
``--record`` writes that file.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

DURATIONS = Path(__file__).with_name("durations.json")
SLOWEST = 10
RECORDED = 40
"""So many of the slowest tests, and of the slowest files, are in ``durations.json``."""
MAX_UNSTABLE = 3
"""More tests that fail, and pass when they are repeated alone, fail the run."""
OVER_BUDGET = 1.5
"""A stage may take so many times its budget; on a machine slower than the recorded one, as much more."""
GROWTH_S = 2.0
"""Tests and files that took so much longer than recorded are named if their stage is over its budget."""


class Case(NamedTuple):
    """A test of a run: its stage, its environment, and where it stands."""

    stage: str
    environment: str
    test: str
    file: str
    seconds: float


def calibrate() -> float:
    """Return the seconds of a fixed amount of work (processes, Python, memory): the best of three."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(8):
            subprocess.run([sys.executable, "-c", "import json, socket"], check=True)
        sum(number * number % 7 for number in range(1_000_000))
        for _ in range(20):
            bytearray(8_000_000)[::2]
        best = min(best, time.perf_counter() - started)
    return best


def cases(folder: Path) -> Iterator[Case]:
    """Return the tests of the JUnit files in a folder."""
    for path in sorted(folder.glob("*.xml")):
        stage, _, environment = path.stem.partition(".")
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            place = case.get("classname", "")
            file = re.sub("[.]Test.*", "", place).replace(".", "/") + ".py"
            test = f"{place.replace('.', '/')}::{case.get('name')}"
            yield Case(stage, environment, test, file, float(case.get("time", 0.0)))


def failed(folder: Path, name: str) -> None:
    """Print the tests of a run that failed, one in a line, and note them; nothing if they are many.

    The tests of a file that could not be set up count as one: they share a fixture. After the crash of a
    worker it prints nothing: tests that come after it were not run.
    """
    root = ElementTree.parse(folder / f"{name}.xml").getroot()
    if any("crashed while running" in error.get("message", "") for error in root.iter("error")):
        return
    problems: Dict[str, str] = {}
    for case in root.iter("testcase"):
        for kind, key in (("error", case.get("classname", "")), ("failure", case.get("name", ""))):
            for problem in case.iter(kind):
                problems[f"{case.get('classname')}::{key}"] = problem.get("message", "")
    path = folder / f"cache.{name}" / "v" / "cache" / "lastfailed"
    if len(problems) > MAX_UNSTABLE or not path.exists():
        return
    with (folder / "unstable").open("a") as notes:
        for test, message in problems.items():
            notes.write(json.dumps([name, test, message]) + "\n")
    for test in json.loads(path.read_text()):
        print(re.sub(r"@[^@\]]*$", "", test))  # behind "@" is the group of tests that one worker runs


def slowest(seconds: Dict[str, float], most: int) -> Dict[str, float]:
    """Return the slowest entries, slowest first."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    return {name: round(value, 1) for name, value in ranked}


def totals(found: List[Case]) -> Tuple[Dict[str, float], Dict[str, float]]:
    """Return the seconds of tests and of files, by environment and name."""
    tests: Dict[str, float] = {}
    files: Dict[str, float] = {}
    for case in found:
        tests[f"{case.environment} {case.test}"] = case.seconds
        file = f"{case.environment} {case.file}"
        files[file] = files.get(file, 0.0) + case.seconds
    return tests, files


def table(folder: Path, tier: str, record: bool) -> List[str]:
    """Print the table of a run; return why the run fails, if it does."""
    found = list(cases(folder))
    lines = [line.partition("=") for line in (folder / "stages").read_text().split()]
    stages = {stage: int(seconds) for stage, _, seconds in lines}
    counts = {stage: sum(case.stage == stage for case in found) for stage in stages}
    recorded: Dict[str, Any] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    before = recorded.get(tier, {})
    print(f"{'stage':<14}{'tests':>8}{'seconds':>9}{'budget':>9}")
    for stage, seconds in stages.items():
        budget = before.get("budgets_s", {}).get(stage, "")
        print(f"{stage:<14}{counts[stage] or '':>8}{seconds:>9}{budget:>9}")
    tests, files = totals(found)
    for what, seconds_of in (("tests", tests), ("files", files)):
        print(f"\nThe slowest {what}, in seconds:" if seconds_of else "")
        for name, seconds in slowest(seconds_of, SLOWEST).items():
            print(f"{seconds:9.1f}  {name}")
    if (folder / "skipped").exists():
        print("\nThis machine cannot run these stages, which were skipped:")
        print((folder / "skipped").read_text(), end="")
    speed = float((folder / "calibration").read_text())
    reasons = unstable(folder)
    if record:
        recorded[tier] = {
            "date": datetime.date.today().isoformat(),
            "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
            "calibration_s": round(speed, 3),
            "tests": len(found),
            "unstable": len(reasons),
            "seconds": stages,
            "budgets_s": before.get("budgets_s", {}),
            "slowest_tests": slowest(tests, RECORDED),
            "slowest_files": slowest(files, RECORDED),
        }
        DURATIONS.write_text(json.dumps(recorded, indent=1) + "\n")
    elif before:
        slower = max(1.0, speed / before["calibration_s"], calibrate() / before["calibration_s"])
        reasons += over_budget(stages, before, slower, {**tests, **files})
    return reasons


def unstable(folder: Path) -> List[str]:
    """Print the tests that failed and then passed alone; return a reason if they are too many."""
    path = folder / "unstable"
    if not path.exists():
        return []
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    print("\nUnstable: these failed and passed when they were repeated alone. Each is a defect, to be fixed:")
    for run, test, message in notes:
        print(f"{run}: {test}\n    " + "\n    ".join(message.splitlines()[:6]))
    return [f"{len(notes)} tests were unstable"] if len(notes) > MAX_UNSTABLE else []


def over_budget(stages: Dict[str, int], before: Any, slower: float, now: Dict[str, float]) -> List[str]:
    """Return a reason for each stage over its budget, with what took longer than recorded."""
    past = {**before["slowest_tests"], **before["slowest_files"]}
    grown = {name: s - past.get(name, 0.0) * slower for name, s in now.items() if s > GROWTH_S * slower}
    names = ", ".join(f"{name} ({now[name]:.0f} s)" for name in slowest(grown, SLOWEST))
    return [
        f"stage {stage} took {stages[stage]} s, more than {OVER_BUDGET} times its budget of {budget} s (this "
        f"machine counts as {slower:.1f} times slower than the one of {before['date']}). Grown most: {names}"
        for stage, budget in before.get("budgets_s", {}).items()
        if stages.get(stage, 0) > OVER_BUDGET * budget * slower
    ]


def main(verb: str, folder: Path, *more: str) -> int:
    if verb == "calibrate":
        (folder / "calibration").write_text(str(calibrate()))
    elif verb == "failed":
        failed(folder, more[0])
    else:
        reasons = table(folder, more[0], "--record" in more)
        print("\n".join(f"\n{reason}" for reason in reasons), end="\n" if reasons else "")
        return int(bool(reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
