"""How long a job on three hosts takes to start, beyond what SSH itself takes.

    sudo .venv-test/bin/python benchmarks/startup.py [--rounds 5]

Makes three hosts (network namespaces, see tests/hosts) and runs, in turn: `ssh HOST true` to both remote
hosts at once, and a job of three ranks that leave as soon as `ringcomm.init()` has returned. Each
interval runs from the command's start to its end, so the job's includes Python's own start and end on
every host, and ringrun's check of what is installed there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]

from tests.hosts.netlab import Lab  # noqa: E402

PROGRAM = "import ringcomm as rc; rc.init(); rc.shutdown()"


def seconds(commands: List[List[str]], environment: dict[str, str]) -> float:
    """Wall-clock time until all commands, started together, have ended well."""
    started_s = time.perf_counter()
    running = [subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) for command in commands]
    codes = [process.wait(60) for process in running]
    elapsed_s = time.perf_counter() - started_s
    if any(codes):
        raise SystemExit(f"a command failed: exit codes {codes} of {commands}")
    return elapsed_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with Lab() as lab:
        environment = {**os.environ, **lab.environ(), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
        logins = [["ssh", host.name, "true"] for host in lab.hosts]
        job = [sys.executable, "-m", "ringrun", "-np", "3", "-H", "localhost,jetson1,jetson2"]
        job += ["-x", "PYTHONPATH", sys.executable, "-c", PROGRAM]
        pairs = [(seconds(logins, environment), seconds([job], environment)) for _ in range(rounds)]
    ssh_s, job_s = (statistics.median(column) for column in zip(*pairs))
    print(f"ssh to two hosts at once  {ssh_s:6.2f} s")
    print(f"job of three ranks        {job_s:6.2f} s")
    print(f"beyond ssh                {job_s - ssh_s:6.2f} s   (medians of {rounds} rounds)")


if __name__ == "__main__":
    main()
