"""The agent: starts, monitors and ends the ranks of one host. The launcher sends this file over stdin.

It uses the standard library and the modules that are sent with it, so that a host with only Python 3.8
can report what it lacks. Its frames (:mod:`.framing`) are on stdin the job as JSON, perhaps a payload for the
ranks, commands and packages; on stdout the output of ranks, their results, and events as JSON.

When stdin ends (the launcher or its ssh died), the agent ends every process of the job: by process group, by
descent (orphans become this process's children), and by the job's identifier in their environment. A guard,
this process's parent, does the same if the agent is killed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from ringcomm.storage import files
from ringrun.agent import checks, framing, processes
from ringrun.agent.framing import CHECK, CODE, FILE, PACKAGE, RESULT, STDERR, STDOUT, TO_AGENT

ALL = -2  # in place of a rank: every process
ENDING = ((signal.SIGTERM, 0.0), (signal.SIGKILL, 1.5))  # signals, seconds from now
LEFTOVER_S = 0.5  # processes that a rank leaves behind have this long between SIGTERM and SIGKILL
CHECK_LIMIT_S = 30.0


class Child:
    """A rank or the check; `pipes` are the descriptors of its output."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], pipes: List[int]) -> None:
        self.rank, self.process, self.pipes = rank, process, pipes
        self.sent = 0  # the last signal sent to it
        self.end: Dict[str, Any] = {}  # how it has ended, while the rest of its process group runs


