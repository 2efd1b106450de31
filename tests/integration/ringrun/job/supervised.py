"""Jobs in this process: a supervisor, hosts that are commands of this machine, and programs of a shell."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, List, Sequence, Tuple

from ringrun.job.launch import prepare
from ringrun.job.outcome import Outcome
from ringrun.job.supervise import Supervisor
from ringrun.plan.environment import from_values
from ringrun.plan.job import Job
from ringrun.plan.options import Options
from ringrun.show.output import Console
from tests.support.service import eventually

LIMIT_S = 60.0
STAYS = "echo up $RANK; exec sleep 1000"


class Kept(Console):
    """A console that keeps its output, and calls `react` with the whole text so far."""

    def __init__(self) -> None:
        self.written = {1: b"", 2: b""}
        self.react: Callable[[str], None] = lambda text: None

    def write(self, stream: int, data: bytes) -> None:
        self.written[stream] += data
        self.react(self.text)

    @property
    def text(self) -> str:
        return (self.written[1] + self.written[2]).decode()

    @property
    def lines(self) -> List[str]:
        """Of stdout, sorted."""
        return sorted(self.written[1].decode().splitlines())


class Supervised:
    """Runs a job whose `supervisor` writes to a console; the test fails if it does not end in time."""

    def __init__(self, job: Any, supervisor: Callable[[Kept], Any]) -> None:
        self.console, self.job = Kept(), job
        self.supervisor = supervisor(self.console)

    def once(self, action: Callable[[], None], *words: str) -> None:
        """Call `action` when all these words have been written, one time."""

        def react(text: str) -> None:
            if all(word in text for word in words):
                self.console.react = lambda text: None
                action()

        self.console.react = react

    def run(self) -> Outcome:
        late: List[bool] = []

        def end() -> None:
            late.append(True)
            for _ in range(2):
                self.supervisor.interrupt(2)

        timer = threading.Timer(LIMIT_S, end)
        timer.start()
        try:
            outcome: Outcome = self.supervisor.run()
        finally:
            timer.cancel()
            timer.join()
        assert not late, self.console.text
        assert none_remain(self.job)
        return outcome


class Rendezvous:
    """Replaces a job's rendezvous, and keeps the reported ends of ranks."""

    def __init__(self) -> None:
        self.notify: Callable[[Any], None] = lambda notice: None
        self.exits: List[Tuple[int, str, bool]] = []
        self.events: List[str] = []

    def open(self, notify: Callable[[Any], None]) -> Any:
        self.notify = notify
        return self

    def start(self) -> List[Tuple[str, int]]:
        self.events.append("start")
        return [("127.0.0.1", 7)]

    def process_exited(self, number: int, how: str, ok: bool) -> None:
        self.exits.append((number, how, ok))

    def stop(self) -> None:
        self.events.append("stop")


class Running(Supervised):
    """Runs a job that is not elastic, perhaps with a replacement of its rendezvous."""

    def __init__(self, job: Job, rendezvous: Any = None) -> None:
        opens = (rendezvous or Rendezvous()).open
        super().__init__(job, lambda console: Supervisor(job, console, opens))


def notice(kind: str, text: str = "", **facts: Any) -> Any:
    """Return what a rendezvous sends to a supervisor."""
    given = {"rank": None, "culprit": None, "detail": {}, **facts}
    return SimpleNamespace(kind=kind, text=text, **given)


def processes_of(job: Any) -> List[int]:
    """Return what still runs of a job."""
    wanted = f"RINGCOMM_JOB={job.id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def none_remain(job: Any) -> bool:
    """Return whether all processes of a job end; one that was killed needs a processor once more for that."""
    return eventually(lambda: processes_of(job) == [], LIMIT_S)


def shell_job(
    folder: Path, program: str, hosts: str = "localhost:2", argv: Sequence[str] = (), **more: Any
) -> Job:
    """A job whose ranks run a shell program; ``argv``, if given, in place of the first host's command."""
    values = {"diagnose_dir": str(folder / "records"), **more.pop("settings", {})}
    options = Options(
        hosts=hosts, via="env TEST_HOST={host}", ship_self=False, setting_values=from_values(values), **more
    )
    made = prepare(options, ["sh", "-c", program])
    if argv:
        made = replace(made, hosts=(replace(made.hosts[0], argv=tuple(argv)), *made.hosts[1:]))
    assert isinstance(made, Job)
    return made
