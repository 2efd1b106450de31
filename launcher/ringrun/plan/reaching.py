"""How a host is reached: the interface that the modules of :mod:`ringrun.reach` implement.

A way to reach hosts only has to start a program there, with its stdin and stdout connected to a process of
this machine. The agent, files, output and signals all pass through these two.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, List, NamedTuple, Optional, Protocol, Sequence

from .hosts import HostSpec


class Failure(NamedTuple):
    """Why a host did not start; `text` is a paragraph for the user."""

    text: str
    retry: bool = False  # a retry may succeed
    no_python: bool = False  # the host lacks the interpreter
    may_appear: bool = False  # retry until the start timeout, as the host may still appear


class Reach(Protocol):
    """One way to start programs on hosts. Pure: it makes command lines and explains their failures. `host` is
    the name that the user gave, `argv` the command line on this machine, `python` the interpreter on the
    host, `status` an exit status (negative for a signal, None if it still runs).
    """

    @property
    def description(self) -> str:
        """The way in a few words, for ``--dry-run``."""

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        """Return the command line that starts the agent on a host; ConfigError if an option is not usable."""

    @property
    def gets_shell(self) -> bool:
        """Whether ranks on other hosts get the launching shell's variables this way."""

    @property
    def dials_port(self) -> bool:
        """Whether hosts have dialled this machine at the port that the rendezvous has."""

    def start(self, argv: Sequence[str]) -> Any:
        """Start that command line: the pipes and methods of :class:`subprocess.Popen`; or OSError."""

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        """Return why the command line could not be started; `why` is the system's message."""

    def explain_start(
        self, host: str, argv: Sequence[str], python: str, status: Optional[int], output: str
    ) -> Failure:
        """Return why the command line ended before the agent answered."""

    def explain_loss(self, host: str, status: Optional[int], output: str) -> str:
        """Return why the command line ended after the agent had answered."""

    def copy_line(self, spec: HostSpec, path: str, is_folder: bool) -> str:
        """Return a command that copies `path` (here, quoted for a shell) to a host; "" if there is none."""


NOTHING = "nothing"
"""Replaces the output of a program that printed nothing."""


def quoted(text: str) -> str:
    """Return a host's text on one line without control characters, in quotation marks unless it is one word.

    >>> quoted("/home/me/a.py"), quoted("gone. Run: x")
    ('/home/me/a.py', "'gone. Run: x'")
    """
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shlex.quote(shown) if "'" not in shown else '"' + re.sub(r'(["$`\\])', r"\\\1", shown) + '"'


def last_lines(text: str) -> str:
    """Return the last two lines of an output as one, quoted and without a full stop; or NOTHING."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return quoted("; ".join(lines[-2:])[-400:].rstrip(".")) if lines else NOTHING
