"""The socket on which ``ringrun ps``, ``stop``, ``add`` and ``drop`` reach a running job of the same user.

It is a Unix socket in a directory that only the user can enter, ``$XDG_RUNTIME_DIR/ringrun`` or
``/tmp/ringrun-UID``. In addition the kernel reports the user of every connection (``SO_PEERCRED``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from ringcomm.errors import ConfigError
from ringcomm.folders import own_folder

from ..plan.job import Job

REQUEST_LIMIT_BYTES = 4096
ANSWER_LIMIT_BYTES = 1 << 20
"""An answer names all hosts of a job."""
LIMIT_S = 5.0
"""Time limit of a request and of its answer, in seconds."""
_CREDENTIALS = struct.Struct("iii")  # process id, user, group
_SUFFIX = ".sock"


def control_folder(environ: Mapping[str, str]) -> Path:
    """The directory of the control sockets of this user's jobs."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and Path(runtime).is_dir():
        return Path(runtime) / "ringrun"
    return Path(f"/tmp/ringrun-{os.getuid()}")  # noqa: S108  its owner and mode are checked


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user; True where the kernel cannot report it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True  # the directory's mode alone keeps other users away
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def job_facts(job: Job, began_s: float, ended: int) -> str:
    """What ``ringrun ps`` shows of a job, as JSON.

    Args:
        job: the job.
        began_s: when it was started, in seconds since the epoch.
        ended: how many of its ranks have ended.
    """
    return json.dumps({
        "pid": os.getpid(), "program": job.command.shown, "began_at": began_s,
        "ranks": len(job.plan.places) - ended,
        "hosts": [host.name for host in job.hosts], "elastic": job.is_elastic,
    })  # fmt: skip


class ControlSocket:
    """The server: one request per connection, each a line of JSON.

    Args:
        job: the job's identifier, which is the socket's name.
        execute: called in the server's thread with a request; returns the answer, or raises ConfigError.
        folder: its directory; None: :func:`control_folder`.
    """

    def __init__(
        self, job: str, execute: Callable[[Mapping[str, Any]], str], folder: Optional[Path] = None
    ) -> None:
        self._path = (folder or control_folder(os.environ)) / f"{job}{_SUFFIX}"
        self._execute = execute
        self._socket: Optional[socket.socket] = None
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Listen, in a thread.

        Raises:
            ConfigError: the directory belongs to another user, or cannot be written.
        """
        server = socket.socket(socket.AF_UNIX)
        try:
            with own_folder(self._path.parent, 0o700) as folder:
                os.fchmod(folder, 0o700)
            server.bind(str(self._path))
            server.listen(8)
        except OSError as problem:
            server.close()
            raise ConfigError(
                f"`ringrun stop`, `add` and `drop` cannot reach this job: the socket {self._path} cannot be "
                f"made ({problem.strerror or problem}). Set XDG_RUNTIME_DIR to a directory of your own."
            ) from None
        self._socket = server
        self._thread = threading.Thread(
            target=self._serve, args=(server,), name="ringrun-control", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Remove the socket, and end the thread."""
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
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # it has been closed
            with connection:
                if is_same_user(connection):
                    with contextlib.suppress(OSError):  # a caller that has gone needs no answer
                        self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT_S)
        try:
            request = _receive(connection, REQUEST_LIMIT_BYTES)
            if request is None:
                raise ConfigError("The request is not valid.")
            answer: Dict[str, Any] = {"ok": True, "text": self._execute(request)}
        except ConfigError as problem:
            answer = {"ok": False, "text": str(problem)}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _receive(connection: socket.socket, limit_bytes: int) -> Optional[Dict[str, Any]]:
    """The object in a line of JSON; None if what came is none, or longer than the limit."""
    data = b""
    while not data.endswith(b"\n"):
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


def running_jobs(folder: Path) -> List[str]:
    """The identifiers of this user's jobs that run now on this machine.

    Sockets that jobs have left behind (after SIGKILL) are removed.
    """
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
                found.append(path.name[: -len(_SUFFIX)])
            except ConnectionRefusedError:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            except FileNotFoundError:
                pass  # the job has ended in this moment
    return found


def send_command(folder: Path, job: str, command: Mapping[str, Any]) -> str:
    """Send a command to a running job.

    Args:
        folder: the directory of the sockets.
        job: the job's identifier.
        command: the request.

    Returns:
        the job's answer.

    Raises:
        ConfigError: the job has refused the command, or does not answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2 * LIMIT_S)
        try:
            connection.connect(str(folder / f"{job}{_SUFFIX}"))
            connection.sendall(json.dumps(dict(command)).encode() + b"\n")
            answer = _receive(connection, ANSWER_LIMIT_BYTES)
        except OSError as problem:
            raise ConfigError(f"The job {job} does not answer: {problem}.") from None
    if answer is None:
        raise ConfigError(f"The job {job} does not answer: it has ended, or its answer is not valid.")
    if not answer.get("ok"):
        raise ConfigError(str(answer.get("text")))
    return str(answer.get("text"))
