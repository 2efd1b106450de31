"""Runs a script of Horovod's elastic interface while a host is lost and another one comes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, Dict, List

from tests.proc.test_ringrun_support import ROOT, Launched

LIMIT_S = 240.0


def lines_of(log: Path) -> List[Dict[str, Any]]:
    """Return what rank 0 has written."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for_size(job: Launched, log: Path, size: int) -> None:
    """Wait until rank 0's last line is one of so many ranks."""
    until = time.monotonic() + LIMIT_S
    while not lines_of(log) or lines_of(log)[-1]["size"] != size:
        if job.process.poll() is not None or time.monotonic() > until:
            raise AssertionError((lines_of(log), job.finish(1.0), job.out, job.err))
        time.sleep(0.05)


def run_script(name: str, tmp_path: Path) -> List[Dict[str, Any]]:
    """Run it on two hosts, lose the first, add a third, check the launcher's output; return rank 0's."""
    hosts, log = tmp_path / "hosts", tmp_path / "log"
    hosts.write_text("localhost:1\n127.0.0.1:2\n")
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    job = Launched(
        "--horovod", "-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(discover),
        "--start-timeout", "120", str(ROOT / "tests" / "proc" / "programs" / name), str(log),
        env={"VICTIM": "localhost", "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    wait_for_size(job, log, 2)
    hosts.write_text("127.0.0.1:2\n127.0.0.2:1\n")  # or localhost would be used again
    wait_for_size(job, log, 3)
    log.with_name("log.stop").touch()
    assert job.finish(LIMIT_S) == 0, job.err
    # On a busy machine the slot on localhost may be filled again before the others go on: with 3 ranks, once.
    assert re.search(r"rank \d \(localhost\) lost: exit code 1; going on with 2 ranks", job.err), job.err
    assert "127.0.0.2 joined: 3 ranks" in job.err, job.err
    assert job.out.count("ends with 3 ranks") == 3, job.out
    found = lines_of(log)
    sizes = [line["size"] for line in found]
    assert [size for size, before in zip(sizes, [0, *sizes]) if size != before] == [3, 2, 3]
    assert all(abs(line["lr"] - 0.01 * line["size"]) < 1e-6 for line in found), found
    return found
