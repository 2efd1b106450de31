"""``ringrun ps``, ``stop``, ``add`` and ``drop``, and the socket on which they reach a job of the same user.

The socket is in a directory that only the user can enter, ``$XDG_RUNTIME_DIR/ringrun`` or
``/tmp/ringrun-UID``. Another user may have made that directory before, so jobs and commands look at it first.
In addition both ends of every connection ask the kernel for the user of the other end (``SO_PEERCRED``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.clock import Deadline
from ringcomm.errors import ConfigError, ProtocolError
from ringcomm.storage.folders import own_folder
from ringcomm.transport.connect import NO_DESCRIPTORS_S, check_user, is_short_of_descriptors

from ..plan.job import Job
from ..reach.incoming import decoded, fields, flag, items, number, text, whole
from ..show.views import duration
from ..show.visible import columns, visible_line

REQUEST_LIMIT_BYTES = 4096
ANSWER_LIMIT_BYTES = 1 << 20  # it names all hosts of a job
LIMIT_S = 5.0  # of a request and of its answer
_SUFFIX = ".sock"
_JOB = re.compile(r"[0-9a-f]{16}")
"""A job's identifier. Sockets with other names are not ringrun's."""
SHOWN_CHARACTERS = 8
"""Characters of a job's identifier in the table; commands accept a prefix."""
NO_JOB = "No job of yours was started by ringrun on this machine and still runs."


# -- the socket of a job ----------------------------------------------------------------------


class ForeignFolderError(ConfigError):
    """Other users can put sockets into the directory of the control sockets."""


def control_folder(environ: Mapping[str, str]) -> Path:
    """Return the directory of the control sockets of this user's jobs."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and Path(runtime).is_dir():
        return Path(runtime) / "ringrun"
    return Path(f"/tmp/ringrun-{os.getuid()}")  # noqa: S108  its owner and mode are checked


def check_folder(folder: Path) -> None:
    """Raise ForeignFolderError if other users can put sockets into the directory, OSError without one."""
    facts = folder.lstat()
    if facts.st_uid != os.geteuid():
        reason = f"belongs to another user (number {facts.st_uid})"
    elif not stat.S_ISDIR(facts.st_mode):
        reason = "is no directory"
    elif facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"is a directory that other users may write (mode {stat.S_IMODE(facts.st_mode):04o})"
    else:
        return
    raise ForeignFolderError(
        f"`ringrun ps`, `stop`, `add` and `drop` cannot reach jobs of yours: {folder} {reason}. "
        "Have it removed, or set XDG_RUNTIME_DIR to a directory of your own, for jobs and commands alike."
    )


def job_facts(job: Job, began_s: float, ended: int) -> str:
    """Return the row of ``ringrun ps`` as JSON."""
    return json.dumps({
        "pid": os.getpid(), "program": job.command.shown, "began_at": began_s,
        "ranks": len(job.plan.places) - ended,
        "hosts": [host.name for host in job.last_hosts], "elastic": job.is_elastic,
    })  # fmt: skip


class ControlSocket:
    """The server, in a thread: passes requests, each a line of JSON, to `execute`, and ConfigErrors back."""

    def __init__(
        self, job: str, execute: Callable[[Mapping[str, Any]], str], folder: Optional[Path] = None
    ) -> None:
        self._path = (folder or control_folder(os.environ)) / f"{job}{_SUFFIX}"
        self._execute = execute
        self._socket: Optional[socket.socket] = None
        self._thread: Optional[threading.Thread] = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Listen in a thread. ConfigError if the directory cannot be written, or other users can write it."""
        server = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(check_folder, self._path.parent)  # says more than why it cannot be opened
                os.fchmod(stack.enter_context(own_folder(self._path.parent, 0o700)), 0o700)
            server.bind(str(self._path))
            server.listen(8)
        except (ConfigError, OSError) as problem:
            server.close()
            if isinstance(problem, ConfigError):
                raise
            raise ConfigError(
                f"`ringrun stop`, `add` and `drop` cannot reach this job: the socket {self._path} cannot be "
                f"made ({problem.strerror or problem}). Set XDG_RUNTIME_DIR to a directory of your own."
            ) from None
        self._socket = server
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Remove the socket, and end the thread."""
        self._stopped.set()
        if self._socket is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # accept() returns
            self._socket.close()
            self._socket = None
        if self._thread is not None:
            self._thread.join(LIMIT_S)

    def _serve(self, server: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = server.accept()
            except OSError as problem:
                if not is_short_of_descriptors(problem):
                    return  # it has been closed
                self._stopped.wait(NO_DESCRIPTORS_S)
                continue
            with connection, contextlib.suppress(OSError):  # a caller that has gone needs no answer
                check_user(connection)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            request = _receive(connection, REQUEST_LIMIT_BYTES, LIMIT_S)
            if request is None:
                raise ConfigError("The request is not valid.")
            answer: Dict[str, Any] = {"ok": True, "text": self._execute(request)}
        except ConfigError as problem:
            answer = {"ok": False, "text": str(problem)}
        connection.settimeout(LIMIT_S)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _receive(connection: socket.socket, limit_bytes: int, limit_s: float) -> Optional[Dict[str, Any]]:
    """Return the object in a line of JSON, None if that is not valid or too long; OSError after `limit_s`."""
    data, deadline = b"", Deadline(limit_s)
    while not data.endswith(b"\n"):
        connection.settimeout(max(deadline.remaining_s(), 0.001))
        piece = connection.recv(1 << 16)
        data += piece
        if len(data) > limit_bytes:
            return None
        if not piece:
            break
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else None


class EndedError(ConfigError):
    """The job of a socket has ended."""


def send_command(folder: Path, job: str, command: Mapping[str, Any]) -> str:
    """Send a command to a running job and return its answer."""
    if not _JOB.fullmatch(job):
        raise ConfigError(f"{job!r} is no identifier of a job: those are 16 hexadecimal digits.")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2 * LIMIT_S)
        try:
            connection.connect(str(folder / f"{job}{_SUFFIX}"))
            check_user(connection)
            connection.sendall(json.dumps(dict(command)).encode() + b"\n")
            answer = _receive(connection, ANSWER_LIMIT_BYTES, 2 * LIMIT_S)
        except OSError as problem:
            has_ended = isinstance(problem, (ConnectionRefusedError, FileNotFoundError))
            error = EndedError if has_ended else ConfigError
            raise error(f"The job {job} does not answer: {problem.strerror or problem}.") from None
    if answer is None:
        raise ConfigError(f"The job {job} does not answer: it has ended, or its answer is not valid.")
    if not answer.get("ok"):
        raise ConfigError(str(answer.get("text")))
    return str(answer.get("text"))


# -- the commands -----------------------------------------------------------------------------


class RunningJob(NamedTuple):
    """A job's answer to ``info``; `pid` is its launcher's, `began_at` in seconds of the wall clock."""

    id: str
    pid: int
    program: str
    ranks: int
    hosts: List[str]
    began_at: float
    elastic: bool


_FACTS = fields({
    "pid": whole(), "program": text(1 << 16), "ranks": whole(), "hosts": items(text(), 4096),
    "began_at": number(), "elastic": flag,
})  # fmt: skip


def jobs_of(folder: Path) -> Tuple[List[RunningJob], List[str]]:
    """Return the running jobs of a directory, oldest first, and problems; remove sockets of killed jobs."""
    try:
        check_folder(folder)
        names = sorted(path.stem for path in folder.iterdir() if path.suffix == _SUFFIX)
    except FileNotFoundError:
        return [], []
    except OSError as problem:
        raise ConfigError(f"{folder} cannot be read: {problem.strerror}.") from None
    found, problems = [], []
    for job in filter(_JOB.fullmatch, names):
        try:
            facts = decoded(send_command(folder, job, {"do": "info"}).encode(), _FACTS)
            found.append(RunningJob(id=job, **facts))
        except EndedError:
            with contextlib.suppress(FileNotFoundError):
                (folder / f"{job}{_SUFFIX}").unlink()
        except ConfigError as problem:
            problems.append(str(problem))
        except ProtocolError:
            problems.append(f"The job {job} does not answer: what it says of itself is not valid.")
    return sorted(found, key=lambda item: item.began_at), problems


def show_jobs(environ: Mapping[str, str]) -> Tuple[str, List[str]]:
    """Run ``ringrun ps``: return the text to print, and problems. It raises as :func:`jobs_of` does."""
    jobs, problems = jobs_of(control_folder(environ))
    if not jobs:
        return "" if problems else f"{NO_JOB}\n", problems
    rows = [("JOB", "PID", "RANKS", "RUNS FOR", "HOSTS", "PROGRAM")]
    for job in jobs:
        age, hosts = duration(time.time() - job.began_at), visible_line(",".join(job.hosts))
        row = job.id[:SHOWN_CHARACTERS], str(job.pid), str(job.ranks), age, hosts, visible_line(job.program)
        rows.append(row)
    widths = [max(columns(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([*(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths)), row[5]])
        for row in rows
    ]
    return "\n".join(lines) + "\n", problems


def stop_job(beginning: str, environ: Mapping[str, str], agree: Callable[[str, str], bool]) -> str:
    """Run ``ringrun stop`` and return the job's answer."""
    folder = control_folder(environ)
    jobs, problems = jobs_of(folder)
    job = _chosen(jobs, problems, beginning)
    if not beginning and not agree(job.id, visible_line(job.program)):
        raise ConfigError(f"The job {job.id} continues.")
    return send_command(folder, job.id, {"do": "stop"})


