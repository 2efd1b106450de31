"""Puts small defects into a copy of the project, one at a time: do the tests that concern them notice?

    python tests/faults/run.py [--ci | --all] [-j 2] [NAME ...]

A fault of ``faults.json`` is a text that occurs once in the product, whatever file it is in now, the text in
its place, and what that would do to a user. The tests that import the changed module run, then those of
``also``, until one fails that passes without the fault, or for three minutes; with ``--ci`` those without the
marker ``release``. The exit code is 1 if one is missed that is not ``missed`` in the list, or its text gone.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from queue import Queue
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[2]
_LATE = "pytest: out of time"
PARTS = ("unit", "integration", "sim", "proc", "adapters", "fuzz")  # the others need several machines


def tests_for(file: str, also: List[str]) -> List[str]:
    """The files of tests that import a module, or have helpers that do; its namesakes come first."""
    package, _, name = re.sub(r"^launcher/|(/__init__)?\.py$", "", file).replace("/", ".").rpartition(".")
    imports = re.compile(rf"\b{package}\.{name}\b|from {package} import (\([^)]*|.*)\b{name}\b")
    found = []
    for number, part in enumerate(PARTS):
        for path in (ROOT / "tests" / part).rglob("test_*.py"):
            text = path.read_text(encoding="utf-8")
            helped = re.findall(r"from (tests\.[\w.]+)", text)
            helpers = {ROOT / f"{item.replace('.', '/')}.py" for item in helped}
            if imports.search(text):
                found.append((path.stem != f"test_{name}", number, 0, path))
            elif any(imports.search(item.read_text(encoding="utf-8")) for item in helpers if item.is_file()):
                found.append((True, number, 1, path))
    paths = [item[-1] for item in sorted(found)]
    paths += [ROOT / item for item in also if (ROOT / item).exists() and ROOT / item not in paths]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def make_copy(copy: Path) -> Path:
    """The files that git tracks, and environments that have ringcomm and ringrun from the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for name in map(os.fsdecode, filter(None, listed.split(b"\0"))):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    here, there = os.fsencode(ROOT), os.fsencode(copy)
    for packages in ROOT.glob(".venv-test*/lib/python*/site-packages"):
        for folder in (packages.parents[2], packages.parents[2] / "bin", packages):
            (copy / folder.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
            for item in folder.iterdir():
                place = copy / item.relative_to(ROOT)
                if item.is_symlink():
                    place.symlink_to(os.readlink(item))
                elif item.is_file() and here in item.read_bytes()[:4096]:  # a script, or where the project is
                    shutil.copy2(item, place)
                    place.write_bytes(item.read_bytes().replace(here, there))
                elif item.name not in ("bin", "lib"):
                    place.symlink_to(item)
    return copy


def run_pytest(copy: Path, environment: str, arguments: List[str], limit_s: float) -> str:
    """The first test that fails, or the file that cannot be imported, or how else pytest has ended; or ""."""
    environ = {key: text for key, text in os.environ.items() if not re.match("RINGCOMM_|PYTEST_|PYTHON", key)}
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"--timeout={limit_s * 2 / 3}"]
    process = subprocess.Popen(
        [copy / environment / "bin" / "python", "-m", "pytest", *options, *arguments],
        cwd=copy, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return _LATE
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
    if failed is None and process.returncode not in (0, 5):
        return f"pytest: {output.strip()[-200:]!r}"
    return "" if failed is None else failed[1]


def try_fault(fault: Dict[str, Any], copy: Path, marker: List[str], limit_s: float) -> List[str]:
    """How it goes with one fault: the verdict, and the test that has found it."""
    sources = [path for part in ("ringcomm", "launcher") for path in (copy / part).rglob("*.py")]
    places = [path for path in sources for _ in range(path.read_text(encoding="utf-8").count(fault["old"]))]
    environment = fault.get("environment", ".venv-test")
    if len(places) != 1:
        return ["gone", f"its text occurs {len(places)} times"]
    if not (copy / environment).exists():
        return ["left out", f"there is no {environment}"]
    place, file = places[0], places[0].relative_to(copy).as_posix()
    right, tests, unsound = place.read_text(encoding="utf-8"), tests_for(file, fault.get("also", [])), []
    while tests:
        place.write_text(right.replace(fault["old"], fault["new"]), encoding="utf-8")
        failed = run_pytest(copy, environment, [*marker, *unsound, *tests], limit_s)
        shutil.copy2(ROOT / file, place)
        if failed in ("", _LATE):
            break
        again = [failed] if failed.startswith("tests/") else [*marker, *tests]
        only = [] if "::" in failed else ["--collect-only"]
        if not run_pytest(copy, environment, [*only, *again], limit_s):
            return ["found", failed]
        if not failed.startswith("tests/"):
            return ["broken", failed]
        unsound.append(f"--deselect={failed}")  # it fails without the fault, too
    return ["missed", " ".join(["by", *tests, *unsound])]


def main() -> int:
    """Try the faults, and print how each of them went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--ci", action="store_true", help="without the tests that run before a release only")
    tier.add_argument("--all", action="store_true", help="with them (default)")
    parser.add_argument("-j", type=int, default=1, help="how many copies are tested at a time")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each; more on a busy machine")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    faults = json.loads(Path(__file__).with_name("faults.json").read_text(encoding="utf-8"))
    chosen = [fault for fault in faults if fault["name"] in options.names or not options.names]
    marker, copies = ["--tier", "ci"] if options.ci else [], Queue()

    def attempt(fault: Dict[str, Any]) -> List[str]:
        copy, began_s = copies.get(), time.monotonic()
        try:
            verdict, where = try_fault(fault, copy, marker, options.limit)
        finally:
            copies.put(copy)
        if verdict == "missed" and fault.get("missed"):
            verdict = "known"  # missed since before
        print(f"{fault['name']:<40} {verdict:<8} {time.monotonic() - began_s:4.0f} s  {where}", flush=True)
        return [fault["name"], verdict]

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number in range(options.j):
            copies.put(make_copy(Path(folder, f"copy{number}")))
        with ThreadPoolExecutor(options.j) as pool:
            rows = list(pool.map(attempt, chosen))
    for verdict in ("found", "known", "left out", "missed", "gone", "broken"):
        names = [name for name, its in rows if its == verdict]
        print(f"{verdict:<9}{len(names):3}  {'' if verdict == 'found' else ' '.join(names)}".rstrip())
    return int(any(verdict in ("missed", "gone", "broken") for _, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())
