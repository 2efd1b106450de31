"""Run plans on peers in turn, A B C A B C …, each time in fresh processes, and collect the times."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Sequence

from peers.catalog import Command, Peer, Tools

Task = Dict[str, Any]
Batch = Callable[[Peer], Sequence[Task]]
"""What a peer is given to do in one run."""
END_S = 5.0
KEPT_OUTPUT = 2000


@dataclass(frozen=True)
class Pace:
    """How long to stay with a task: about ``budget_s``, ``least`` to ``most`` repetitions after a warm-up.

    Attributes:
        bind: whether each rank stays on a core of its own.
    """

    budget_s: float = 0.3
    least: int = 5
    most: int = 200
    warmup: int = 3
    rounds: int = 3
    limit_s: float = 240.0
    bind: bool = False

    def plan(self) -> Dict[str, Any]:
        """The part that workers need."""
        return {"budget_s": self.budget_s, "least": self.least, "most": self.most, "warmup": self.warmup}


QUICK = Pace(budget_s=0.03, least=3, most=30, rounds=1, limit_s=120.0)


@dataclass
class Sample:
    """What one task of one run gave: for every iteration the slowest rank's time."""

    peer: str
    np: int
    round: int
    task: Task
    ns: List[int]

    @property
    def median_s(self) -> float:
        return median(self.ns) * 1e-9


@dataclass
class Collected:
    """Everything that was seen."""

    samples: List[Sample] = field(default_factory=list)
    failures: List[Dict[str, Any]] = field(default_factory=list)
    versions: Dict[str, Any] = field(default_factory=dict)

    def exit_code(self) -> int:
        """1 if ringcomm failed; that a peer did is in the report."""
        return int(any(failure["peer"].startswith("ringcomm") for failure in self.failures))


def round_robin(
    peers: Sequence[Peer], tools: Tools, np: int, batches: Sequence[Batch], pace: Pace, into: Collected
) -> None:
    """Every batch of tasks on every peer, in as many rounds as the pace says."""
    for number in range(pace.rounds):
        for batch in batches:
            for peer in peers:
                if any(failure["peer"] == peer.name and failure["np"] == np and failure["final"]
                       for failure in into.failures):  # fmt: skip
                    continue
                run_peer(peer, tools, np, number, batch(peer), pace, into)


def run_peer(
    peer: Peer, tools: Tools, np: int, number: int, tasks: Sequence[Task], pace: Pace, into: Collected
) -> None:
    """One run of one peer, in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="ringbench-") as name:
        directory = Path(name)
        plan = directory / "plan.json"
        plan.write_text(json.dumps({"np": np, "pace": pace.plan(), "bind": pace.bind, "tasks": list(tasks)}))
        started = time.monotonic()
        code, output = run_command(peer.command(np, plan, directory), peer.environment(tools), pace.limit_s)
        collect(directory, peer.name, np, number, tasks, into)
    took = time.monotonic() - started
    what = f"np={np} round {number + 1} {_name(tasks)} {peer.name}"
    if code == 0:
        print(f"{what}: {took:.1f} s", file=sys.stderr, flush=True)
        return
    late = code is None
    print(f"{what}: {'ran too long' if late else f'FAILED ({code})'}\n{output}", file=sys.stderr, flush=True)
    # What hangs once is not given another chance to take as long again.
    into.failures.append({"peer": peer.name, "np": np, "round": number, "tasks": _name(tasks),
                          "exit": code, "output": output, "final": late})  # fmt: skip


def _name(tasks: Sequence[Task]) -> str:
    return "+".join(sorted({str(task.get("collective", task["kind"])) for task in tasks}))


def collect(
    directory: Path, peer: str, np: int, number: int, tasks: Sequence[Task], into: Collected
) -> None:
    """Read the ranks' files; what a run that failed left half is not counted."""
    ranks: List[Dict[int, List[int]]] = []
    for rank in range(np):
        times: Dict[int, List[int]] = {}
        path = directory / f"rank-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            if "facts" in record:
                into.versions[peer] = record["facts"]
            else:
                times[record["task"]] = record["ns"]
        ranks.append(times)
    for index, task in enumerate(tasks):
        if all(index in times for times in ranks):
            slowest = [max(each) for each in zip(*(times[index] for times in ranks))]
            into.samples.append(Sample(peer, np, number, dict(task), slowest))


def run_command(command: Command, environ: Dict[str, str], limit_s: float) -> Any:
    """Run to the end or the limit; the exit code (None: too long) and the end of the output."""
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - KEPT_OUTPUT))
        return code, output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and its ranks: politely, so that the launcher can clear up, and then its whole group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
