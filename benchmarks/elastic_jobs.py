"""How long elastic jobs of ringrun need after a loss, what a newcomer costs, and ten minutes of losses.

    python benchmarks/elastic_jobs.py kills  4 ranks, 100 MB of state, SIGKILL of each in turn, 20 times
    python benchmarks/elastic_jobs.py hosts  the same with each rank on a host of its own, at 1 Gbit/s
    python benchmarks/elastic_jobs.py silent  on 3 hosts: a frozen rank, a pulled cable, a partition
    python benchmarks/elastic_jobs.py join   on 3 hosts: the pause of the others while a process joins that
                                             sleeps 20 s between init() and train()
    python benchmarks/elastic_jobs.py soak   ten minutes, a kill and a rejoin every 30 s

All ranks run on this machine, those of `hosts`, `silent` and `join` in network namespaces, which needs root
and sshd (see tests/hosts/netlab.py). `--quick` makes each a check of some seconds; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0

WORKER = """
import hashlib, json, os, resource, sys, time
import numpy as np
import ringcomm as rc
from ringcomm import api

rc.init()
member, pause_s = int(os.environ["RINGCOMM_MEMBER"]), float(os.environ["PAUSE_S"])
log = open(os.path.join(os.environ["LOGS"], f"{member}.jsonl"), "a", buffering=1)
stop = os.path.join(os.environ["LOGS"], "stop")


def note(**facts):
    where = {"at": time.time(), "pid": os.getpid(), "host": api.context().host}
    log.write(json.dumps({**facts, **where}) + "\\n")


def resources():
    pages = int(open("/proc/self/statm").read().split()[1])
    return {"memory_bytes": pages * resource.getpagesize(), "descriptors": len(os.listdir("/proc/self/fd"))}


@rc.elastic.run
def train(state):
    if os.environ.get("CHECKS_VIEWS", "1") == "1":
        rc.check_same({"weights": state.weights})
    note(event="view", epoch=rc.epoch(), size=rc.size(), step=state.step, **resources())
    gradient = np.zeros(1 << 18, np.float32)
    while True:
        began = time.time()
        time.sleep(pause_s)
        gradient[:] = 1e-3 * ((state.step + rc.rank()) % 7)
        total = rc.allreduce(gradient)
        ends = rc.allreduce(np.array([float(os.path.exists(stop))]), op=rc.Max)[0] > 0
        try:
            with state.update():
                at = state.step * len(total) % len(state.weights)
                state.weights[at : at + len(total)] += total[: len(state.weights) - at]
        finally:  # The step is finished, also where processes join after it.
            note(event="step", epoch=rc.epoch(), size=rc.size(), step=state.step, s=time.time() - began)
        if ends:
            rc.check_same({"weights": state.weights})
            digest = hashlib.sha256(state.weights).hexdigest()
            note(event="end", epoch=rc.epoch(), step=state.step, digest=digest, **resources())
            return


if int(os.environ["RINGCOMM_MEMBER"]) >= int(os.environ["FIRST_MEMBERS"]):
    time.sleep(float(os.environ.get("NEWCOMER_SLEEPS", "0")))
