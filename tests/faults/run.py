"""Small defects, put into a copy of the project one at a time, and whether the tests that concern them notice.

    python tests/faults/run.py [--ci | --all] [-j 2] [NAME ...]

A fault of ``faults.json`` is a text that occurs once in the product, in whatever file, the text in its place, and
what that would do to a user. The tests that import the changed module run, and those of ``also``, until one
fails that passes without the fault, or for three minutes; with ``--ci`` only those that are not marked
``release``. The exit code is 1 if none fails, except for what the list has as ``missed``, or a text is gone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from queue import Queue
from typing import Any, Dict, FrozenSet, List

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, TEST_S = 180, 60
ORDER = ("unit", "integration", "sim", "proc", "adapters", "fuzz")
"""The parts of tests/ that are run; the others need several hosts or machines."""


@lru_cache(maxsize=None)
def imported(test: Path) -> FrozenSet[str]:
    """The modules, and perhaps names in them, that a file of tests imports."""
    names = set()
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return frozenset(names)


def tests_for(file: str, also: List[str]) -> List[str]:
    """The files of tests for a file of the product; those that are named as it is come first."""
    module = re.sub(r"^launcher/|(/__init__)?\.py$", "", file).replace("/", ".")
    found = []
    for number, part in enumerate(ORDER):
        for path in sorted((ROOT / "tests" / part).rglob("test_*.py")):
            names = imported(path)
            helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
            if module in names or any(module in imported(item) for item in helpers if item.exists()):
                found.append((path.stem != f"test_{Path(file).stem}", number, module not in names, path))
    paths = [item[-1] for item in sorted(found)]
    paths += [ROOT / name for name in also if (ROOT / name).exists() and ROOT / name not in paths]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def make_copy(copy: Path) -> Path:
    """The files that git tracks, and environments that import ringcomm and ringrun from the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    for packages in ROOT.glob(".venv-test*/lib/python*/site-packages"):
        for folder in (packages.parents[2], packages.parents[2] / "bin", packages):
            (copy / folder.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
            for item in folder.iterdir():
                place = copy / item.relative_to(ROOT)
                if item.is_file() and not item.is_symlink() and str(ROOT).encode() in item.read_bytes()[:4096]:
                    shutil.copy2(item, place)
                    place.write_bytes(item.read_bytes().replace(str(ROOT).encode(), str(copy).encode()))
                elif item.is_symlink() or item.name not in ("bin", "lib"):
                    place.symlink_to(os.readlink(item) if item.is_symlink() else item)
    return copy


def run_pytest(copy: Path, environment: str, arguments: List[str]) -> str:
    """The first test that fails, or the file that cannot be imported, or how pytest has ended; or ""."""
    environ = {key: text for key, text in os.environ.items() if not re.match("RINGCOMM_|PYTEST_|PYTHON", key)}
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
    process = subprocess.Popen(
        [copy / environment / "bin" / "python", "-m", "pytest", *options, *arguments],
        cwd=copy, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else "" if process.returncode in (0, 5) else f"pytest: {output.strip()[-200:]!r}"


def try_fault(fault: Dict[str, Any], copy: Path, marker: List[str]) -> List[str]:
    """How it goes with one fault: the verdict, and the test that has found it."""
    sources = [path for part in ("ringcomm", "launcher") for path in (copy / part).rglob("*.py")]
    places = [path for path in sources for _ in range(path.read_text(encoding="utf-8").count(fault["old"]))]
    environment = fault.get("environment", ".venv-test")
    if len(places) != 1:
        return ["gone", f"its text occurs {len(places)} times"]
    if not (copy / environment).exists():
        return ["left out", f"there is no {environment}"]
    (place,), file = places, places[0].relative_to(copy).as_posix()
    right, tests, unsound = place.read_text(encoding="utf-8"), tests_for(file, fault.get("also", [])), []
    while tests:
        place.write_text(right.replace(fault["old"], fault["new"]), encoding="utf-8")
        failed = run_pytest(copy, environment, [*marker, *unsound, *tests])
        shutil.copy2(ROOT / file, place)
        if not failed:
            break
        only = [] if "::" in failed else ["--collect-only"]
        if not failed.startswith("tests/") or not run_pytest(copy, environment, [*only, failed]):
            return ["found", failed]
        unsound += [f"--deselect={failed}"]
    return ["missed", f"by {' '.join([*tests, *unsound])}"]


def main() -> int:
    """Try the faults, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--ci", action="store_true", help="without the tests that only --all of tests/run.sh runs")
    tier.add_argument("--all", action="store_true", help="with them (default)")
    parser.add_argument("-j", type=int, default=1, help="how many copies are tested at a time")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    faults = json.loads(Path(__file__).with_name("faults.json").read_text(encoding="utf-8"))
    chosen = [fault for fault in faults if not options.names or fault["name"] in options.names]
    copies: Queue[Path] = Queue()

    def attempt(fault: Dict[str, Any]) -> List[str]:
        copy, began_s = copies.get(), time.monotonic()
        try:
            verdict, where = try_fault(fault, copy, ["-m", "not release"] if options.ci else [])
        finally:
            copies.put(copy)
        row = [f"{fault['name']:<40}", f"{verdict:<8}", f"{time.monotonic() - began_s:4.0f} s", where]
        print("  ".join(row), flush=True)
        return [fault["name"], verdict]

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number in range(options.j):
            copies.put(make_copy(Path(folder, f"copy{number}")))
        with ThreadPoolExecutor(options.j) as pool:
            verdicts = dict(pool.map(attempt, chosen))
    known = {fault["name"] for fault in faults if fault.get("missed")}
    for verdict in ("found", "missed", "left out", "gone"):
        names = [name + " (known)" * (name in known) for name, its in verdicts.items() if its == verdict]
        print(f"{verdict}: {len(names)}", *(names if verdict != "found" else ()), sep="\n    ")
    return int(any(its in ("missed", "gone") and name not in known for name, its in verdicts.items()))


if __name__ == "__main__":
    sys.exit(main())