def change_hosts(what: str, host: str, beginning: str, environ: Mapping[str, str]) -> str:
    """Run ``ringrun add HOST[:SLOTS]`` or ``ringrun drop HOST`` (`what`) and return the job's answer."""
    folder = control_folder(environ)
    jobs, problems = jobs_of(folder)
    elastic = [job for job in jobs if job.elastic]
    if beginning:
        job = _chosen(jobs, problems, beginning)
    elif elastic:
        job = _chosen(elastic, [], "")
    else:
        told = "".join(f"\n{problem}" for problem in problems)
        raise ConfigError(
            f"No elastic job of yours runs on this machine ({folder} has no socket of one). Hosts join "
            f"and leave jobs that were started with --min-np or --host-discovery-script.{told}"
        )
    if not job.elastic:
        raise ConfigError(
            f"The job {job.id} is not elastic: its hosts stay. Start it with --min-np or "
            "--host-discovery-script to change them."
        )
    return send_command(folder, job.id, {"do": what, "host": host})


def _chosen(jobs: Sequence[RunningJob], problems: Sequence[str], beginning: str) -> RunningJob:
    """Return the only job with this prefix."""
    chosen = [job for job in jobs if job.id.startswith(beginning)]
    if len(chosen) == 1:
        return chosen[0]
    if not jobs:
        told = NO_JOB
    elif not chosen:
        told = f"No running job of yours begins with {visible_line(beginning)!r}. {_listed(jobs)}."
    else:
        told = f"{_listed(chosen)}. Name one as in `ringrun stop JOB`."
    raise ConfigError("\n".join([told, *problems]))


def _listed(jobs: Sequence[RunningJob]) -> str:
    names = ", ".join(f"{job.id} ({visible_line(job.program)})" for job in jobs)
    return f"{'1 job runs' if len(jobs) == 1 else f'{len(jobs)} jobs run'}: {names}"
