"""The supervisor's connection to one agent: a local process or an ssh, with three pipes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence

from ..agent import agent, framing
from .protocol import Frame, FrameReader, program, with_reader

STDERR_LIMIT_BYTES = 16 * 1024
Process = Any
"""A :class:`LocalProcess`, or what has its pipes, and ``poll``, ``wait`` and ``kill``."""


class LocalProcess(subprocess.Popen):  # type: ignore[type-arg]  # no class with parameters in Python 3.8
    """A process of this machine with three pipes."""

    def __init__(self, argv: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        # In a separate session the agent does not get the terminal's Ctrl-C: the supervisor ends the job.
        super().__init__(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()


class AgentLink:
    """Starts an agent, sends it commands without blocking, and parses its output into frames. `argv` and
    `first`, the input before the agent's program, may be changed before another start. `spawn` starts the
    command line.
    """

    def __init__(
        self, argv: Sequence[str], spawn: Callable[[Sequence[str]], Process] = LocalProcess
    ) -> None:
        self.argv, self.first, self._spawn = list(argv), b"", spawn
        self.attempt = 0
        self.process: Process = None
        self.alive = False
        self._reset()

    def _reset(self) -> None:
        self._reader = FrameReader()
        self._outgoing: Deque[memoryview] = deque()
        self._stderr = bytearray()

    def start(self, config: Dict[str, Any], payload: Optional[bytes]) -> None:
        """Start the agent (again) and queue its program, its configuration and the payload."""
        self.launch(with_reader(program(agent)))
        self.send(config)
        if payload is not None:
            self.send_frame(framing.PAYLOAD, payload)

    def launch(self, first: bytes) -> None:
        """Start the command line (again) and queue the program for its interpreter. It raises OSError."""
        self._reset()
        self.attempt += 1
        self.process = self._spawn(self.argv)
        for name in ("stdin", "stdout", "stderr"):
            os.set_blocking(self.descriptor(name), False)
        self.alive = True
        self.put(self.first + first)

    @property
    def answered(self) -> bool:
        return self._reader.started

    @property
    def at_end(self) -> bool:
        """Whether its stdout has ended."""
        return not self.alive

    @property
    def stderr_text(self) -> str:
        """The last 16 KiB that the process wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")

    @property
    def noise(self) -> str:
        """The output before the agent's marker."""
        return self._reader.noise.decode("utf-8", "replace")

    def descriptor(self, name: str) -> int:
        """Return the descriptor of ``stdin``, ``stdout`` or ``stderr``; -1 after it is closed."""
        stream = getattr(self.process, name, None)
        return -1 if stream is None or stream.closed else int(stream.fileno())

    def put(self, data: bytes) -> None:
        """Queue bytes; they are dropped if stdin is closed."""
        if self.descriptor("stdin") >= 0:
            self._outgoing.append(memoryview(data))

    def send(self, command: Dict[str, Any]) -> None:
        self.send_frame(framing.JSON, json.dumps(command).encode())

    def send_frame(self, kind: int, data: bytes) -> None:
        """Queue a frame of a kind of :mod:`ringrun.agent.framing`."""
        self.put(framing.TO_AGENT.pack(kind, len(data)))
        self.put(data)

    @property
    def has_outgoing(self) -> bool:
        """Whether data is queued for the agent's stdin."""
        return bool(self._outgoing) and self.descriptor("stdin") >= 0

    @property
    def outgoing_bytes(self) -> int:
        return sum(map(len, self._outgoing))

    def write(self) -> None:
        """Write queued data without blocking. :meth:`read` reports that the agent has ended."""
        while self.has_outgoing:
            try:
                written = os.write(self.descriptor("stdin"), self._outgoing[0][: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # the event loop still watches the descriptor, and closes it later
                return
            rest = self._outgoing.popleft()[written:]
            if rest:
                self._outgoing.appendleft(rest)

    def read(self) -> List[Frame]:
        """Return the complete frames received; ``alive`` becomes False at the end of stdout."""
        try:
            data = os.read(self.descriptor("stdout"), 1 << 18)
        except BlockingIOError:
            return []
        self.alive = bool(data)
        return self._reader.feed(data)

    def read_stderr(self) -> bytes:
        """Read from stderr of ssh or the agent, and keep the last 16 KiB; b"" at the end."""
        try:
            data = os.read(self.descriptor("stderr"), 1 << 16)
        except BlockingIOError:
            return b""
        self._stderr += data
        del self._stderr[:-STDERR_LIMIT_BYTES]
        if not data:
            self.process.stderr.close()
        return data

    def drain_stderr(self) -> None:
        """Read all data that is available on stderr."""
        while self.descriptor("stderr") >= 0 and self.read_stderr():
            pass

    def poll(self) -> Optional[int]:
        """Return the process's exit status; None if it runs or was never started."""
        return None if self.process is None else self.process.poll()

    def close_stdin(self) -> None:
        """Close the agent's stdin, upon which it ends all its ranks and exits."""
        self._outgoing.clear()
        self._close("stdin")

    def _close(self, name: str) -> None:
        if self.descriptor(name) >= 0:
            with contextlib.suppress(OSError):
                getattr(self.process, name).close()

    def kill(self) -> None:
        """SIGKILL the process group of the agent, or of the ssh to it."""
        self.close_stdin()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Wait for the process, which has ended or been killed, and close the pipes."""
        self.alive = False
        if self.process is not None:
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                self.kill()
                self.process.wait()
            for name in ("stdin", "stdout", "stderr"):
                self._close(name)
