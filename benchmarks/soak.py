"""A job for hours: mixed collectives on four ranks, with freezes and deaths; does anything grow or get lost?

    python -m benchmarks.soak --hours 1

Every result is checked. Now and then a rank is stopped for less than ``--dead-after`` seconds, which must
disturb nothing; is stopped for good; or is killed. Then all others must raise the error that names it, in
time, and the job starts again: the others in the same processes, which is what makes leaks show.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import psutil

import ringcomm as rc
from ringcomm.config import Membership, Settings, Slot
from ringcomm.job.context import Context
from ringcomm.rendezvous.actions import Seat
from ringcomm.rendezvous.server import RendezvousServer

DEAD_AFTER_S = 6.0
BOUND_S = DEAD_AFTER_S + 2.0
SLACK_S = 2.0
"""For a machine that does other things as well."""


KINDS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall", "barrier", "object")


# ---- a rank -------------------------------------------------------------------------------------


def direct(context: Context, dice: random.Random) -> None:
    """One call that all ranks make in the same order, checked."""
    count, size, rank = dice.choice((1, 100, 5_000, 200_000)), context.size, context.rank
    number = dice.randrange(100)
    array = np.full(count, float(rank + number), np.float32)
    total = size * number + size * (size - 1) // 2
    kind = dice.choice(KINDS)
    if kind == "allreduce":
        assert (context.allreduce(array, rc.Sum) == total).all()
    elif kind == "reducescatter":
        assert (context.reducescatter(array, rc.Sum) == total).all()
    elif kind == "allgather":
        rows = context.allgather(array[: 1 + rank])
        assert rows[0] == number and rows[-1] == number + size - 1
    elif kind == "broadcast":
        assert (context.broadcast(array, number % size) == number % size + number).all()
    elif kind == "alltoall":
        rows, _ = context.alltoall(np.arange(size) + 10 * rank, [1] * size)
        assert rows.tolist() == [10 * peer + rank for peer in range(size)]
    elif kind == "object":
        assert context.allgather_object((rank, number)) == [(peer, number) for peer in range(size)]
    else:
        context.barrier()


def named(context: Context, dice: random.Random, own: random.Random) -> None:
    """Some tensors by name, in this rank's own order, checked."""
    names = list(range(dice.randrange(1, 12)))
    counts = {name: dice.choice((1, 50, 3_000, 100_000)) for name in names}
    own.shuffle(names)
    started = []
    for name in names:
        array = np.full(counts[name], float(context.rank + name))
        started.append((name, array, context.engine.allreduce([array], rc.Sum, f"tensor{name}")))
    for name, array, handle in started:
        handle.wait(120.0)
        assert (array == context.size * name + context.size * (context.size - 1) // 2).all()


def work(context: Context, generation: int, pace_s: float, done: List[int]) -> None:
    """Collectives until something happens."""
    dice, own = random.Random(generation), random.Random(f"{generation}/{context.rank}")
    while True:
        if dice.random() < 0.6:
            direct(context, dice)
        else:
            named(context, dice, own)
        done[0] += 1
        time.sleep(dice.random() * 2 * pace_s)


def sample() -> Dict[str, float]:
    """Return what may grow, besides what Python will collect."""
    gc.collect()
    process = psutil.Process()
    return {
        "mib": round(process.memory_info().rss / (1 << 20), 1),
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
    }


def rank_main() -> None:
    """Take part in one job after the other, as lines on stdin say; report on stdout how they end."""
    done = [0]
    for line in sys.stdin:
        told = json.loads(line)
        where = tuple((str(host), int(port)) for host, port in told["rendezvous"])
        rank, size = told["rank"], told["size"]
        membership = Membership(
            size, where, bytes.fromhex(told["key"]), "soak", Slot(0, rank), None, "localhost"
        )
        context = Context.start(membership, Settings(dead_after_s=DEAD_AFTER_S, timeout_s=60.0))
        emit(event="started")
        over = threading.Event()

        reporter = threading.Thread(target=report, args=(over, told["every_s"], done), daemon=True)
        reporter.start()
        try:
            work(context, told["generation"], told["pace_s"], done)
        except rc.RingcommError as error:
            emit(event="failed", at_s=time.time(), culprit=getattr(error, "rank", None), text=str(error))
        finally:
            over.set()
            reporter.join()
            context.close("the soak goes on in the next generation")


def report(over: threading.Event, every_s: float, done: List[int]) -> None:
    """Report regularly how far this rank is, and what it uses."""
    while not over.wait(every_s):
        emit(event="sample", done=done[0], **sample())


def emit(**facts: Any) -> None:
    """Write one line for the process that started this one."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


# ---- the controlling process ---------------------------------------------------------------------


class Rank:
    """A process, and what it has said."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.samples: List[Dict[str, float]] = []
        self.done = 0
        self.event: Dict[str, Any] = {}
        self.changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak", "--rank"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            facts = json.loads(line)
            with self.changed:
                if facts["event"] == "sample":
                    self.samples.append(facts)
                    self.done = facts["done"]
                else:
                    self.event = facts
                self.changed.notify_all()

    def report(self, facts: Dict[str, Any]) -> None:
        """Start it in a job."""
        self.event = {}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(facts) + "\n")
        self.process.stdin.flush()

    def wait_for(self, event: str, timeout_s: float) -> Dict[str, Any]:
        """The event; AssertionError if it does not come, or another one does."""
        with self.changed:
            self.changed.wait_for(lambda: self.event or self.process.poll() is not None, timeout_s)
        assert self.event.get("event") == event, f"rank {self.number}: {self.event or 'nothing'}, not {event}"
        return self.event

    def send(self, number: int) -> None:
        """A signal."""
        os.kill(self.process.pid, number)


