"""Parts of tests/run.sh.

``summary.py table RESULTS`` prints the table at its end, from JUnit files and the seconds of the stages.
``summary.py failed CACHE JUNIT`` prints the tests that failed in the run of pytest with this cache directory
and this JUnit file, if they are few.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Dict, List, Tuple

SLOWEST = 10
MOST_REPEATED = 5


def failed(cache: str, junit: str) -> None:
    """Print the tests that failed, one in a line; nothing if they are more than a few.

    The tests of a file that could not be set up count as one: they share a fixture. After the crash of a
    worker it prints nothing: tests that come after it were not run.
    """
    root = ElementTree.parse(junit).getroot()
    if any("crashed while running" in error.get("message", "") for error in root.iter("error")):
        return
    cases = list(root.iter("testcase"))
    problems = {case.get("classname", "") for case in cases if case.find("error") is not None}
    tests = [case for case in cases if case.find("failure") is not None]
    path = Path(cache) / "v" / "cache" / "lastfailed"
    if len(problems) + len(tests) > MOST_REPEATED or not path.exists():
        return
    for test in json.loads(path.read_text()):
        print(re.sub(r"@[^@\]]*$", "", test))  # behind "@" is the group of tests that one worker runs


def table(folder: str) -> None:
    """Print the table of stages, the slowest tests and files, and what was skipped or repeated."""
    tests: Counter[str] = Counter()
    slowest: List[Tuple[float, str, str]] = []
    files: Dict[str, float] = {}
    for path in sorted(Path(folder).glob("*.xml")):
        stage, _, environment = path.stem.partition(".")
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            tests[stage] += 1
            place, seconds_spent = case.get("classname", ""), float(case.get("time", 0.0))
            slowest.append((seconds_spent, environment, f"{place.replace('.', '/')}::{case.get('name')}"))
            file = f"{environment:<8} {re.sub('[.]Test.*', '', place).replace('.', '/')}.py"
            files[file] = files.get(file, 0.0) + seconds_spent
    print(f"{'stage':<14}{'tests':>8}{'seconds':>9}")
    for item in (Path(folder) / "stages").read_text().split():
        stage, _, seconds = item.partition("=")
        print(f"{stage:<14}{tests[stage] or '':>8}{seconds:>9}")
    if slowest:
        print(f"\nThe {min(SLOWEST, len(slowest))} slowest tests, in seconds:")
        for seconds_spent, environment, name in sorted(slowest, reverse=True)[:SLOWEST]:
            print(f"{seconds_spent:9.1f}  {environment:<8} {name}")
        print(f"\nThe {min(SLOWEST, len(files))} slowest files, in seconds:")
        for name, in_all_s in sorted(files.items(), key=lambda item: -item[1])[:SLOWEST]:
            print(f"{in_all_s:9.1f}  {name}")
    skipped = Path(folder) / "skipped"
    if skipped.exists():
        print("\nThis machine cannot run these stages, which were skipped:")
        print(skipped.read_text(), end="")
    repeated = Path(folder) / "repeated"
    if repeated.exists():
        print("\nThese failed once (see above) and passed when they were run again, alone:")
        print(repeated.read_text(), end="")


if __name__ == "__main__":
    {"table": table, "failed": failed}[sys.argv[1]](*sys.argv[2:])
