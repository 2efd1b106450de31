"""Prints the table at the end of tests/run.sh, from JUnit files: ``summary.py RESULTS STAGE=SECONDS...``."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import List, Tuple

SLOWEST = 10


def main(folder: str, stages: str) -> None:
    """Print the table of stages and the slowest tests."""
    tests: Counter[str] = Counter()
    slowest: List[Tuple[float, str, str]] = []
    for path in sorted(Path(folder).glob("*.xml")):
        stage, _, environment = path.stem.partition(".")
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            tests[stage] += 1
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
            slowest.append((float(case.get("time", 0.0)), environment, name))
    print(f"{'stage':<14}{'tests':>8}{'seconds':>9}")
    for item in stages.split():
        stage, _, seconds = item.partition("=")
        print(f"{stage:<14}{tests[stage] or '':>8}{seconds:>9}")
    if slowest:
        print(f"\nThe {min(SLOWEST, len(slowest))} slowest tests, in seconds:")
        for seconds_spent, environment, name in sorted(slowest, reverse=True)[:SLOWEST]:
            print(f"{seconds_spent:9.1f}  {environment:<8} {name}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
