"""A program of the doctor's, or of `ringrun clean`, on each host: started, asked and ended."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from typing import Any, List, Optional, Sequence

from ..plan.job import HostJob
from ..plan.reaching import Failure
from ..reach.protocol import program_source
from . import probe

START_LIMIT_S = 20.0
ANSWER_LIMIT_S = 20.0
END_S = 2.0
NOISE_LIMIT_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 26


class HostProbe:
    """A program on one host.

    Args:
        host: the host.
        program: its module, which has the first line that it prints as ``MARKER``.

    Attributes:
        problem: why it does not answer, or "".
        noise: what the login shell printed before its first line.
        start_s: how long the login took, in seconds.
    """

    def __init__(self, host: HostJob, program: Any = probe) -> None:
        self.host = host
        self._marker: str = program.MARKER
        self.problem, self.noise, self.start_s = "", "", 0.0
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._received = b""
        self._unsent = b""
        # Now, and not by the threads that start programs: it parses modules, which Python 3.11 before 3.11.8
        # cannot do in several threads.
        self._program = program_source(program)

    def start(self) -> None:
        """Log in and wait for the program's first line."""
        for argv, first in ((self.host.argv, b""), (self.host.fallback, self.host.finder)):
            if not argv:
                return
            failure = self._start(argv, first)
            if failure is None:
                self.problem = ""
                return
            self.problem = failure.text
            if not failure.no_python:
                return

    def _start(self, argv: Sequence[str], first: bytes) -> Optional[Failure]:
        began = time.monotonic()
        self._received = b""  # what an earlier command printed is no part of this one's first line
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                list(argv), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as problem:
            text = f"{self.host.name}: {argv[0]} cannot be started: {problem.strerror}"
            return Failure(text, no_python=True)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unsent = first + self._program
        before: List[str] = []
        received = 0
        while before[-1:] != [self._marker]:
            line = self._line(began + START_LIMIT_S, NOISE_LIMIT_BYTES)
            received += len(self._received if line is None else line) + 1
            if received > NOISE_LIMIT_BYTES:
                self.end()
                text = f"more than {NOISE_LIMIT_BYTES} bytes of output before the program's first line"
                return Failure(f"{self.host.name}: {text}.")
            if line is None:
                return self._explain(argv, began)
            before.append(line)
        self.noise = "\n".join(text for text in before[:-1] if text)
        self.start_s = time.monotonic() - began
        return None

    def _explain(self, argv: Sequence[str], began: float) -> Failure:
        assert self._process is not None and self._process.stderr is not None
        if time.monotonic() - began >= START_LIMIT_S:
            self.end()
            return Failure(f"{self.host.name}: no answer within {START_LIMIT_S:g} s of the login.")
        try:
            # A program that has closed its output without leaving is ended, and has no exit status then.
            said = self._process.communicate(timeout=END_S)[1].decode("utf-8", "replace")
            status: Optional[int] = self._process.returncode
        except subprocess.TimeoutExpired:
            said, status = "", None
        self.end()
        return self.host.reach.explain_start(self.host.name, argv, self.host.python, status, said)

    def ask(self, limit_s: float = ANSWER_LIMIT_S, **command: Any) -> Any:
        """Send a command; its answer, or None if the host has failed (see :attr:`problem`)."""
        if self.problem or self._process is None or self._process.stdin is None:
            return None
        self._unsent += json.dumps(command).encode() + b"\n"
        try:
            line = self._line(time.monotonic() + limit_s)
            answer = None if line is None else json.loads(line)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self.problem = f"{self.host.name}: it stopped answering ({command['do']})."
            self.end()
        return answer

    def _line(self, until: float, limit_bytes: int = LINE_LIMIT_BYTES) -> Optional[str]:
        """Send what is unsent, and receive the next line of the program's output.

        None at its end, when time is over, or if it is too long. The program is longer than what the system
        takes for a host that does not read.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if self._unsent:
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while b"\n" not in self._received:
                if len(self._received) > limit_bytes:
                    return None
                ready = [key.fileobj for key, _ in selector.select(max(0.0, until - time.monotonic()))]
                if not ready:
                    return None
                if process.stdin in ready and not self._send(process.stdin.fileno()):
                    selector.unregister(process.stdin)
                if process.stdout in ready:
                    piece = os.read(process.stdout.fileno(), 1 << 16)
                    if not piece:
                        return None
                    self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("utf-8", "replace")

    def _send(self, stdin: int) -> bool:
        """Send some of what is unsent; whether more is to be sent."""
        try:
            self._unsent = self._unsent[os.write(stdin, self._unsent) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._unsent = b""  # it has ended; its output says why
        return bool(self._unsent)

    def end(self) -> None:
        """End the program; it ends by itself when its stdin does."""
        if self._process is None:
            return
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
