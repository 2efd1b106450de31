"""How a host is reached: the interface that the modules of :mod:`ringrun.reach` implement.

A way to reach hosts only has to start a program there, with its stdin and stdout connected to a process of
this machine. Everything else (the agent, files, output, signals) passes through these two.
"""

from __future__ import annotations

import re
import shlex
from typing import List, NamedTuple, Optional, Protocol, Sequence

from .hosts import HostSpec


class Failure(NamedTuple):
    """Why a host did not start.

    Attributes:
        text: one paragraph for the user.
        retry: whether a retry may succeed.
        no_python: whether the host does not have the interpreter.
        may_appear: with ``retry``: whether to retry until the start timeout, as the host may still appear.
    """

    text: str
    retry: bool = False
    no_python: bool = False
    may_appear: bool = False


class Reach(Protocol):
    """One way to start programs on hosts. Pure: it makes command lines and explains their failures."""

    @property
    def description(self) -> str:
        """The way in a few words, for ``--dry-run``."""

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        """The command line on this machine that starts the agent on a host.

        Args:
            spec: the host.
            python: the interpreter on that host.

        Raises:
            ConfigError: an option cannot be used for this.
        """

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        """Why that command line could not be started on this machine.

        Args:
            host: the host's name as the user gave it.
            argv: the command line.
            python: the interpreter that it was to start.
            why: the system's message.
        """

    def explain_start(
        self, host: str, argv: Sequence[str], python: str, status: Optional[int], output: str
    ) -> Failure:
        """Why it ended before the agent answered.

        Args:
            host: the host's name as the user gave it.
            argv: the command line that was run.
            python: the interpreter that it was to start.
            status: its exit status, negative for a signal, None if it still runs.
            output: what it wrote.
        """

    def explain_loss(self, host: str, status: Optional[int], output: str) -> str:
        """Why it ended after the agent had answered; the arguments are those of :meth:`explain_start`."""

    def copy_line(self, spec: HostSpec, path: str, is_folder: bool) -> str:
        """A command that copies a file or a folder of this machine to a host; "" if there is none.

        Args:
            spec: the host.
            path: the path here, quoted for a shell.
            is_folder: whether it is a folder.
        """


NOTHING = "nothing"
"""In place of the output of a program that has printed none."""


def quoted(text: str) -> str:
    """A host's words on one line without control characters, in quotation marks unless they are one word.

    >>> quoted("/home/me/a.py"), quoted("gone. Run: x")
    ('/home/me/a.py', "'gone. Run: x'")
    """
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shlex.quote(shown) if "'" not in shown else '"' + re.sub(r'(["$`\\])', r"\\\1", shown) + '"'


def last_lines(text: str) -> str:
    """Return the last two lines of an output as one, quoted and without a full stop; or NOTHING."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return quoted("; ".join(lines[-2:])[-400:].rstrip(".")) if lines else NOTHING
