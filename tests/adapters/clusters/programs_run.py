"""Runs a program of these tests in a process of its own, which starts and ends the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

import psutil

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 280.0


def environment(folder: Path) -> Dict[str, str]:
    """The environment of a program: nothing of an enclosing job, and nothing written outside the folder."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("RINGCOMM_", "RAY_"))}
    return {
        **kept, "PYTHONPATH": f"{PROGRAMS}:{ROOT}", "HOME": str(folder), "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
        "DASK_CONFIG": str(folder), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
    }  # fmt: skip


def run_program(command: Sequence[str], folder: Path) -> str:
    """Return the stdout of a program with its files in `folder`, of which no process remains."""
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment(folder), text=True,
            stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{command} has not ended:\n{log.read_text()[-6000:]}") from None
    assert process.returncode == 0, log.read_text()[-6000:]
    _, left = psutil.wait_procs(processes_of(folder), timeout=30)
    assert [" ".join(item.cmdline()) for item in left] == []
    return output


def processes_of(folder: Path) -> List[psutil.Process]:
    """The processes that have inherited this environment, and run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def facts_of(program: str, folder: Path) -> Dict[str, Any]:
    """Return what a program of the folder ``programs`` has found out."""
    result = folder / "facts.json"
    run_program([str(PROGRAMS / program), str(result)], folder)
    found: Dict[str, Any] = json.loads(result.read_text())
    return found


def check_ranks(described: List[List[Any]], size: int, factor: float) -> None:
    """The results of ``functions.describe`` are those of so many ranks on one host."""
    total = [factor * size * (size + 1) / 2] * 3
    assert [item[:4] + item[5:] for item in described] == [
        [rank, size, rank, size, total] for rank in range(size)
    ]
    assert len({item[4] for item in described}) == size


def check_jobs(facts: Dict[str, Any], ranks: int) -> None:
    """The jobs of a program: a function twice, two at once, an error of rank 1, and the loss of rank 1."""
    for name in ("first", "second"):
        check_ranks(facts[name], ranks, 1.0)
    check_ranks(facts["two_jobs"][0], 2, 1.0)
    check_ranks(facts["two_jobs"][1], 2, 10.0)
    failed, died = facts["failed"], facts["died"]
    assert (failed["type"], failed["rank"], failed["cause"]) == ("RemoteError", 1, "KeyError")
    assert "no such sample" in failed["text"] and "functions.py" in failed["text"]
    assert (died["type"], died["rank"], died["cause"]) == ("RemoteError", 1, "PeerLostError")
    assert "was lost" in died["text"]
    assert all(keys == [] for _, keys in facts["environment"]), "the key is in no environment"
