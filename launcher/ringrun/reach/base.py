"""How a host is reached: the command line that starts the agent there, retries, and explanations of failures.

A way to reach hosts only has to start a program there, with its stdin and stdout connected to a process of
this machine. The agent, files, output and signals all pass through these two. :mod:`.ssh` and :mod:`.via`
have other ways than :class:`ThisMachine`.
"""

from __future__ import annotations

import re
import socket
from typing import Callable, List, Optional, Sequence

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec
from ..plan.reaching import NOTHING, Failure, last_lines, quoted
from .agent_process import LocalProcess, Process
from .protocol import BOOT

RETRIES = 5
"""Number of retries of a host after a temporary failure, like a login that sshd dropped."""
AT_ONCE = 8
"""Maximum number of simultaneous starts: all logins may pass through one jump host."""
MAX_DELAY_S = 4.0


def retry_delay_s(attempt: int, chance: float) -> float:
    """Return the seconds before a retry, counted from 1; `chance` is random in [0, 1]."""
    return (0.3 + chance) * min(MAX_DELAY_S, float(2 ** min(attempt - 1, 8)))


def quoted_path(path: str) -> str:
    """Return a path quoted for the remote shell (sh, csh or fish), which expands a leading ``~/``."""
    if re.search(r"['\\!\n]", path):
        raise ConfigError(
            f"{path!r} cannot be passed to a remote shell: it contains a quote, a backslash, an exclamation "
            "mark or a line end. Make a symbolic link without them."
        )
    if path.startswith("~/"):
        return "~/" + quoted_path(path[2:])
    return path if re.fullmatch(r"[A-Za-z0-9_./+@%:,-]+", path) else f"'{path}'"


def remote_command(python: str) -> str:
    """Return the command for the remote login shell. It contains no secret; secrets are sent over stdin."""
    return f"{quoted_path(python)} -c '{BOOT}'"


def other_python(host: str) -> str:
    """Return instructions for a host whose interpreter is not usable."""
    return f"Choose another interpreter with --python {host}=PATH, or with python=PATH in the hostfile."


def how_to_install(python: str) -> str:
    """Return instructions to install this machine's ringcomm, which no package index has."""
    return f"Install this machine's version there, from its folder or wheel: `{python} -m pip install PATH`."


class Reach:
    """One way to start programs on hosts: it makes command lines and explains their failures. `host` is the
    name that the user gave, `argv` the command line on this machine, `python` the interpreter on the host,
    `status` an exit status (negative for a signal, None if it still runs). Subclasses add explanations.
    """

    description = ""
    """The way in a few words, for ``--dry-run``."""
    connection = "the connection to it"
    """The name of the connection to an agent, in messages."""
    gets_shell = True
    """Whether ranks on other hosts get the launching shell's variables this way."""
    dials_port = False
    """Whether hosts have dialled this machine at the port that the rendezvous has."""
    takes: Optional[Callable[[socket.socket], None]] = None
    """Takes connections of machines that join, which the rendezvous has accepted at its port."""

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        """Return the command line that starts the agent on a host; ConfigError if an option is not usable."""
        raise NotImplementedError

    def start(self, argv: Sequence[str]) -> Process:
        """Start that command line: the pipes and methods of :class:`subprocess.Popen`; or OSError."""
        return LocalProcess(argv)

    def by_hand(self, argv: Sequence[str]) -> str:
        """Return the agent's command line up to the remote program, which the user can try."""
        return ""

    def refused(
        self, host: str, argv: Sequence[str], status: Optional[int], output: str
    ) -> Optional[Failure]:
        """Return a failure of the way itself, or None if the program there failed."""
        return None

    def lacks_python(self, python: str, status: Optional[int], output: str) -> bool:
        """Return whether the failure means that the host does not have the interpreter."""
        return status in (126, 127) or (
            status == 1 and re.search(r"not found|No such file", output, re.I) is not None
        )

    def explain_start(
        self, host: str, argv: Sequence[str], python: str, status: Optional[int], output: str
    ) -> Failure:
        """Return why the command line ended before the agent answered."""
        output = output.replace(BOOT, "…")  # a program that is not a Python may print its arguments
        said = last_lines(output)
        old = re.search(r"^ringrun-old-python ([\d.]+) ?(.*)", output, re.M)
        if old:
            path = quoted(old.group(2).strip()) if old.group(2).strip() else python
            return Failure(
                f"{host}: the Python there is too old: {path} is {old.group(1)}, "
                f"and ringcomm needs 3.8 or newer. {other_python(host)}"
            )
        own = self.refused(host, argv, status, output)
        if own is not None:
            return own
        if self.lacks_python(python, status, output):
            text = f"{host}: there is no Python at {python} on that host ({said}). {other_python(host)}"
            return Failure(text, no_python=True)
        how = "was ended by a signal" if status is not None and status < 0 else f"ended with status {status}"
        return Failure(
            f"{host}: {python} {how} before the agent started. Its output: {said}. "
            f"Is it a Python? Try by hand: {self.by_hand(argv)}{quoted_path(python)} --version"
        )

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        """Return why the command line could not be started here; `why` is the system's message."""
        what = f"{host}: {argv[0]!r} cannot be started on this machine ({why})"
        return f"{what}. Install it, or check its name."

    def explain_loss(self, host: str, status: Optional[int], output: str) -> str:
        """Return why the connection to an agent that had answered has ended."""
        how = (
            "is still open" if status is None
            else f"was ended by signal {-status}" if status < 0
            else f"ended with status {status}"
        )  # fmt: skip
        said = last_lines(output)
        tail = "" if said == NOTHING else f" Its output: {said}."
        return f"{host}: {self.connection} {how} while the job was running.{tail}"


class ThisMachine(Reach):
    """Starts programs on this machine."""

    connection = "the agent there"
    description = "this machine, no ssh"

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        return [python, "-c", BOOT]

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        return f"{host}: there is no Python at {python} that can be started ({why}). {other_python(host)}"