class Agent:
    """One event loop: executes commands, sends output and events, sends signals when they are due."""

    def __init__(self, config: Dict[str, Any], payload: Optional[bytes], libc: Any) -> None:
        self.config, self.libc = config, libc
        self.key = processes.InheritedBytes(config["key"].encode())
        self.payload = None if payload is None else processes.InheritedBytes(payload)
        self.argv: List[str] = [sys.executable if word is None else word for word in config["argv"]]
        self.fetched: Optional[Iterator[bytes]] = None
        prefixes = tuple(config["unset_prefixes"])
        self.env = {
            name: value for name, value in os.environ.items()
            if name not in config["unset"] and not name.startswith(prefixes)
        }
        # As bytes, because this host's encoding may be another one than the launcher's.
        native = processes.in_native_encoding
        self.env.update((native(name), native(value)) for name, value in config["env"].items())
        limits = processes.limit_threads(self.env, config["threads"], config["slots"])
        cwd = os.path.expanduser(config["cwd"])  # noqa: PTH111  no pathlib here
        self.shares, limits["unbound"] = processes.usable_shares(config["bind"], len(config["ranks"]))
        self.preparation = checks.Preparation(config, self.env, self.argv[0], cwd, limits)
        self.selector = selectors.DefaultSelector()
        self.output = framing.Output(self.selector, self.launcher_gone)
        self.recorders: Dict[int, framing.Recorder] = {}  # by rank
        self.received = bytearray()
        self.children: Dict[int, Child] = {}
        self.finished = self.stopped = False
        self.signum = 0  # the signal that this process has got
        self.signalled = self.told_to_stop = False  # by a signal on this host; by the launcher
        self.waiting = True  # until the launcher says go
        self.is_open = config["elastic"]  # whether further ranks may be started
        self.scheduled_signals: List[Tuple[float, int, int]] = []  # (when, signal, rank or ALL)
        self.leftovers: List[Tuple[float, int]] = []  # (when, process group to kill)
        self.closing_since: Optional[float] = None
        self.last_command_s = time.monotonic()

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all ranks have ended, and the launcher has received all events or is lost."""
        self.watch_signals()
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.selector.register(0, selectors.EVENT_READ, self.read_commands)
        self.output.unsent += framing.MARKER
        self.advance(self.preparation.use_package())
        self.output.flush()
        while not (self.finished and (self.output.lost or not self.output.unsent)):
            for key, _ in self.selector.select(self.wait_limit_s()):
                key.data()
            self.reap()
            self.act()
            self.output.flush()

    def watch_signals(self) -> None:
        """Wake the loop when a child ends; a termination signal ends the job."""
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self.on_signal)
        self.selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))

    def on_signal(self, signum: int, _: object) -> None:
        self.signum = signum

    def wait_limit_s(self) -> Optional[float]:
        """Return the seconds until the next deadline, or None."""
        if self.finished:
            return None
        if self.closing_since is not None:
            return 0.02
        due = [item[0] for item in (*self.scheduled_signals, *self.leftovers)]
        now = time.monotonic()
        due += [recorder.due for recorder in self.recorders.values() if recorder.due is not None]
        if any(child.end for child in self.children.values()):
            due.append(now + 0.05)
        if self.config["silence_s"]:
            due.append(self.last_command_s + self.config["silence_s"])
        return max(0.0, min(due) - now) if due else None

    def act(self) -> None:
        """Execute due actions: the end of the job, records, signals."""
        now, limit_s = time.monotonic(), self.config["silence_s"]
        signum, self.signum = self.signum, 0
        if signum == signal.SIGHUP or (limit_s and now - self.last_command_s > limit_s):
            self.launcher_gone()
        elif signum:
            self.waiting, self.is_open, self.signalled = False, False, True
            self.schedule(((signal.SIGTERM, 0.0), (signal.SIGKILL, self.config["grace_s"])))
        for recorder in self.recorders.values():
            recorder.act(now)
        for when, pgid in [item for item in self.leftovers if item[0] <= now]:
            self.leftovers.remove((when, pgid))
            processes.kill_group(pgid, signal.SIGKILL)
        for item in [item for item in sorted(self.scheduled_signals) if item[0] <= now]:
            self.scheduled_signals.remove(item)
            self.send_signal(item[1], item[2])
        for pid, child in list(self.children.items()):
            if child.end and not processes.kill_group(pid, 0):
                self.report_end(pid, child)
        if not (self.children or self.waiting or self.is_open or self.finished):
            self.close(now)

    def send_signal(self, signum: int, rank: int) -> None:
        """Signal ranks: SIGTERM once, to the rank alone, which may need its group; see :meth:`reap`."""
        for pid, child in self.children.items():
            if rank not in (ALL, child.rank) or (child.sent == signum != signal.SIGKILL):
                continue
            child.sent = signum
            if child.end:  # the rest of its group has had SIGTERM
                processes.kill_group(pid, signum)
                child.end.update(code=None, signal=int(signum), sent=int(signum))
            elif signum == signal.SIGINT:  # as from a terminal
                processes.kill_group(pid, signum)
            else:
                processes.kill([pid], signum)
                if signum == signal.SIGKILL:
                    self.end_group(pid)

    def end_group(self, pid: int) -> None:
        """End the rest of a rank's process group."""
        if processes.kill_group(pid, signal.SIGTERM):
            self.leftovers.append((time.monotonic() + LEFTOVER_S, pid))

    def strays(self) -> List[int]:
        return processes.strays(self.config["job"], self.config["host_index"], os.getpid())

    def close(self, now: float) -> None:
        """End the processes that ranks left behind, drain their pipes, send ``done``; no rank runs."""
        left, output = self.strays(), self.output
        if self.closing_since is None:
            self.closing_since = now
            processes.kill(left, signal.SIGTERM)
        spent = now - self.closing_since
        if left and spent < LEFTOVER_S + 1.0:
            if spent >= LEFTOVER_S:
                processes.kill(left, signal.SIGKILL)
        elif not output.pipes or output.lost or (not output.paused and spent > LEFTOVER_S + 1.5):
            if self.fetched is None:
                self.fetched = iter(()) if self.stopped else self.preparation.fetched()
            if self.send_files(self.fetched):
                if not self.ends_alone:
                    self.output.event("done")
                self.finished = True

    @property
    def ends_alone(self) -> bool:
        """Whether a signal ends the ranks of this host only; the job then loses the host."""
        return self.signalled and not self.told_to_stop

    def send_files(self, pieces: Iterator[bytes]) -> bool:
        """Send as much of the files to fetch as stdout accepts soon; return whether all was sent."""
        while len(self.output.unsent) < framing.RESUME_BYTES:
            piece = next(pieces, None)
            if piece is None:
                return True
            self.output.send(FILE, -1, piece)
        return self.output.lost

    def launcher_gone(self) -> None:
        """End all ranks without further commands, but no sooner than the launcher had ordered."""
        if not self.output.lost:
            is_ending = not self.waiting and any(
                (signum, rank) == (signal.SIGKILL, ALL) for _, signum, rank in self.scheduled_signals
            )
            self.waiting = self.is_open = False
            self.output.close()
            if not is_ending:
                self.schedule(ENDING)

    def schedule(self, steps: Any, rank: int = ALL) -> None:
        now = time.monotonic()
        self.scheduled_signals += [(now + after_s, int(signum), rank) for signum, after_s in steps]

    # -- to and from the launcher -------------------------------------------------------------

    def read_commands(self) -> None:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(0)
            self.launcher_gone()
            return
        self.last_command_s = time.monotonic()
        self.received += data
        while len(self.received) >= TO_AGENT.size:
            kind, length = TO_AGENT.unpack_from(self.received)
            if len(self.received) < TO_AGENT.size + length:
                break
            data = bytes(self.received[TO_AGENT.size : TO_AGENT.size + length])
            del self.received[: TO_AGENT.size + length]
            if kind == PACKAGE:
                self.advance(self.preparation.use_package(data))
            elif kind == CODE:
                self.advance(self.preparation.place_code(data))
            else:
                self.execute(json.loads(data.decode()))

    def execute(self, command: Dict[str, Any]) -> None:
        if command["do"] == "go" and self.waiting:
            self.waiting = False
            self.env.update(command["env"])
            for rank, processors in zip(self.config["ranks"], self.shares):
                self.start_rank(rank, processors)
        elif command["do"] == "start" and self.is_open:
            self.start_rank(command["rank"], set())
        elif command["do"] == "end":
            self.schedule(command["steps"], command["rank"])
        elif command["do"] == "stop":
            self.waiting, self.is_open, self.told_to_stop = False, False, True
            self.stopped = not command.get("fetch")
            self.schedule(command["steps"])
        elif command["do"] == "use" and self.waiting:
            self.advance(self.preparation.use(command["package"]))
        elif command["do"] in ("diagnose", "numbers"):
            for recorder in self.recorders.values():
                recorder.ask() if command["do"] == "diagnose" else recorder.ask_numbers()

    # -- processes ----------------------------------------------------------------------------

    def advance(self, step: checks.Step) -> None:
        """Send the event of a step of the preparation, or start the trial import."""
        name, facts = step
        if name == checks.CHECK:
            try:
                self.start(CHECK, facts["argv"], self.env, ())
            except OSError as problem:  # more variables than this system allows, for example
                name, facts = "problem", cannot_start(facts["argv"], problem)
            else:
                self.scheduled_signals.append((time.monotonic() + CHECK_LIMIT_S, signal.SIGKILL, ALL))
                return
        if name == "problem":
            self.waiting = self.is_open = False
        self.output.event(name, **facts)

    def check_ended(self, how: Dict[str, Any]) -> None:
        """Handle the end of the trial import."""
        if not self.waiting:
            return  # this agent is being ended, and the check with it
        self.scheduled_signals.clear()  # it contained the check's time limit only
        output, self.output.check_output = bytes(self.output.check_output), bytearray()
        self.advance(self.preparation.checked(output, how))

    def start_rank(self, rank: Dict[str, Any], processors: Set[int]) -> None:
        env = dict(self.env, **rank["env"])
        argv, inherited = list(self.argv), [self.key.descriptor()]
        env["RINGCOMM_KEY_FD"] = str(inherited[0])
        result = -1
        if self.payload is not None:
            result, writer = os.pipe()
            inherited += [self.payload.descriptor(), writer]
            argv += [str(descriptor) for descriptor in inherited[1:]]
        number = rank["rank"]
        recorder = self.recorders[number] = framing.Recorder(number, env, self.selector, self.output)
        inherited += recorder.ends
        try:
            self.start(number, argv, env, tuple(inherited), result, processors)
        except (OSError, subprocess.SubprocessError) as problem:
            self.output.event("problem", **cannot_start(argv, problem))
            self.schedule(ENDING)
        finally:
            for descriptor in inherited:
                os.close(descriptor)

    def start(
        self, rank: int, argv: List[str], env: Dict[str, str], inherited: Tuple[int, ...], result: int = -1,
        processors: Iterable[int] = (),
    ) -> None:  # fmt: skip
        libc, agent = self.libc, os.getpid()

        def die_with_agent() -> None:  # pragma: no cover - runs in the child, before exec
            processes.prctl(libc, processes.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:
                os._exit(1)
            if processors:
                os.sched_setaffinity(0, processors)  # type: ignore[attr-defined,unused-ignore]

        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        ends = [os.open(os.devnull, os.O_RDONLY), out_end, err_end]
        try:
            process = subprocess.Popen(
                argv, cwd=self.preparation.cwd, env=env, stdin=ends[0], stdout=ends[1], stderr=ends[2],
                pass_fds=inherited, start_new_session=True, preexec_fn=die_with_agent,
            )  # fmt: skip
        finally:
            for end in ends:
                os.close(end)
        sources = [(out, STDOUT), (err, STDERR)] + ([(result, RESULT)] if result >= 0 else [])
        self.children[process.pid] = Child(rank, process, [each for each, _ in sources])
        for descriptor, kind in sources:
            self.output.add(descriptor, kind, rank)
        if rank != CHECK:
            self.recorders[rank].pid = process.pid
            self.output.event("started", rank, pid=process.pid)

    def reap(self) -> None:
        """Collect ended children, and orphans adopted by this process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.get(pid)
            if child is None:
                continue
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = None if killed else os.WEXITSTATUS(status)
            child.process.returncode = -killed if killed else code  # already reaped: Popen must not try
            for descriptor in child.pipes:
                for _ in range(16):  # its output is sent before the event of its end
                    if not self.output.read(descriptor):
                        break
            child.end = {"code": code, "signal": killed, "sent": child.sent, "at": time.time()}
            if killed == child.sent == signal.SIGTERM and processes.kill_group(pid, signal.SIGTERM):
                continue  # it had no handler, like a shell; the program that it runs may have one
            if child.sent != signal.SIGKILL:
                self.end_group(pid)
            self.report_end(pid, child)

    def report_end(self, pid: int, child: Child) -> None:
        del self.children[pid]
        if child.rank == CHECK:
            self.check_ended(child.end)
        elif not self.ends_alone:
            joined = self.recorders.pop(child.rank).end()
            self.output.event("exit", child.rank, joined=joined, **child.end)


def cannot_start(argv: List[str], problem: Exception) -> Dict[str, Any]:
    """Return the facts about a program that the system cannot start."""
    return {"problem": "start", "path": argv[0], "why": str(problem)}


def main() -> None:
    """Read the job, fork into guard and agent, run the agent, exit."""
    files.open_standard_descriptors()
    config: Dict[str, Any] = json.loads(framing.read_frame().decode())
    libc = processes.load_libc()
    processes.prctl(libc, processes.PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child:
        processes.run_guard(child, config["job"], config["host_index"])
    processes.prctl(libc, processes.PR_SET_PDEATHSIG, signal.SIGTERM)
    processes.prctl(libc, processes.PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != guard:
        os._exit(1)
    payload = framing.read_frame() if config["payload"] else None
    Agent(config, payload, libc).run()
    os._exit(0)


if __name__ == "__main__":
    main()