train(rc.elastic.ArrayState(weights=np.zeros(int(os.environ["STATE_BYTES"]) // 4, np.float32)))
"""


class ElasticJob:
    """One job of ringrun on this machine, and what its processes note.

    Args:
        options: of ringrun.
        ranks: number of ranks at the start.
        state_bytes: size of the state.
        pause_s: seconds of computation in each step.
        environment: more variables of the ranks.
    """

    def __init__(
        self, *options: str, ranks: int, state_bytes: int, pause_s: float = 0.02, **environment: str
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ringcomm-elastic-"))
        (self.folder / "worker.py").write_text(WORKER)
        env = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
        env.update(
            PYTHONPATH=f"{ROOT}:{ROOT / 'launcher'}", LOGS=str(self.folder), XDG_RUNTIME_DIR=str(self.folder),
            STATE_BYTES=str(state_bytes), PAUSE_S=str(pause_s), FIRST_MEMBERS=str(ranks),
            OPENBLAS_NUM_THREADS="1", **environment,
        )  # fmt: skip
        names = ["PYTHONPATH", "LOGS", "STATE_BYTES", "PAUSE_S", "FIRST_MEMBERS", "OPENBLAS_NUM_THREADS"]
        forwarded = [word for name in (*names, *environment) for word in ("-x", name)]
        self.env = env
        self.output = (self.folder / "ringrun.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ringrun", *forwarded, *options, str(self.folder / "worker.py")], env=env,
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def notes(self, member: int) -> List[Dict[str, Any]]:
        """Return what a process has noted, without a line that is being written."""
        path = self.folder / f"{member}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def members(self) -> List[int]:
        """The numbers of all processes that have noted anything."""
        return sorted(int(path.stem) for path in self.folder.glob("*.jsonl"))

    def running(self, size: int, but: Sequence[int] = ()) -> List[int]:
        """Wait until a view of so many ranks makes steps; its members without those in ``but``.

        Raises:
            RuntimeError: that has not happened in time, or the job has ended.
        """
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and self.process.poll() is None:
            last = {member: notes[-1] for member in self.members() if (notes := self.notes(member))}
            newest = max((note["epoch"] for note in last.values()), default=0)
            found = [member for member in last if last[member]["epoch"] == newest and member not in but]
            makes_steps = all(last[member]["event"] == "step" for member in found)
            if len(found) == size and last[found[0]]["size"] == size and makes_steps:
                return found
            time.sleep(0.02)
        raise RuntimeError(f"no view of {size} ranks\n{(self.folder / 'ringrun.txt').read_text()}")

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End what a failed measurement left running; its files stay, those of others do not."""
        self.process.terminate()
        self.process.wait()
        self.output.close()
        if kind is None:
            shutil.rmtree(self.folder)

    def kill(self, member: int, number: int = signal.SIGKILL) -> float:
        """Send a process a signal; when.

        The process id that it has noted may be that of a namespace, so its environment is looked for.

        Raises:
            RuntimeError: it does not run.
        """
        wanted = {f"RINGCOMM_MEMBER={member}".encode(), f"LOGS={self.folder}".encode()}
        for process in psutil.process_iter():
            try:
                environ = set(Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"))
                if wanted <= environ and str(self.folder / "worker.py") in process.cmdline():
                    at = time.time()
                    process.send_signal(number)
                    return at
            except (psutil.Error, OSError):
                continue  # It has ended meanwhile.
        raise RuntimeError(f"member {member} does not run")

    def first_step(self, members: Sequence[int], after: float) -> float:
        """Return when all these processes have finished a step of a view that began after a time."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            times = [self._first_step(member, after) for member in members]
            if None not in times:
                return max(time_s for time_s in times if time_s is not None)
            time.sleep(0.05)
        raise RuntimeError(f"no step after a loss\n{(self.folder / 'ringrun.txt').read_text()}")

    def _first_step(self, member: int, after: float) -> Optional[float]:
        notes = [note for note in self.notes(member) if note["at"] >= after]
        views = [number for number, note in enumerate(notes) if note["event"] == "view"]
        steps = [note["at"] for note in notes[views[0] :] if note["event"] == "step"] if views else []
        return steps[0] if steps else None

    def place(self, member: int) -> str:
        """The name of the host on which a process runs."""
        return str(self.notes(member)[-1]["host"])

    def views(self) -> int:
        """Return how many views there have been after the first."""
        return max(note["epoch"] for member in self.members() for note in self.notes(member)[-1:])

    def end(self) -> Tuple[int, str]:
        """End training; the exit code, and what ringrun has printed."""
        (self.folder / "stop").touch()
        code = self.process.wait(LIMIT_S)
        return code, (self.folder / "ringrun.txt").read_text()


def kills(ranks: int, state_bytes: int, count: int, *options: str, **environment: str) -> Dict[str, Any]:
    """SIGKILL one rank after the other; seconds until the survivors have finished a step."""
    with ElasticJob(
        "-np", str(ranks), "--min-np", str(ranks - 1), "--max-np", str(ranks), *options, ranks=ranks,
        state_bytes=state_bytes, **CHECKED_AT_THE_END, **environment,
    ) as job:  # fmt: skip
        dead: List[int] = []
        seconds: List[float] = []
        moved = 0
        for number in range(count):
            members = job.running(ranks, dead)
            time.sleep(1.0)
            pids = {member: job.notes(member)[-1]["pid"] for member in members}
            victim = members[number % ranks]
            at = job.kill(victim)
            dead.append(victim)
            survivors = [member for member in members if member != victim]
            seconds.append(job.first_step(survivors, at) - at)
            moved += sum(job.notes(member)[-1]["pid"] != pids[member] for member in survivors)
            print(f"  kill {number + 1}: {seconds[-1]:.2f} s", flush=True)
        members = job.running(ranks, dead)
        code, text = job.end()
        digests = {job.notes(member)[-1]["digest"] for member in members}
        ordered = sorted(seconds)
        return {
            "losses": count, "views_after_the_first": job.views(), "ranks": ranks, "state_bytes": state_bytes,
            "median_s": statistics.median(ordered), "longest_s": ordered[-1],
            "percentile_95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "survivors_with_another_pid": moved, "all_weights_equal": len(digests) == 1,
            "exit_code": code, "end": text.splitlines()[-1:],
        }  # fmt: skip


NODES = ("node1", "node2", "node3")
CHECKED_AT_THE_END = {"CHECKS_VIEWS": "0"}
"""Computing the digest of the state takes longer than going on."""


def computing(processes: int) -> ContextManager[None]:
    """So many processes compute."""
    sys.path.insert(0, str(ROOT))
    from tests.support.busy import busy

    return busy(processes)


@contextmanager
def lab_of(no_wlan: bool = True, names: Sequence[str] = NODES) -> Iterator[Any]:
    """Hosts in network namespaces, with links of 1 Gbit/s, and without ``no_wlan`` of 20 Mbit/s too."""
    sys.path.insert(0, str(ROOT))
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    with Lab(*names, no_wlan=no_wlan, docker=False) as lab:
        for name in names:
            lab.shape(name, "eth", "1000mbit", burst="256kb")
        yield lab


def hosts(ranks: int, state_bytes: int, count: int) -> Dict[str, Any]:
    """:func:`kills` with a rank on each of so many hosts with links of 1 Gbit/s."""
    names = [f"node{number + 1}" for number in range(ranks)]
    with lab_of(names=names) as lab:
        result = kills(ranks, state_bytes, count, "-H", ",".join(names), PATH=lab.environ()["PATH"])
        return {"mbit_per_s": 1000, **result}


def silent(state_bytes: int, count: int, dead_after_s: float) -> Dict[str, Any]:
    """A rank of three hosts is frozen or cut off: seconds until the others have finished a step.

    The rank that is cut off must not make any step in a later view.
    """
    with lab_of() as lab, ElasticJob(
        "-np", "3", "--min-np", "2", "--max-np", "3", "--dead-after", f"{dead_after_s:g}", "-H",
        ",".join(NODES), ranks=3, state_bytes=state_bytes, PATH=lab.environ()["PATH"],
    ) as job:  # fmt: skip
        strikes = {
            "frozen": (lambda member: job.kill(member, signal.SIGSTOP), lambda: None),
            "cable_pulled": (lambda _: lab.unplug(NODES[2], "eth"), lambda: lab.plug(NODES[2], "eth")),
            "partition": (lambda _: lab.cut(NODES[2]), lambda: lab.heal(NODES[2])),
        }
        seconds: Dict[str, List[float]] = {name: [] for name in strikes}
        dead: List[int] = []
        members, split = job.running(3), 0
        for name in [name for name in strikes for _ in range(count)]:
            time.sleep(1.0)
            strike, undo = strikes[name]
            (victim,) = [item for item in members if item not in dead and job.place(item) == NODES[2]]
            others = [item for item in members if item != victim]
            epoch, at = job.notes(victim)[-1]["epoch"], time.time()
            strike(victim)
            seconds[name].append(job.first_step(others, at) - at)
            print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)
            dead.append(victim)
            undo()
            members = job.running(3, dead)
            split += job.notes(victim)[-1]["epoch"] != epoch
        code, _ = job.end()
        return {
            "dead_after_s": dead_after_s, "state_bytes": state_bytes, "seconds": seconds,
            "steps_of_lost_ranks_in_later_views": split, "exit_code": code,
        }  # fmt: skip


def join(state_bytes: int, count: int, sleep_s: float, busy: int) -> Dict[str, Any]:
    """A rank of three hosts with two networks is killed; the new process sleeps between init() and train().

    The pauses of the others are those between two steps, from 3 s after the loss until 1 s after the first
    step with the new process. The state is compared between the ranks at the end only: computing its digest
    takes longer than the rest. ``busy`` processes compute meanwhile.
    """
    with lab_of(no_wlan=False) as lab, computing(busy), ElasticJob(
        "-np", "3", "--min-np", "2", "--max-np", "3", "-H", ",".join(NODES), ranks=3, state_bytes=state_bytes,
        NEWCOMER_SLEEPS=str(sleep_s), **CHECKED_AT_THE_END, PATH=lab.environ()["PATH"],
    ) as job:  # fmt: skip
        dead: List[int] = []
        pauses: List[float] = []
        steps_meanwhile: List[int] = []
        for number in range(count):
            members = job.running(3, dead)
            time.sleep(1.0)
            at = job.kill(members[-1])
            dead.append(members[-1])
            members = job.running(3, dead)
            joined = job.notes(members[-1])[0]["at"]
            time.sleep(1.0)
            steps = [
                note["at"] for note in job.notes(members[0])
                if note["event"] == "step" and note["at"] > at + 3.0
            ]  # fmt: skip
            pauses.append(max(after - before for before, after in zip(steps, steps[1:])))
            steps_meanwhile.append(sum(step < joined for step in steps))
            print(f"  join {number + 1}: {pauses[-1]:.2f} s", flush=True)
        code, _ = job.end()
        return {
            "joins": count, "newcomer_sleeps_s": sleep_s, "state_bytes": state_bytes, "exit_code": code,
            "busy_processes": busy, "pauses_s": pauses, "median_pause_s": statistics.median(pauses),
            "longest_pause_s": max(pauses),
            "fewest_steps_while_it_sleeps": min(steps_meanwhile),
        }  # fmt: skip


def soak(ranks: int, state_bytes: int, minutes: float, every_s: float) -> Dict[str, Any]:
    """Kill a rank every ``every_s`` seconds; it is started again. Member 0 is never killed.

    Throughput is the part of the time that ranks have spent in steps of the usual length. Memory and
    descriptors are those of every member that is there at the end: early, half-way and in the last view.
    """
    with ElasticJob(
        "-np", str(ranks), "--min-np", "1", "--max-np", str(ranks), ranks=ranks, state_bytes=state_bytes,
        pause_s=0.05,
    ) as job:  # fmt: skip
        dead: List[int] = []
        members = job.running(ranks)
        time.sleep(min(10.0, every_s))
        began = job.notes(0)[-1]["at"]
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            victim = [member for member in members if member != 0][len(dead) % (ranks - 1)]
            job.kill(victim)
            dead.append(victim)
            print(f"  {len(dead)} losses", flush=True)
            time.sleep(every_s)
            members = job.running(ranks, dead)
        code, _ = job.end()
        notes = job.notes(0)
        usual_s = statistics.median(
            note["s"] for note in notes if note["event"] == "step" and note["at"] < began
        )
        steps = [note for note in notes if note["event"] == "step" and note["at"] >= began]
        span_s = steps[-1]["at"] - steps[0]["at"]
        ends = [job.notes(member)[-1] for member in members]
        return {
            "minutes": span_s / 60, "losses": len(dead), "steps": len(steps), "exit_code": code,
            "usual_step_s": usual_s, "throughput_kept": len(steps) * usual_s / span_s,
            "views_after_the_first": job.views(), "views_checked_to_be_the_same": _views(notes),
            "all_at_the_same_step": len({note["step"] for note in ends}) == 1,
            "all_weights_equal": len({note["digest"] for note in ends}) == 1,
            "resources": {member: _resources(job.notes(member)) for member in members},
        }  # fmt: skip


def _views(notes: Sequence[Dict[str, Any]]) -> int:
    """In how many views check_same() has compared the weights of all ranks."""
    return sum(note["event"] == "view" for note in notes)


def _resources(notes: Sequence[Dict[str, Any]]) -> Dict[str, List[int]]:
    """Memory and descriptors of a process when its third view begins, the one in the middle, and the last."""
    views = [note for note in notes if note["event"] == "view"]
    three = [views[min(2, len(views) - 1)], views[len(views) // 2], views[-1]]
    return {name: [note[name] for note in three] for name in ("memory_bytes", "descriptors")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "hosts", "silent", "join", "soak"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=float, default=100.0, help="size of the state in MB (10^6 bytes)")
    parser.add_argument("--count", type=int, default=20, help="number of kills")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute during `join`")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between losses")
    parser.add_argument("--sleep", type=float, default=20.0, help="seconds that the newcomer sleeps")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file: the result becomes its entry of this name")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    if given.quick:
        given.mb, given.count, given.minutes, given.every, given.sleep = 1.0, 2, 0.1, 3.0, 4.0
    size = int(given.mb * 1e6)
    if given.what == "kills":
        result = kills(given.ranks, size, given.count)
    elif given.what == "hosts":
        result = hosts(given.ranks, size, given.count)
    elif given.what == "silent":
        result = silent(size, max(1, given.count // 5), 5.0)
    elif given.what == "join":
        result = join(size, given.count, given.sleep, given.busy)
    else:
        result = soak(given.ranks, size, given.minutes, given.every)
    result = {"cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()[0], **result}
    name = f"{given.what}_busy" if given.busy else given.what
    print(json.dumps(result, indent=2))
    if given.output is not None:
        kept = json.loads(given.output.read_text()) if given.output.exists() else {}
        given.output.write_text(json.dumps({**kept, name: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
