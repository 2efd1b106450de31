"""Run plans on peers in turns, A B C A B C …, each time in fresh processes, and collect the times."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from peers.catalog import Peer

Task = Dict[str, Any]
Seconds = Dict[str, Dict[str, List[Optional[float]]]]
"""By label of the task and by peer, the median of each round; None for a round that failed."""
END_S = 5.0
KEPT_OUTPUT = 2000


@dataclass(frozen=True)
class Pace:
    """How long to stay with a task: about ``budget_s``, ``least`` to ``most`` repetitions after a warm-up."""

    budget_s: float = 0.3
    least: int = 5
    most: int = 200
    warmup: int = 3
    rounds: int = 3
    limit_s: float = 240.0
    bind: bool = False  # each rank to a core of its own


QUICK = Pace(budget_s=0.03, least=3, most=30, rounds=1, limit_s=120.0)


def in_turns(
    peers: Sequence[Peer], np: int, tasks_of: Callable[[Peer], Sequence[Task]], label: str, pace: Pace,
    options: Sequence[str] = (), environ: Mapping[str, str] = {},
) -> Tuple[Seconds, bool]:  # fmt: skip
    """Measure; return the times, and whether all of ringcomm's runs succeeded.

    Args:
        label: a format for the name of a task, of its keys and ``np``.
        options: of ringrun.
    """
    found: Seconds = {}
    late, good = set(), True
    for number in range(pace.rounds):
        for peer in (peer for peer in peers if peer.name not in late):
            tasks, began_s = tasks_of(peer), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="ringbench-") as folder:
                plan = Path(folder, "plan.json")
                times = {name: getattr(pace, name) for name in ("budget_s", "least", "most", "warmup")}
                plan.write_text(json.dumps({"np": np, "pace": times, "bind": pace.bind, "tasks": tasks}))
                command = peer.command(np, plan, Path(folder), options)
                code, output = run_command(command, {**peer.environment(), **environ}, pace.limit_s)
                medians = [slowest_median(Path(folder), np, index) for index in range(len(tasks))]
            for task, seconds in zip(tasks, medians):
                rounds = found.setdefault(label.format(np=np, **task), {})
                rounds.setdefault(peer.name, [None] * pace.rounds)[number] = seconds
            took = f"{time.monotonic() - began_s:.1f} s" if code == 0 else f"FAILED ({code})\n{output}"
            print(f"{np} ranks, round {number + 1}, {peer.name}: {took}", file=sys.stderr, flush=True)
            good = good and (code == 0 or not peer.name.startswith("ringcomm"))
            if code is None:  # what hangs once is not given another chance to take as long again
                late.add(peer.name)
    return found, good


def slowest_median(folder: Path, np: int, index: int) -> Optional[float]:
    """The median over repetitions of the slowest rank's time, in seconds; None if a rank did not finish."""
    times = []
    for rank in range(np):
        path = folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) <= index:
            return None
        times.append(json.loads(lines[index]))
    return 1e-9 * median(map(max, zip(*times)))


def run_command(command: Sequence[str], environ: Dict[str, str], limit_s: float) -> Tuple[Optional[int], str]:
    """Run to the end or the limit; the exit code (None: too long) and the end of the output."""
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output[-KEPT_OUTPUT:]
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return None, f"not done within {limit_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