class Soak:
    """All of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.dice = random.Random(arguments.seed)
        self.counts = {"pauses survived": 0, "ranks killed": 0, "ranks frozen for good": 0}
        self.noticed_s: Dict[str, List[float]] = {"killed": [], "frozen": []}
        self.generation = 0
        self.ranks: List[Rank] = []
        self.server: Optional[RendezvousServer] = None

    def start(self) -> None:
        """Run one job with the processes that are there, and new ones for those that are not."""
        size = self.arguments.ranks
        while len(self.ranks) < size:
            self.ranks.append(Rank(len(self.ranks)))
        self.ranks = [rank if rank.process.poll() is None else Rank(rank.number) for rank in self.ranks]
        if self.server is not None:
            self.server.stop()
        key = secrets.token_bytes(32)
        self.server = RendezvousServer(
            key=key, job="soak", seats=[Seat(Slot(0, rank), "localhost") for rank in range(size)],
            addresses=["127.0.0.1"], start_timeout_s=60.0, notify=lambda notice: None,
        )  # fmt: skip
        where = self.server.start()
        self.generation += 1
        for rank in self.ranks:
            rank.report({
                "rendezvous": where, "key": key.hex(), "rank": rank.number, "size": size,
                "pace_s": self.arguments.pace, "generation": self.generation, "every_s": self.arguments.every,
            })  # fmt: skip
        for rank in self.ranks:
            rank.wait_for("started", 60.0)
            rank.event = {}

    def pause(self) -> None:
        """A rank stands still for less than the limit; no rank may fail."""
        victim = self.dice.choice(self.ranks)
        victim.send(signal.SIGSTOP)
        time.sleep(DEAD_AFTER_S * self.dice.uniform(0.1, 0.8))
        victim.send(signal.SIGCONT)
        time.sleep(1.0)
        assert not any(rank.event for rank in self.ranks), [rank.event for rank in self.ranks]
        self.counts["pauses survived"] += 1

    def lose(self, freeze: bool) -> None:
        """A rank dies or freezes; all others must report it, and the job starts again."""
        # Rank 0 lives through everything, so that what grows in it had all the time to.
        victim = self.dice.choice(self.ranks[1:])
        at_s = time.time()
        victim.send(signal.SIGSTOP if freeze else signal.SIGKILL)
        for rank in self.ranks:
            if rank is not victim:
                event = rank.wait_for("failed", 30.0)
                assert event["culprit"] == victim.number, event
                self.noticed_s["frozen" if freeze else "killed"].append(event["at_s"] - at_s)
                assert event["at_s"] - at_s < (BOUND_S if freeze else 2.0) + SLACK_S, event
        victim.process.kill()
        victim.process.wait()
        self.counts["ranks frozen for good" if freeze else "ranks killed"] += 1
        self.start()

    def run(self) -> int:
        """Until the time is over; the exit code."""
        until_s = time.monotonic() + self.arguments.hours * 3600
        began_s = shown_s = time.monotonic()
        size, seed, hours = self.arguments.ranks, self.arguments.seed, self.arguments.hours
        print(f"{size} ranks, seed {seed}, {hours:g} h; of rank 0:")
        print("  minutes   calls    MiB  descriptors  threads  jobs", flush=True)
        try:
            self.start()
            while time.monotonic() < until_s:
                time.sleep(self.dice.uniform(0.5, 1.5) * self.arguments.trouble)
                trouble = self.dice.random()
                if trouble < 0.6:
                    self.pause()
                else:
                    self.lose(freeze=trouble > 0.85)
                if time.monotonic() - shown_s >= self.arguments.hours * 3600 / 20:
                    shown_s = time.monotonic()
                    self._show(shown_s - began_s)
            return self._conclude()
        finally:
            for rank in self.ranks:
                rank.process.kill()
                rank.process.wait()
            if self.server is not None:
                self.server.stop()

    def _show(self, seconds: float) -> None:
        rank = self.ranks[0]
        if rank.samples:
            last = rank.samples[-1]
            print(
                f"  {seconds / 60:7.1f} {rank.done:7d} {last['mib']:6.1f} {last['descriptors']:12.0f} "
                f"{last['threads']:8.0f} {self.generation:5d}",
                flush=True,
            )

    def _conclude(self) -> int:
        samples = self.ranks[0].samples
        quarter = max(1, len(samples) // 4)
        early, late = samples[quarter : 2 * quarter], samples[-quarter:]
        problems = []
        for name, allowed in (("mib", 8.0), ("descriptors", 2.0), ("threads", 1.0)):
            before, after = (statistics.median(item[name] for item in part) for part in (early, late))
            print(f"{name}: {before:g} in the second quarter, {after:g} in the last")
            if after > before + allowed:
                problems.append(name)
        for kind, seconds in self.noticed_s.items():
            if seconds:
                took = f"{min(seconds):.2f} to {max(seconds):.2f} s"
                print(f"{kind}: noticed by {len(seconds)} ranks after {took}")
        print(", ".join(f"{name}: {count}" for name, count in self.counts.items()))
        print(f"NOT FLAT: {', '.join(problems)}" if problems else "PASSED: nothing grew, nothing was lost")
        return 1 if problems else 0


def main() -> int:
    """The command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of rest after a call, on average")
    parser.add_argument("--trouble", type=float, default=8.0, help="seconds between two troubles, on average")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks at what grows")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main()
        return 0
    return Soak(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
