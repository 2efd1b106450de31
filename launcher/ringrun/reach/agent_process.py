"""One agent as the supervisor sees it: a process with three pipes, here or at the end of an ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence

from .protocol import Frame, FrameReader, agent_source, json_frame, payload_header

STDERR_LIMIT_BYTES = 16 * 1024


class Link:
    """Starts an agent, feeds it without blocking, and cuts its answers into frames.

    Attributes:
        argv: its command line.
        alive: whether its stdout is still open.
        answered: whether the agent has said anything.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self.attempt = 0
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.alive = False
        self._reset()

    def _reset(self) -> None:
        self._reader = FrameReader()
        self._outgoing: Deque[memoryview] = deque()
        self._stderr = bytearray()

    def start(self, config: Dict[str, Any], payload: Optional[bytes]) -> None:
        """Start the agent (again) and queue what it has to be told.

        Raises:
            OSError: the program cannot be started.
        """
        self._reset()
        self.attempt += 1
        pipe = subprocess.PIPE
        # A session of its own keeps the terminal's Ctrl-C away: the job must end in order.
        self.process = subprocess.Popen(
            self.argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self.alive = True
        self._outgoing.append(memoryview(agent_source()))
        self.send(config)
        if payload is not None:
            self._outgoing.append(memoryview(payload_header(len(payload))))
            self._outgoing.append(memoryview(payload))

    @property
    def answered(self) -> bool:
        return self._reader.started

    @property
    def at_end(self) -> bool:
        """Whether its stdout has ended."""
        return not self.alive

    @property
    def stderr_text(self) -> str:
        """The last of what it wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")

    @property
    def noise(self) -> str:
        """What came before the agent's first line."""
        return self._reader.noise.decode("utf-8", "replace")

    def descriptor(self, name: str) -> int:
        """Of ``stdin``, ``stdout`` or ``stderr``; -1 once that is closed."""
        stream = getattr(self.process, name, None)
        return -1 if stream is None or stream.closed else int(stream.fileno())

    def send(self, command: Dict[str, Any]) -> None:
        """Queue a command; it is lost if the agent is."""
        if self.descriptor("stdin") >= 0:
            self._outgoing.append(memoryview(json_frame(command)))

    @property
    def has_outgoing(self) -> bool:
        """Whether it waits for room to write."""
        return bool(self._outgoing) and self.descriptor("stdin") >= 0

    def write(self) -> None:
        """Write what fits. A reader that is gone shows in :meth:`read` soon."""
        descriptor = self.descriptor("stdin")
        while self._outgoing and descriptor >= 0:
            view = self._outgoing[0]
            try:
                written = os.write(descriptor, view[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # closing is left to those who watch the descriptor
                return
            if written == len(view):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[written:]

    def read(self) -> List[Frame]:
        """The frames that have arrived; ``alive`` is False at the end.

        Raises:
            ProtocolError: what arrives is not an agent's.
        """
        assert self.process is not None and self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 18)
        except BlockingIOError:
            return []
        if not data:
            self.alive = False
            return []
        return self._reader.feed(data)

    def read_stderr(self) -> bytes:
        """Take in what ssh or the agent complain about; b"" at the end."""
        assert self.process is not None and self.process.stderr is not None
        try:
            data = os.read(self.process.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        self._stderr += data
        del self._stderr[:-STDERR_LIMIT_BYTES]
        if not data:
            self.process.stderr.close()
        return data

    def drain_stderr(self) -> None:
        """Take in what is there now."""
        while self.descriptor("stderr") >= 0 and self.read_stderr():
            pass

    def poll(self) -> Optional[int]:
        """The process's status if it has ended."""
        return None if self.process is None else self.process.poll()

    def close_stdin(self) -> None:
        """Tell the agent that nobody is there any more: it ends everything."""
        self._outgoing.clear()
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """SIGKILL the agent's process, or the ssh that leads to it, with its helpers."""
        self.close_stdin()
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()

    def close(self) -> None:
        """Collect the process, which has ended or been killed, and close the pipes."""
        self.alive = False
        if self.process is not None:
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                self.kill()
                self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
