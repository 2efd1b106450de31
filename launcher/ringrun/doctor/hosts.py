"""A program of the doctor, or of `ringrun clean`, on each host: started, asked and ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import subprocess
import time
from typing import Any, List, Optional

from ringcomm.errors import ProtocolError

from ..job.agents import failed_start
from ..plan.job import HostJob
from ..reach.agent_process import AgentLink
from ..reach.base import retry_delay_s
from ..reach.incoming import decoded
from ..reach.protocol import program_source
from . import probe
from .answers import FORMS

START_LIMIT_S = 20.0
ANSWER_LIMIT_S = 20.0
END_S = 2.0
NOISE_LIMIT_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 24


class HostProbe:
    """A program on one host, given as a module; the first line that it prints is ``MARKER``."""

    def __init__(self, host: HostJob, program: Any = probe) -> None:
        self.host = host
        self._marker: str = program.MARKER
        # Why it does not answer; the login shell's output before the marker; the duration of the login.
        self.problem, self.noise, self.start_s = "", "", 0.0
        self.link = AgentLink(host.argv)
        self._received = b""
        # Now, and not by the threads that start programs: it parses modules, which Python 3.11 before 3.11.8
        # cannot do in several threads.
        self._program = program_source(program)

    def start(self) -> None:
        """Log in and wait for the program's first line; retry as a job does, but only a few times."""
        host, link = self.host, self.link
        while True:
            began_s = time.monotonic()
            try:
                link.launch(self._program)
            except OSError as problem:
                why = str(problem.strerror)
                self.problem = host.reach.explain_unstarted(host.name, link.argv, host.python, why)
                return
            if self._answers(began_s + START_LIMIT_S):
                self.start_s = time.monotonic() - began_s
                return
            self.end()
            if self.problem:
                return
            self.problem = failed_start(host, link, link.poll(), lambda _: None, self.noise, False) or ""
            if self.problem:
                return
            time.sleep(retry_delay_s(link.attempt, random.random()))

    def _answers(self, until: float) -> bool:
        """Read up to the program's first line; return whether it has come. If not, `problem` may say why."""
        before: List[str] = []
        self._received, received = b"", 0  # without output of an earlier command
        while before[-1:] != [self._marker]:
            line = self._line(until, NOISE_LIMIT_BYTES)
            received += len(self._received if line is None else line) + 1
            if received > NOISE_LIMIT_BYTES:
                text = f"more than {NOISE_LIMIT_BYTES} bytes of output before the program's first line"
                self.problem = f"{self.host.name}: {text}."
            elif line is None and time.monotonic() >= until:
                self.problem = f"{self.host.name}: no answer within {START_LIMIT_S:g} s of the login."
            if line is None or self.problem:
                before.append(self._received.decode("utf-8", "replace"))
                break
            before.append(line)
        started = before[-1:] == [self._marker]
        self.noise = "\n".join(text for text in before[: -1 if started else None] if text.strip())
        return started

    def ask(self, limit_s: float = ANSWER_LIMIT_S, **command: Any) -> Any:
        """Send a command; return its answer in the form of :data:`.answers.FORMS`, or None if the host has
        failed (see :attr:`problem`), also by an invalid answer.
        """
        if self.problem or self.link.process is None:
            return None
        self.link.put(json.dumps(command).encode() + b"\n")
        try:
            line = self._line(time.monotonic() + limit_s)
            if line is not None:
                return decoded(line.encode(), FORMS[command["do"]](command))
        except OSError:
            pass
        except ProtocolError as problem:
            self.problem = f"{self.host.name}: its answer ({command['do']}) is not valid: {problem}."
        self.problem = self.problem or f"{self.host.name}: it stopped answering ({command['do']})."
        self.end()
        return None

    def _line(self, until: float, limit_bytes: int = LINE_LIMIT_BYTES) -> Optional[str]:
        """Send the queued data, and return the next line of the program's output; None at its end, after the
        time limit, or if it is too long. The program is longer than the pipe's buffer, so a host that does
        not read must not block.
        """
        link = self.link
        while b"\n" not in self._received:
            if len(self._received) > limit_bytes or link.descriptor("stdout") < 0:
                return None
            events = {"stdout": selectors.EVENT_READ, "stderr": selectors.EVENT_READ}
            if link.has_outgoing:
                events["stdin"] = selectors.EVENT_WRITE
            with selectors.DefaultSelector() as selector:
                for name, event in events.items():
                    if link.descriptor(name) >= 0:
                        selector.register(link.descriptor(name), event, name)
                ready = [key.data for key, _ in selector.select(max(0.0, until - time.monotonic()))]
            if not ready:
                return None
            if "stdin" in ready:
                link.write()
            if "stderr" in ready:
                link.read_stderr()
            if "stdout" in ready:
                piece = os.read(link.descriptor("stdout"), 1 << 16)
                if not piece:
                    return None
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("utf-8", "replace")

    def end(self) -> None:
        """End the program by closing its stdin, and all processes that it has started here."""
        link = self.link
        link.close_stdin()
        if link.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.process.wait(END_S)
        link.drain_stderr()
        link.kill()
        link.close()
